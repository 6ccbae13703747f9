"""Training through torch's own parallelism, FSDP2 and DTensor, to compare with the 4D algorithm."""
