"""Predictions against steps that were measured here: which to run, errors, limits, regressions."""
