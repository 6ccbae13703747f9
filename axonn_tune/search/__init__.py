"""The search: candidates are enumerated, evaluated and ranked."""
