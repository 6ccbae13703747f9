"""Strategies turn a model, a job and candidates into a step plan and memory terms."""
