"""Time single operations on the ranks of a job: products, kernels, collectives."""
