"""Settings and fixtures that all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

from axonn_tune.io.presets import load_machine, load_model

pytest_plugins = ["slurm.cluster", "emulated.ability", "browser.chromium", "reproduced"]

settings.register_profile(
    "quick", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "quick")


@pytest.fixture(scope="session")
def perlmutter():
    """The shipped profile: nodes of four, listed rings inside them."""
    return load_machine("perlmutter")


@pytest.fixture(scope="session")
def gpt_80b():
    """The shipped model of the authors' scaling study."""
    return load_model("gpt-80b")
