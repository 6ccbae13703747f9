"""Predictions against what was measured or published."""
