"""The training step of a configuration: its prediction, its timeline and its explanation.

Nothing here touches files.
"""
