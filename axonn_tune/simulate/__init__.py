"""Play a step plan on a compute stream and on the links, for all candidates at once.

`program` compiles a plan to the schedule that candidates with the same lanes share,
`player` plays it on arrays, `timeline` plays one candidate operation by operation and is
the plain twin of the two. The rules are those of `spec.plan`: in-order streams, an
operation starts when its stream is free and everything that it waits for has ended, a
collective over one rank is not issued. Collectives queue on the links that they occupy:
those whose outermost links are of one level on one lane, as process groups of their own
do. While any of them runs, kernels run slower by the machine's interference
(a collective takes multiprocessors and memory bandwidth).
"""
