"""What the operating system reports of drivers, variables and processes."""

import os
import sys

import pytest

from axonn_tune.io.operating_system import drivers, process_start, relevant_variables


def test_only_variables_that_change_measurements_are_kept_and_sorted():
    environment = {"OMP_NUM_THREADS": "4", "HOME": "/root", "NCCL_ALGO": "Ring", "MY_NCCL_X": "1"}
    assert list(relevant_variables(environment).items()) == [
        ("NCCL_ALGO", "Ring"),
        ("OMP_NUM_THREADS", "4"),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_kernel_and_this_process_are_known():
    assert drivers()["Linux"]
    assert process_start(os.getpid()).isdecimal()


def test_a_process_that_does_not_exist_has_no_start():
    assert process_start(2**30) == ""
