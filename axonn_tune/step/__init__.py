"""One configuration's training step: its prediction, its timeline, and what explains it. Pure."""
