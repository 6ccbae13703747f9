"""Torch's own parallelism, FSDP2 and DTensor, beside the 4D algorithm."""
