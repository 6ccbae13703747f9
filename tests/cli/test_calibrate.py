"""``axonn-tune calibrate`` from start to profile, and through everything that interrupts it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, all_end, ended, environment, ranks_of
from worlds import machine_of

from axonn_tune.cli.main import main
from axonn_tune.io.presets import load_machine
from axonn_tune.io.yaml_files import save_yaml

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("brief_calibration.py")


@pytest.fixture
def brief(tmp_path):
    """Starts calibrations; what a failed test has left running ends with it."""
    started = []

    def start(*arguments, ranks=2, limit=None, prefix=(), **variables):
        command = [*prefix, sys.executable, str(PROGRAM), "calibrate", "--output", "cluster.yaml"]
        process = subprocess.Popen(
            [*command, "--quick", "--ranks", str(ranks), *arguments],
            cwd=tmp_path,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(errors):
    return [line for line in errors.splitlines() if line.startswith("axonn-tune: ")]


@pytest.mark.slow
def test_a_calibration_gives_a_profile_with_which_to_search(brief, tmp_path, capsys):
    code, output, errors = ended(brief("--model", "tiny", "--gpus", "4", "--most-shapes", "5"))
    assert code == 0, errors
    assert "└─ intra-node: joins 2 x CPU" in output
    assert "products of the search" in output and "were left out" in output
    assert not (tmp_path / "cluster.yaml.partial").exists()
    path = str(tmp_path / "cluster.yaml")
    machine = load_machine(path)
    assert machine.calibration.command_line.startswith("axonn-tune calibrate --output cluster")
    assert len(machine.gemm.points) == 5 + 8 * 3
    assert machine.links[0].bandwidth_bytes_per_s.origin == "measured"
    job = ["--gpus", "4", "--model", "tiny", "--machine", path, "--dtype", "fp32"]
    main(["suggest", *job, "--global-batch", "8"])
    assert "P(best)" in capsys.readouterr().out
    main(["explain", *job, "--global-batch", "8", "--grid", "1x1x2x2"])
    assert "all_gather" in capsys.readouterr().out
    main(["machines", "show", path])
    assert "bus bandwidth" in capsys.readouterr().out


def wait_for_results(process, journal, count):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not journal.exists() or journal.read_text().count("\n") <= count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "too little was measured"
        time.sleep(0.02)


def ended_early(brief, folder, how):
    """Begin a calibration and end it; its exit code and what it has said on its error stream."""
    profile, journal = folder / "cluster.yaml", folder / "cluster.yaml.partial"
    save_yaml(profile, machine_of())
    before = profile.read_text()
    process = brief("--quiet", ENDLESS=1)
    wait_for_results(process, journal, 26)
    ranks = ranks_of(process.pid)
    if how == "kill a rank":
        os.kill(ranks[-1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    code, _, errors = ended(process)
    assert all_end(ranks)
    assert profile.read_text() == before
    assert journal.read_text().count("\n") > 26
    return code, errors


KEPT = "what was measured is kept in cluster.yaml.partial: go on with --resume"


@pytest.mark.slow
def test_an_interrupted_calibration_says_what_is_kept(brief, tmp_path):
    code, errors = ended_early(brief, tmp_path, "interrupt")
    assert code == 130 and f"axonn-tune: interrupted; {KEPT}" in errors


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(brief, tmp_path):
    code, errors = ended_early(brief, tmp_path, "kill a rank")
    assert code == 2 and said(errors) == [f"axonn-tune: rank 1 was ended by SIGKILL; {KEPT}"]


@pytest.mark.slow
def test_what_a_killed_launcher_has_measured_is_not_overwritten_and_is_resumed(brief, tmp_path):
    ended_early(brief, tmp_path, "kill the launcher")
    profile, journal = tmp_path / "cluster.yaml", tmp_path / "cluster.yaml.partial"
    measured = journal.read_text().splitlines()
    assert ended(brief("--quiet"))[0] == 2
    assert journal.read_text().splitlines() == measured
    code, _, errors = ended(brief("--quiet", "--resume"))
    assert code == 0, errors
    assert not journal.exists() and load_machine(profile).calibration is not None


@pytest.mark.sweep
def test_a_rank_that_hangs_ends_the_calibration_in_time(brief, tmp_path):
    process = brief("--quiet", "--timeout", "10", ENDLESS=1)
    wait_for_results(process, tmp_path / "cluster.yaml.partial", 26)
    waiting, hanging = ranks_of(process.pid)
    os.kill(hanging, signal.SIGSTOP)
    assert all_end([waiting])
    os.kill(hanging, signal.SIGCONT)  # so that the signal that ends it reaches it
    code, _, errors = ended(process)
    assert code == 2
    (line,) = said(errors)
    assert "failed: " in line and line.endswith("go on with --resume")
    assert (tmp_path / "cluster.yaml.partial").exists()


@pytest.mark.slow
def test_a_full_disk_is_named_and_nothing_is_lost(brief, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    code, _, errors = ended(brief("--quiet", limit=limit))
    assert code == 2
    (line,) = said(errors)
    assert "cluster.yaml.partial cannot be written: " in line
    lines = (tmp_path / "cluster.yaml.partial").read_text().splitlines()
    assert all(json.loads(line) for line in lines[:-1]) and len(lines) > 3


@pytest.mark.sweep
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a network without IPv6")
def test_a_host_without_ipv6(brief):
    network = 'sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ip link set lo up; exec "$@"'
    prefix = ["unshare", "--net", "sh", "-c", network, "sh"]
    code, _, errors = ended(brief("--quiet", prefix=prefix))
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "tiny"], "--model and --gpus go together"),
        (["--levels", "two"], "--levels is 'two'"),
        (["--only", "gemm"], "--only leaves out memory and links; give --machine"),
        (["--ranks", "1"], "one rank has no links to measure"),
        (["--machine", "nowhere"], "unknown machine 'nowhere'"),
        (["--dtype", "fp8"], "--dtype is 'fp8'; allowed: bf16, fp16, fp32"),
        (["--dtype", "fp16"], "--dtype fp16: kernels are timed in small training steps"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--resume"], "there is nothing to resume"),
        (["--import", "x.log"], "--import needs --machine"),
        (["--ranks", "4", "--levels", "3"], "--levels 3: each unit must be a multiple"),
    ],
)
def test_bad_input_is_one_line(arguments, named, tmp_path, capsys):
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]
    command = ["calibrate", "--output", str(tmp_path / "x.yaml"), "--quick", *ranks, *arguments]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert named in "".join(said(capsys.readouterr().err))


OWNER = '{"owner": {"device": "CPU", "nodes": ["a"], "quick": %s, "software": {}}}\n'
UNUSABLE = [
    (b"garbage\n", "not the journal of an interrupted calibration"),
    (b"", "not the journal of an interrupted calibration"),
    (b"\xff\xfe", "not UTF-8 text"),
    (b'{"owner": {"model": "tiny", "steps": 3}}\n', "not the journal of"),
    ((OWNER % "false").encode(), "was begun with quick False; here it is True"),
    ((OWNER % "true").encode() + b'{"key": "gemm", "result": 5}\n', "'gemm': no result with its"),
    ((OWNER % "true").encode() + b"no JSON\n{}\n", "line 2: malformed"),
]


@pytest.mark.parametrize(("content", "named"), UNUSABLE)
def test_a_journal_that_cannot_be_gone_on_with_is_refused_before_ranks_start(
    content, named, tmp_path, capsys
):
    """What a rank reports begins with its number."""
    journal = tmp_path / "x.yaml.partial"
    journal.write_bytes(content)
    command = ["calibrate", "--output", str(tmp_path / "x.yaml"), "--quick", "--ranks", "2"]
    for arguments, phrase in (["--resume"], named), ([], "go on with --resume, or delete it"):
        with pytest.raises(SystemExit) as ended:
            main([*command, *arguments])
        assert ended.value.code == 2
        (line,) = said(capsys.readouterr().err)
        assert line.startswith(f"axonn-tune: {journal}") and phrase in line
        assert ("begin anew" in line) == bool(arguments) and "is kept in" not in line
    assert journal.read_bytes() == content


@pytest.mark.slow
def test_a_folder_that_is_missing_is_named(brief):
    code, _, errors = ended(brief("--output", "nowhere/x.yaml"))
    assert code == 2
    (line,) = said(errors)
    assert "nowhere/x.yaml.partial cannot be written: no such file" in line
