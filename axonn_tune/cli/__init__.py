"""The command line: a thin shell, one file per command, no arithmetic."""
