"""What starts a configuration for real: its framework's flags and files, and a job script."""
