"""How a command ends when its output cannot be written, or when somebody interrupts or kills it."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, all_end, children, ended, environment, ranks_of

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "axonn_tune.cli.start"]
EXPLAIN = ["explain", "--gpus", "64", "--model", "5b", "--grid", "1x2x8x4", "--all"]
RUN = ["run", "--grid", "1x1x1x2", "--model", "tiny", "--seq-len", "16", "--steps", "1000000"]


def with_files_up_to(nbytes):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["models", "list"], [*EXPLAIN, "--format", "json"]]
)
def test_a_full_disk_behind_standard_output_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "axonn-tune: no space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_short_is_a_failure(tmp_path, unbuffered):
    """Without a buffer, Python's own streams drop what a write leaves over, and say nothing."""
    with open(tmp_path / "out.json", "w") as file:
        done = subprocess.run(
            [*COMMAND, *EXPLAIN, "--format", "json"],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=with_files_up_to(4096),
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )
    assert (done.returncode, done.stderr) == (2, "axonn-tune: file too large\n")


def test_an_output_file_that_does_not_fit_leaves_the_old_one(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    done = subprocess.run(
        [*COMMAND, *EXPLAIN, "--format", "json", "--output", path],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=with_files_up_to(4096),
        env=environment(),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "out.json cannot be written: file too large" in done.stderr
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize(
    "module", ["click", "axonn_tune.cli.main", "axonn_tune.cli.suggest", "numpy", "yaml"]
)
def test_an_interrupt_while_modules_are_imported_is_silent(module):
    code = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["suggest", "--gpus", "8", "--model", "tiny"]
from axonn_tune.cli.start import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (130, -signal.SIGINT)
    assert (done.stdout, done.stderr.strip()) == ("", "")


@pytest.mark.parametrize("launcher", ["0", "1", "999999999", "many", "0/", "/5"])
def test_a_command_that_is_no_rank_does_not_end_over_a_launchers_variable(launcher):
    done = subprocess.run(
        [*COMMAND, "--version"],
        capture_output=True,
        text=True,
        env=environment(AXONN_TUNE_LAUNCHER=launcher),
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.slow
def test_an_interrupt_while_a_rank_is_handed_its_work_is_silent():
    code = f"""
import os, signal, sys
from multiprocessing import forkserver

connect = forkserver.connect_to_new_process
n_forked = 0

def interrupted(fds):
    global n_forked
    n_forked += 1
    ends = connect(fds)
    if n_forked == 2:  # the first one is no rank
        os.kill(os.getpid(), signal.SIGINT)
    return ends

forkserver.connect_to_new_process = interrupted
sys.argv[1:] = {RUN!r}
from axonn_tune.cli.start import run
if __name__ == "__main__":
    run()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def started(*arguments, **variables):
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
        start_new_session=True,
    )


def wait_for_processes(process, find, count):
    """Wait until a command has started so many processes, and return them with its children."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found := find(process.pid)) < count:
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return [*children(process.pid), *found]


# What has been started when something happens, and how much later that is: the tracker of
# multiprocessing and the server of ranks, which imports for seconds, or both ranks.
MOMENTS = [(children, 2, 0.0), (children, 2, 0.3), (children, 2, 1.5), (ranks_of, 2, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("find", "count", "delay_seconds"), MOMENTS)
def test_an_interrupt_while_ranks_start_is_silent_and_leaves_none(find, count, delay_seconds):
    process = started(*RUN, "--quiet")
    others = wait_for_processes(process, find, count)
    time.sleep(delay_seconds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, output, errors = ended(process)
    assert (code, output, errors.strip()) == (130, "", "")
    assert all_end(others, seconds=15)


@pytest.mark.slow
@pytest.mark.parametrize(("find", "count", "delay_seconds"), MOMENTS)
def test_no_rank_survives_a_launcher_that_is_killed_while_they_start(find, count, delay_seconds):
    process = started(*RUN)
    others = wait_for_processes(process, find, count)
    time.sleep(delay_seconds)
    process.kill()
    assert all_end(others, seconds=15)
    ended(process)


@pytest.mark.slow
def test_an_interrupt_of_one_rank_is_none():
    process = started(*RUN)
    assert process.stderr.readline().startswith("step ")
    for other in [*children(process.pid), *ranks_of(process.pid)]:
        os.kill(other, signal.SIGINT)
    for _ in range(3):
        assert process.stderr.readline().startswith("step ")
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process)[0] == 130


@pytest.mark.slow
def test_a_rank_that_crashes_is_named_in_one_line():
    process = started(*RUN)
    assert process.stderr.readline().startswith("step ")
    os.kill(ranks_of(process.pid)[-1], signal.SIGSEGV)
    code, _, errors = ended(process)
    said = [line for line in errors.splitlines() if not line.startswith("step ")]
    assert said == ["axonn-tune: rank 1 was ended by SIGSEGV"] and code == 2


@pytest.mark.slow
def test_a_validation_on_a_full_disk_ends_and_keeps_what_it_has(tmp_path):
    """The journal fails, and not the layouts."""
    report = tmp_path / "report.json"
    options = ["--model", "tiny", "--machine", "perlmutter", "--gpus", "2", "--device", "cpu"]
    done = subprocess.run(
        [*COMMAND, "validate", *options, "--grids", "top:2", "--steps", "3", "--output", report],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        preexec_fn=with_files_up_to(1500),
        env=environment(),
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert "report.json.partial cannot be written: " in last
    assert last.endswith("go on with --resume")
    assert not report.exists() and Path(f"{report}.partial").exists()
