"""Measure a cluster with torch and fit the numbers of a hardware profile."""
