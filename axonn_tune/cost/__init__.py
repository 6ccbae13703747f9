"""Prices of operations on a machine: functions from arrays of sizes to seconds.

Nothing in this package knows a parallel algorithm.
"""
