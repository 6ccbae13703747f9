"""Clusters of network namespaces: what runs on them, what their links carry, how they end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import all_end, children

from axonn_tune.emulate import network, stale
from axonn_tune.emulate.cluster import EmulatedCluster
from axonn_tune.errors import AxonnTuneError
from axonn_tune.io.presets import load_cluster
from axonn_tune.spec.cluster import Cluster, OddUnit, ShapedLevel

COMMAND = [sys.executable, "-m", "axonn_tune.cli.main", "emulate"]
pytestmark = pytest.mark.usefixtures("emulation")


def small(rate=1e6, odd_units=()):
    """Two nodes of two ranks."""
    levels = (ShapedLevel("inside", 1, 4 * rate), ShapedLevel("outside", 2, rate))
    return Cluster("small", 4, 2, levels, odd_units)


def own_namespaces(pid):
    return [name for name in network.namespaces() if name.startswith(f"{network.PREFIX}{pid}-")]


def emulate(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options
    )


def on_small(*command):
    with EmulatedCluster(small()) as cluster:
        return cluster.run(command)


def test_each_rank_finds_its_place_and_rank_0_speaks(capfd):
    variables = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $GLOO_SOCKET_IFNAME"
    code = on_small(
        "sh", "-c", f"echo {variables}; [ $RANK = $(( $LOCAL_RANK + 2 * $GROUP_RANK )) ]"
    )
    assert code == 0 and capfd.readouterr().out == "0/4 0/2 0 eth0\n"
    assert own_namespaces(os.getpid()) == []


def test_the_first_rank_to_fail_is_heard_and_its_code_returned(capfd):
    code = on_small("sh", "-c", "[ $RANK != 2 ] || { echo no luck >&2; exit 7; }; sleep 0.5")
    assert code == 7 and "rank 2: no luck" in capfd.readouterr().err


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(AxonnTuneError, match="rank 3 was ended by SIGKILL"):
        on_small("sh", "-c", "[ $RANK != 3 ] || kill -9 $$; sleep 0.5")


def test_a_command_that_is_not_there():
    assert on_small("no-such-command-anywhere") != 0


SENDER = """
import os, socket, sys, time
rank, peer, nbytes = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
address = lambda r: (f"10.213.0.{r + 1}", 5000)
if rank == peer:
    with socket.create_server(address(rank)) as server:
        connection, _ = server.accept()
        left = nbytes
        while left > 0:
            left -= len(connection.recv(2**16))
        connection.sendall(b"all")
elif rank == 0:
    for attempt in range(100):
        try:
            connection = socket.create_connection(address(peer))
            break
        except OSError:
            time.sleep(0.05)
    start = time.perf_counter()
    connection.sendall(bytes(nbytes))
    connection.recv(3)
    print(nbytes / (time.perf_counter() - start))
"""


def rate_to(peer, cluster, capfd, nbytes=400_000):
    with EmulatedCluster(cluster) as emulated:
        assert emulated.run([sys.executable, "-c", SENDER, str(peer), str(nbytes)]) == 0
    return float(capfd.readouterr().out)


@pytest.mark.parametrize(("peer", "expected"), [(1, 4e6), (2, 1e6)])
def test_links_carry_what_the_spec_says(peer, expected, capfd):
    rate = max(rate_to(peer, small(), capfd) for _ in range(3))
    # Headers take 5 %; a host that is busy may be slower, but a link never carries more.
    assert 0.6 * expected < rate < 1.02 * expected


def test_an_odd_unit_has_a_rate_of_its_own(capfd):
    odd = OddUnit("outside", 1, 2.5e5)
    assert rate_to(2, small(odd_units=(odd,)), capfd, 100_000) < 1.02 * 2.5e5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_nothing_is_left_behind_when_it_is_ended(number):
    ready = "[ $RANK != 0 ] || { sleep 1; echo ready; }; exec sleep 600"  # once all have started
    command = [*COMMAND, "--spec", "single-node-4", "--", "sh", "-c", ready]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        started = children(process.pid)
        assert len(started) >= 4 and len(own_namespaces(process.pid)) == 5
        process.send_signal(number)
        try:
            process.wait(timeout=30)
        finally:
            process.kill()
        assert all_end(started)
        deadline = time.monotonic() + 20
        while own_namespaces(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert own_namespaces(process.pid) == []
        assert "Traceback" not in process.stderr.read()


def test_a_cluster_that_cannot_be_built_is_torn_down(monkeypatch):
    monkeypatch.setattr(network, "_configure_rank", failing)
    with pytest.raises(AxonnTuneError, match="no space left"), EmulatedCluster(small()):
        pass
    assert own_namespaces(os.getpid()) == []


def failing(*_):
    raise AxonnTuneError("ip -batch -: no space left on device")


def test_stale_clusters_are_removed_and_living_ones_stay():
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    name = f"{network.PREFIX}{dead.pid}-1-0-r0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with EmulatedCluster(small()) as living:
        done = emulate("--clean")
        # It counts those that others left on this machine too.
        assert done.returncode == 0 and re.match(r"removed [1-9]\d* stale", done.stdout)
        assert name not in network.namespaces() and living.namespace(3) in network.namespaces()
    assert stale.clean() == []


def test_the_command_passes_the_exit_code_on():
    done = emulate("--spec", "single-node-4", "--", "sh", "-c", "echo hello; exit 3")
    assert done.returncode == 3 and done.stdout == "hello\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "emulate what?"),
        (("--spec", "frontier-mini"), "after --, a command"),
        (("--spec", "nowhere", "--", "true"), "unknown cluster 'nowhere'"),
        (("--spec", "./missing.yaml", "--", "true"), "missing.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments, said):
    done = emulate(*arguments)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["frontier-mini", "perlmutter-mini", "flat-8", "single-node-4", "uneven-8"]
)
def test_ready_clusters_can_be_built(name):
    cluster = load_cluster(name)
    with EmulatedCluster(cluster) as emulated:
        assert emulated.run(["true"]) == 0
