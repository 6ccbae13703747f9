"""The public API: what each command does, as Python functions without a command line."""
