"""Runs one rank of a job on fake tensors and a fake process group, and records what it does."""
