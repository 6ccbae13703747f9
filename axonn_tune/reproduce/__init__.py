"""Predict published runs and set the numbers side by side. Pure."""
