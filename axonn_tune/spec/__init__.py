"""The shared vocabulary: frozen types that every other package of the project uses.

The package computes nothing about hardware and needs only NumPy.
"""
