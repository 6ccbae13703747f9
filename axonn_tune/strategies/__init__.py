"""Strategies: (model, job, candidates) to a step plan and memory terms. No hardware here."""
