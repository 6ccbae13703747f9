"""Megatron-LM: its rules and plan, its messages, what its stages hold, and Muon."""
