"""What starts a chosen configuration for real: flags and files of its framework, and a job script."""
