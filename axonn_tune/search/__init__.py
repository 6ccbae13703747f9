"""Enumerate candidates, evaluate and rank them."""
