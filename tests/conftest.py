"""Settings and fixtures that all tests share."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from axonn_tune.io.presets import load_machine, load_model

pytest_plugins = ["slurm.cluster", "emulated.ability", "browser.chromium", "reproduced"]

# Threads of torch spin while they wait, and take the cores on which other tests run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tables that are printed take the width of the developer's terminal from it.
os.environ.pop("COLUMNS", None)

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


# A shell that starts CI in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """In CI, fail where a module is skipped because a package that it imports is missing."""
    report = yield
    if os.environ.get("CI") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"CI must have what {collector.nodeid} needs: {report.longrepr[-1]}"
    return report


def pytest_collection_finish():
    """Have no later collection of garbage visit torch and the thousands of collected tests."""
    gc.freeze()


@pytest.fixture(scope="session")
def perlmutter():
    """The shipped profile: nodes of four, listed rings inside them."""
    return load_machine("perlmutter")


@pytest.fixture(scope="session")
def gpt_80b():
    """The shipped model of the authors' scaling study."""
    return load_model("gpt-80b")
