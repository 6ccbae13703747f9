"""Predictions of published runs, next to what was measured. Nothing here touches files."""
