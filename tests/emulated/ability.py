"""What tests on emulated clusters need of the machine."""

import os

import pytest

from axonn_tune.emulate.network import check_ability
from axonn_tune.errors import InputError


@pytest.fixture(scope="session")
def emulation():
    """Root, iproute2 and veth; a skip says what is missing, and in CI it is a failure."""
    try:
        check_ability()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
