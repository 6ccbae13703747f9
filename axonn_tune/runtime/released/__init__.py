"""Training through released engines from PyPI, whose collectives are issued and recorded here."""
