"""The tree of links of a cluster to emulate."""

from dataclasses import replace

import pytest

from axonn_tune.emulate import network
from axonn_tune.errors import AxonnTuneError, FileError, InputError
from axonn_tune.io.presets import list_clusters, load_cluster
from axonn_tune.spec.cluster import Cluster, OddUnit, ShapedLevel

LEVELS = (ShapedLevel("package", 1, 8.0), ShapedLevel("node", 2, 2.0), ShapedLevel("net", 4, 1.0))
TREE = Cluster("tree", 8, 4, LEVELS)


def test_every_unit_has_a_link_to_the_unit_around_it():
    assert [unit.bandwidth_bytes_per_s for unit in TREE.units] == [8.0] * 8 + [2.0] * 4 + [1.0] * 2
    around = [TREE.around(unit) for unit in TREE.units]
    assert around == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 0, 0]


def test_odd_units_have_rates_of_their_own():
    odd = replace(TREE, odd_units=(OddUnit("node", 3, 0.5),))
    rates = [unit.bandwidth_bytes_per_s for unit in odd.units if unit.level == 1]
    assert rates == [2.0, 2.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"levels": ()}, "innermost"),
        ({"levels": LEVELS[1:]}, "unit_ranks 1"),
        ({"levels": (LEVELS[0], LEVELS[2], LEVELS[1])}, "larger multiple"),
        ({"n_ranks": 6}, "larger multiple"),
        ({"n_ranks": 4}, "larger multiple"),
        ({"n_ranks": 1}, "n_ranks"),
        ({"ranks_per_node": 3}, "allowed: the ranks of a unit or of all"),
        ({"odd_units": (OddUnit("rack", 0, 1.0),)}, "rack"),
        ({"odd_units": (OddUnit("net", 2, 1.0),)}, "allowed: 0 to 1"),
    ],
)
def test_what_is_no_tree_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        replace(TREE, **changes)


def test_rates_are_in_bytes_and_never_in_bits(tmp_path):
    path = tmp_path / "mine.yaml"
    text = "name: mine\nn_ranks: 2\nranks_per_node: 2\nlevels:\n- {name: a, unit_ranks: 1, "
    path.write_text(text + "bandwidth_bytes_per_s: 10 MB/s}\n")
    assert load_cluster(path).levels[0].bandwidth_bytes_per_s == 1e7
    path.write_text(text + "bandwidth_bytes_per_s: 80 Mbit/s}\n")
    with pytest.raises(FileError, match="divide by 8"):
        load_cluster(path)


def test_ready_clusters():
    names = ["flat-8", "frontier-mini", "perlmutter-mini", "single-node-4", "uneven-8"]
    assert list_clusters() == names
    frontier = load_cluster("frontier-mini")
    rates = [level.bandwidth_bytes_per_s for level in frontier.levels]
    assert [rate / rates[-1] for rate in rates] == [8.0, 2.0, 1.0]
    assert load_cluster("frontier") == frontier


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(InputError, match="needs root"):
        network.check_ability()
    monkeypatch.setattr(network, "which", lambda tool: None)
    with pytest.raises(InputError, match="needs iproute2: ip and tc not found"):
        network.check_ability()


def test_a_kernel_without_shaped_links_is_refused_and_nothing_is_left(monkeypatch):
    commands = []

    def run(tool, arguments, text=""):
        commands.append(arguments)
        if tool == "tc":
            raise AxonnTuneError("tc qdisc add: Specified qdisc kind is unknown.")
        return ""

    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "which", lambda tool: tool)
    monkeypatch.setattr(network, "_run", run)
    deleted = []
    monkeypatch.setattr(network.subprocess, "run", lambda command, **_: deleted.append(command))
    with pytest.raises(InputError, match="tbf here: tc qdisc add: Specified qdisc kind"):
        network.check_ability()
    assert deleted == [["ip", "netns", "del", commands[0][-1]]]
