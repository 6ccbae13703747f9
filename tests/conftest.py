"""Fixtures of all tests."""

import pytest

from axonn_tune.io.presets import load_machine


@pytest.fixture(scope="session")
def perlmutter():
    """The shipped profile: nodes of four, listed rings inside them."""
    return load_machine("perlmutter")
