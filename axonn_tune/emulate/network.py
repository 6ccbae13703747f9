"""Build a tree of shaped links out of network namespaces, veth pairs and bridges (iproute2).

Each rank has a namespace with one interface. One more namespace is the fabric: a bridge for
every unit that joins smaller ones. The two ends of each link are shaped, so that both
directions have the link's rate.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable, Sequence
from shutil import which

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.operating_system import process_start
from axonn_tune.spec.cluster import Cluster, Unit

INTERFACE = "eth0"
# What a link lets pass at once, and so the largest packet: small beside the messages.
BURST_BYTES = 4096
# No packet is ever dropped: queues are longer than all windows together.
QUEUE_BYTES = 2**26
# A flow may have so much under way, as hardware with credits bounds it: the most that links
# of these rates need, and so little that a short message seldom waits behind a long one.
WINDOW_BYTES = 2**15
_SETTINGS = {
    "net/ipv4/tcp_rmem": f"4096 {WINDOW_BYTES} {WINDOW_BYTES}",
    "net/ipv4/tcp_wmem": f"4096 {WINDOW_BYTES} {WINDOW_BYTES}",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
}
_NEEDED = ("ip", "tc")
PREFIX = "axonn-tune-"
_numbers = itertools.count()


def own_prefix() -> str:
    """How the names of the next cluster of this process begin: they say whose it is."""
    return f"{PREFIX}{os.getpid()}-{process_start(os.getpid())}-{next(_numbers)}-"


def check_ability() -> None:
    """Refuse a machine on which no cluster can be built.

    Raises
    ------
    InputError
        Not Linux, not root, iproute2 is missing, or the kernel refuses a shaped veth pair.
    """
    missing = [tool for tool in _NEEDED if which(tool) is None]
    if missing:
        raise InputError(f"emulate needs iproute2: {' and '.join(missing)} not found (Linux only)")
    if os.geteuid() != 0:
        raise InputError("emulate needs root, to build network namespaces; you are not")
    probe = f"{own_prefix()}probe"
    try:
        _run("ip", ["netns", "add", probe])
        _run("ip", ["-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"])
        _run("ip", ["-n", probe, "link", "add", "probe2", "type", "bridge"])
        _run("tc", ["-n", probe, "qdisc", "add", "dev", "probe0", "root", *_shape(1e6)])
    except AxonnTuneError as error:
        raise InputError(f"emulate needs veth, bridges and tc's tbf here: {error}") from None
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)


def namespaces(prefix: str = PREFIX) -> list[str]:
    """Names of the namespaces that begin so."""
    lines = _run("ip", ["netns", "list"]).splitlines()
    names = [line.split()[0] for line in lines if line]
    return sorted(name for name in names if name.startswith(prefix))


def address(rank: int) -> str:
    """The address of a rank's interface."""
    return f"10.213.{(rank + 1) // 256}.{(rank + 1) % 256}"


def rank_namespace(prefix: str, rank: int) -> str:
    """The namespace of a rank."""
    return f"{prefix}r{rank}"


def fabric_namespace(prefix: str) -> str:
    """The namespace of the bridges."""
    return f"{prefix}fabric"


def all_namespaces(cluster: Cluster, prefix: str) -> list[str]:
    """Every namespace of a cluster."""
    ranks = (rank_namespace(prefix, rank) for rank in range(cluster.n_ranks))
    return [fabric_namespace(prefix), *ranks]


def build(cluster: Cluster, prefix: str) -> None:
    """Build all of it; what fails leaves the rest for `EmulatedCluster` to tear down.

    Raises
    ------
    AxonnTuneError
        What the system refused.
    """
    fabric = fabric_namespace(prefix)
    names = all_namespaces(cluster, prefix)
    _batch("ip", [], [f"netns add {name}" for name in names])
    bridges = [f"link add {bridge} type bridge" for bridge in _bridges(cluster)]
    _batch("ip", ["-n", fabric], [*bridges, "link set lo up"])
    links: list[str] = []
    shapes: list[tuple[str, str, float]] = []
    for unit in cluster.units:
        inner, outer = _ends(unit)
        rate = unit.bandwidth_bytes_per_s
        if unit.level == 0:
            own = rank_namespace(prefix, unit.index)
            links.append(f"link add {outer} type veth peer name {INTERFACE} netns {own}")
            shapes.append((own, INTERFACE, rate))
        else:
            links.append(f"link add {outer} type veth peer name {inner}")
            links.append(f"link set {inner} master {_bridge(unit.level, unit.index)}")
            shapes.append((fabric, inner, rate))
        links.append(f"link set {outer} master {_bridge(unit.level + 1, cluster.around(unit))}")
        shapes.append((fabric, outer, rate))
    _batch("ip", ["-n", fabric], links)
    for rank in range(cluster.n_ranks):
        _configure_rank(cluster, rank_namespace(prefix, rank), rank)
    for namespace in names:
        devices = [(device, rate) for where, device, rate in shapes if where == namespace]
        limit = f"gso_max_size {BURST_BYTES}"
        _batch("ip", ["-n", namespace], [f"link set {device} {limit}" for device, _ in devices])
        qdiscs = (
            f"qdisc add dev {device} root {' '.join(_shape(rate))}" for device, rate in devices
        )
        _batch("tc", ["-n", namespace], qdiscs)
        _batch("ip", ["-n", namespace], [f"link set {device} up" for device, _ in devices])
    _batch("ip", ["-n", fabric], [f"link set {bridge} up" for bridge in _bridges(cluster)])


def _configure_rank(cluster: Cluster, namespace: str, rank: int) -> None:
    neighbours = (
        f"neigh add {address(other)} lladdr {_mac(other)} dev {INTERFACE} nud permanent"
        for other in range(cluster.n_ranks)
        if other != rank
    )
    _batch(
        "ip",
        ["-n", namespace],
        [
            "link set lo up",
            f"link set {INTERFACE} address {_mac(rank)}",
            f"addr add {address(rank)}/16 dev {INTERFACE}",
            *neighbours,
        ],
    )
    commands = (f"echo {value} > /proc/sys/{name}" for name, value in _SETTINGS.items())
    _run("ip", ["netns", "exec", namespace, "sh", "-ec", "; ".join(commands)])


def _shape(bytes_per_s: float) -> list[str]:
    """A token bucket."""
    bits = round(8 * bytes_per_s)
    return ["tbf", "rate", f"{bits}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]


def _bridges(cluster: Cluster) -> list[str]:
    """A bridge in each unit that holds others, and one that joins the outermost."""
    inner = [_bridge(unit.level, unit.index) for unit in cluster.units if unit.level > 0]
    return [*inner, _bridge(len(cluster.levels), 0)]


def _bridge(level: int, index: int) -> str:
    return f"b{level}x{index}"


def _ends(unit: Unit) -> tuple[str, str]:
    """The ends of a unit's link in the fabric: inside it, and outside."""
    return f"i{unit.level}x{unit.index}", f"o{unit.level}x{unit.index}"


def _mac(rank: int) -> str:
    return f"02:00:00:00:{rank // 256:02x}:{rank % 256:02x}"


def _batch(tool: str, options: Sequence[str], commands: Iterable[str]) -> None:
    _run(tool, [*options, "-batch", "-"], "\n".join(commands) + "\n")


def _run(tool: str, arguments: Sequence[str], text: str = "") -> str:
    done = subprocess.run([tool, *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise AxonnTuneError(f"{tool} {' '.join(arguments)}: {said}")
    return done.stdout
