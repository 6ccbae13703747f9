"""Several processes do what one would do, and none of them outlives its parent."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import all_end, children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system is sure to fork")

# A program of its own, since the process of a test has threads that do not survive a fork.
BEGIN = """
import os, time
from axonn_tune import processes
from axonn_tune.errors import InputError
processes._n_cores = lambda: 2
"""


def run(code):
    return subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)


def started(code):
    """A program whose two workers have been started, and their numbers."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(2):
        assert process.stdout.readline() == "begins\n"
    return process, children(process.pid)


def test_results_come_in_order_from_several_processes():
    done = run(
        "pids = []\n"
        "def work(n):\n"
        "    time.sleep(0.05 / (1 + n))\n"
        "    return n * n, os.getpid()\n"
        "results = list(processes.mapped(work, range(8)))\n"
        "print([square for square, _ in results])\n"
        "print(len({pid for _, pid in results} - {os.getpid()}))\n"
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [str([n * n for n in range(8)]), "2"]


def test_the_first_error_is_raised_as_it_was():
    done = run(
        "def work(n):\n"
        "    if n in (2, 5):\n"
        "        raise InputError(f'item {n} is bad')\n"
        "    return n\n"
        "try:\n"
        "    for result in processes.mapped(work, range(8)):\n"
        "        print(result)\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    assert done.stdout.splitlines() == ["0", "1", "item 2 is bad"]


def test_known_objects_come_back_as_the_parents_own_and_others_as_copies():
    done = run(
        "from types import SimpleNamespace\n"
        "shared = [SimpleNamespace(n=n) for n in range(8)]\n"
        "other = SimpleNamespace(n=9)\n"
        "def work(n):\n"
        "    return [shared[n], (shared[7 - n], other), os.getpid()]\n"
        "results = list(processes.mapped(work, range(8), known=shared))\n"
        "print(os.getpid() in [pid for _, _, pid in results])\n"
        "print(all(first is shared[n] for n, (first, _, _) in enumerate(results)))\n"
        "print(all(pair[0] is shared[7 - n] for n, (_, pair, _) in enumerate(results)))\n"
        "print(any(pair[1] is other for _, pair, _ in results))\n"
        "print({pair[1].n for _, pair, _ in results})\n"
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["False", "True", "True", "False", "{9}"]


def test_few_items_and_those_of_a_worker_are_worked_on_by_one_process():
    done = run(
        "def inner(n):\n"
        "    return os.getpid()\n"
        "def work(n):\n"
        "    return {os.getpid()} == set(processes.mapped(inner, range(4)))\n"
        "print(set(processes.mapped(inner, range(4), least_shared=5)) == {os.getpid()})\n"
        "print(list(processes.mapped(work, range(4))))\n"
    )
    assert done.stdout.splitlines() == ["True", "[True, True, True, True]"]


WAITS = """
def work(n):
    os.write(1, b"begins\\n")
    time.sleep(60)
list(processes.mapped(work, range(8)))
"""


def test_an_interrupt_ends_all_at_once():
    process, workers = started(WAITS)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - begin < 20
    assert process.returncode in (1, -signal.SIGINT)  # Python's own traceback of the parent
    assert all_end(workers, seconds=5)


def test_workers_end_with_a_parent_that_is_killed():
    process, workers = started(WAITS)
    process.kill()
    assert all_end(workers, seconds=5)
    process.communicate(timeout=30)
