"""Megatron-LM: its rules and plan, its messages, its stages, its allocator, and Muon."""
