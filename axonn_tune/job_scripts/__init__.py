"""Files that start a configuration: its framework's flags and files, and a job script."""
