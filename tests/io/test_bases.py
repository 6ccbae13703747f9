"""Files that state only what differs from another one, their base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.bases import on_base
from axonn_tune.io.presets import (
    list_engines,
    list_machines,
    list_models,
    load_engine,
    load_machine,
    load_model,
)
from axonn_tune.spec.quantity import Quantity

pytestmark = pytest.mark.usefixtures("no_user_folders")

NETWORK = """\
links:
  - name: nvlink
  - name: roce
    unit_ranks: 8
    bandwidth_bytes_per_s: {value: 200 GB/s, origin: published, source: offer}
    latency_seconds: {value: 9 us, origin: assumed, source: me}
"""


def _refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        load_machine(path)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(str(path.parent))
    return message


def test_keys_come_on_top_and_what_belongs_together_stays_together() -> None:
    base = {
        "name": "a",
        "description": "the first",
        "n": 1,
        "rates": {"x": 1, "y": 2},
        "number": {"value": 3, "origin": "measured", "source": "me"},
        "levels": [{"name": "inner", "width": 4}, {"name": "outer", "width": 5}],
        "gone": 6,
    }
    own = {
        "name": "b",
        "base": "a",
        "rates": {"y": 7, "x": None},
        "number": {"value": 8},
        "levels": [{"name": "outer"}, {"name": "inner", "height": 9}, {"name": "new"}, 10],
        "gone": None,
    }
    assert on_base(base, own) == {
        "name": "b",
        "n": 1,
        "rates": {"y": 7},
        "number": {"value": 8},
        "levels": [
            {"name": "outer", "width": 5},
            {"name": "inner", "height": 9},
            {"name": "new"},
            10,
        ],
    }


def test_a_profile_states_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nbase: dgx-h100\n"
        "gpu:\n  memory_bytes: {value: 141 GB, origin: published, source: offer}\n"
        "host: null\n" + NETWORK
    )
    base, mine = load_machine("dgx-h100"), load_machine(path)
    assert mine.host is None
    assert mine.description == ""
    assert mine.links[0] == base.links[0]
    assert (mine.links[1].name, mine.links[1].bandwidth_bytes_per_s.value) == ("roce", 200e9)
    assert mine.gpu == replace(base.gpu, memory_bytes=Quantity(141e9, "published", "offer"))
    assert (mine.gemm, mine.kernels, mine.link_points) == (
        base.gemm,
        base.kernels,
        base.link_points,
    )


def test_a_smaller_node_keeps_only_what_was_measured_over_as_many_gpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    network = NETWORK.replace("unit_ranks: 8", "unit_ranks: 4")
    assert network != NETWORK
    path.write_text("name: mine\nbase: dgx-h100\nranks_per_node: 4\n" + network)
    (tmp_path / "more.yaml").write_text("name: more\nbase: mine.yaml\n")
    base = load_machine("dgx-h100")
    kept = tuple(point for point in base.link_points if point.stride * point.size <= 4)
    assert 0 < len(kept) < len(base.link_points)
    assert load_machine(path).link_points == kept
    assert load_machine(tmp_path / "more.yaml").link_points == kept


def test_a_base_may_be_completed_by_the_file_on_it(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("base: dgx-h100\nranks_per_node: null\n")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nbase: part.yaml\nranks_per_node: 8\n")
    assert load_machine(path).link_points == load_machine("dgx-h100").link_points


def test_points_of_its_own_are_kept_wherever_their_groups_lie(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    points = "link_points: |\n  kind,stride,size,n_rings,everywhere,nbytes,seconds\n"
    points += "  all_reduce,1,8,1,true,1048576,0.0001\n"
    network = NETWORK.replace("unit_ranks: 8", "unit_ranks: 4")
    path.write_text("name: mine\nbase: dgx-h100\nranks_per_node: 4\n" + network + points)
    assert [point.size for point in load_machine(path).link_points] == [8]


def test_a_base_is_found_by_its_path_and_may_have_a_base_itself(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.yaml").write_text("name: mine\nbase: dgx-h100\n" + NETWORK)
    path = tmp_path / "more.yaml"
    path.write_text("name: more\nbase: site/mine.yaml\nranks_per_node: 4\n")
    more = load_machine(path)
    assert (more.name, more.ranks_per_node, more.links[1].name) == ("more", 4, "roce")


def test_models_and_engines_have_bases_too(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text("name: long\nbase: gpt-80b\nseq_len: 8192\n")
    (tmp_path / "next.yaml").write_text("name: next\nbase: megatron-core\nissue_seconds: null\n")
    assert load_model("long.yaml") == replace(
        load_model("gpt-80b"), name="long", seq_len=8192, published_parameters=80e9
    )
    engine = load_engine("next.yaml")
    assert (engine.name, engine.issue_seconds) == ("next", None)
    assert engine.kernels == load_engine("megatron-core").kernels


def test_a_file_may_stand_for_the_preset_that_is_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dgx-h100.yaml").write_text("name: dgx-h100\nbase: dgx-h100\n" + NETWORK)
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    assert load_machine("dgx-h100").links[1].name == "roce"
    assert list_machines().count("dgx-h100") == 1


def test_a_mixed_folder_tells_files_with_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: dgx-h100  # NVIDIA's\n" + NETWORK)
    (tmp_path / "more.yaml").write_text("name: more\nbase: 'mine'\nranks_per_node: 4\n")
    (tmp_path / "long.yaml").write_text("name: long\nbase: gpt-80b\nseq_len: 8192\n")
    (tmp_path / "next.yaml").write_text("name: next\nbase: megatron-core\n")
    (tmp_path / "odd.yaml").write_text("name: odd\nbase: nothing\n")
    (tmp_path / "ring.yaml").write_text("name: ring\nbase: ring\n")
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    own = {"mine", "more", "long", "next", "odd", "ring"}
    assert own & set(list_machines()) == {"mine", "more"}
    assert own & set(list_models()) == {"long"}
    assert own & set(list_engines()) == {"next"}
    assert load_machine("more").links[1].name == "roce"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("base: dgx-h10\n", "base is 'dgx-h10': unknown machine; did you mean 'dgx-h100'"),
        ("base: gpt-80b\n", "base is 'gpt-80b': unknown machine"),
        ("base: 5\n", "base is 5; allowed: a name, or the path of a file"),
        ("base: null\n", "base is None; allowed: a name, or the path of a file"),
        ("base: nowhere.yaml\n", "mine.yaml: base is 'nowhere.yaml': no such file as "),
        ("base: ./mine.yaml\n", "base is './mine.yaml', which has this file as its own base"),
        ("base: dgx-h100\ngpu: null\n", "gpu: missing"),
        ("base: dgx-h100\ngpu: {speed: 1}\n", "line 3: gpu.speed: unknown key"),
        ("base: dgx-h100\nranks_per_node: [8]\n", "line 3: ranks_per_node"),
        (
            "base: dgx-h100\nkernels:\n  memory_fraction: {value: 0.9}\n",
            "line 4: kernels.memory_fraction.origin, kernels.memory_fraction.source: missing",
        ),
    ],
)
def test_what_a_base_cannot_be_is_said(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\n{text}")
    assert part in _refused(path)


def test_a_name_is_never_that_of_the_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: dgx-h100\n")
    assert "name: missing" in _refused(path)


def test_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nbase: b.yaml\n")
    (tmp_path / "b.yaml").write_text("name: b\nbase: a.yaml\n")
    assert "which has this file as its own base" in _refused(tmp_path / "a.yaml")


def test_a_problem_of_the_base_is_told_as_its_own(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("name: first\nbase: dgx-h100\nranks_per_node: none\n")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nbase: first.yaml\n" + NETWORK)
    message = _refused(path)
    assert message.startswith(str(tmp_path / "first.yaml"))
    assert "line 3: ranks_per_node" in message
    (tmp_path / "first.yaml").write_text("- a\n")
    assert "base is 'first.yaml', which holds no keys" in _refused(path)
