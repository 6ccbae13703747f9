"""AxoNN's 4D algorithm: its rules and plan, its messages, and its memory."""
