"""Play a step plan on a compute stream and on the links, for all candidates at once.

`program` compiles a plan to the schedule that candidates with the same lanes share, and `player`
plays this on arrays. `timeline` plays one candidate operation by operation, as plain code that
checks the other two. `pipeline_schedule`
and `pipeline` play the passes of a pipeline, and `step` puts the parts of a step together.

The rules are those of `spec.plan`: streams work in order, an operation starts when its stream is
free and everything that it waits for has ended, and a collective over one rank is not issued.
Collectives queue on lanes: those whose outermost links are of the same level share a lane. While a
collective runs, kernels run slower by the machine's interference (a collective takes
multiprocessors and memory bandwidth).
"""
