"""Schema: plain data to frozen dataclasses and back, with all problems at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.errors import InputError
from axonn_tune.io.schema import SchemaError, build, dotted, to_dict
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.quantity import ORIGINS, Quantity


def _quantity(value: Any) -> dict[str, Any]:
    return {"value": value, "origin": "published", "source": "vendor"}


MACHINE: dict[str, Any] = {
    "name": "box",
    "ranks_per_node": 4,
    "gpu": {
        "name": "A100",
        "n_multiprocessors": 108,
        "memory_bytes": _quantity("40 GiB"),
        "memory_bandwidth_bytes_per_s": _quantity("1.555 TB/s"),
        "peak_flops_per_s": {"bf16": _quantity("312 TFLOP/s"), "fp32": _quantity(19.5e12)},
    },
    "gemm": {
        "sustained_fraction": _quantity("87%") | {"spread_fraction": 0.02},
        "k_overhead": _quantity(200),
        "tiles": [
            {"rows": 256, "columns": 128, "speed_fraction": 1},
            {"rows": 128, "columns": 128, "speed_fraction": 0.9},
        ],
        "mode_fraction": {mode: _quantity(1.0) for mode in ("NN", "NT", "TN")},
        "points": [
            {"m": 1, "n": 2, "k": 3, "mode": "NT", "dtype": "bf16", "seconds": "12 us"},
        ],
    },
    "kernels": {
        "flash_forward_fraction": _quantity(0.6),
        "flash_backward_fraction": _quantity(0.5),
        "memory_fraction": _quantity(0.85),
        "launch_seconds": _quantity("4 us"),
        "slowdown_fraction": _quantity(0.1),
    },
    "links": [
        {
            "name": "nvlink",
            "unit_ranks": 1,
            "bandwidth_bytes_per_s": _quantity("300 GB/s"),
            "latency_seconds": _quantity("2 us"),
        },
        {
            "name": "slingshot",
            "unit_ranks": 4,
            "bandwidth_bytes_per_s": _quantity("100 GB/s"),
            "latency_seconds": _quantity("5 us"),
            "kind_fraction": {"all_reduce": _quantity(0.8)},
        },
    ],
    "memory_reserve": {
        "reserved_bytes": _quantity("1.5 GiB"),
        "fragmentation_fraction": _quantity(0.05),
    },
    "jitter_fraction": _quantity(0.01),
}


def _machine() -> dict[str, Any]:
    return copy.deepcopy(MACHINE)


def _problems(cls: type[Any], data: object) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        build(cls, data)
    assert "\n" not in str(caught.value)
    return [problem.text for problem in caught.value.problems]


def test_nested_data_becomes_frozen_dataclasses_in_si() -> None:
    machine = build(Machine, MACHINE)
    assert machine.gpu.peak_flops_per_s["bf16"].value == 312e12
    assert machine.gpu.memory_bytes.value == 40 * 2.0**30
    assert machine.gemm.sustained_fraction == Quantity(0.87, "published", "vendor", 0.02)
    assert machine.gemm.points[0].seconds == pytest.approx(12e-6)
    assert [level.unit_ranks for level in machine.links] == [1, 4]
    assert machine.links[1].kind_fraction["all_reduce"].value == 0.8
    assert isinstance(machine.gemm.tiles, tuple)
    assert isinstance(machine.gemm.tiles[0].speed_fraction, float)


def test_there_and_back_is_the_identity() -> None:
    machine = build(Machine, MACHINE)
    assert build(Machine, to_dict(machine)) == machine
    model = Model("m", 2, 64, 8, 100, 32, qkv_bias=True, bias=False, published_parameters=1e5)
    assert build(Model, to_dict(model)) == model


def test_what_is_written_has_units_and_no_defaults() -> None:
    data = to_dict(build(Machine, MACHINE))
    assert data["links"][0]["bandwidth_bytes_per_s"]["value"] == "300 GB/s"
    assert data["gpu"]["peak_flops_per_s"]["fp32"]["value"] == "19.5 TFLOP/s"
    assert "kind_fraction" not in data["links"][0]
    assert "spread_fraction" not in data["gemm"]["k_overhead"]
    assert "description" not in data


def test_numpy_floats_are_written_as_plain_floats() -> None:
    data = to_dict(Quantity(float(np.float64(0.5)), "measured", "me", np.float64(0.25)))
    assert {key: type(value) for key, value in data.items()}["spread_fraction"] is float


@dataclass(frozen=True)
class _Box:
    bandwidth_bytes_per_s: Quantity
    other_seconds: Mapping[str, Quantity] = field(default_factory=dict)


@given(
    st.floats(min_value=1e-30, max_value=1e30),
    st.floats(min_value=0, max_value=1),
    st.sampled_from(ORIGINS),
)
def test_quantities_survive_exactly(value: float, spread: float, origin: str) -> None:
    quantity = Quantity(value, origin, "somebody", spread)
    box = _Box(quantity, {"a": quantity})
    assert build(_Box, to_dict(box)) == box


def test_all_problems_are_reported_at_once_with_their_keys() -> None:
    data = _machine()
    data["links"][1]["bandwith_bytes_per_s"] = data["links"][1].pop("bandwidth_bytes_per_s")
    data["gpu"]["memory_bytes"]["value"] = "40 Gb"
    data["gpu"]["peak_flops_per_s"]["bf16"]["value"] = "312 GB"
    data["links"][0]["latency_seconds"] = 2e-6
    del data["jitter_fraction"]
    data["ranks_per_node"] = "four"
    problems = _problems(Machine, data)
    for part in (
        "links[1].bandwith_bytes_per_s: unknown key; did you mean 'bandwidth_bytes_per_s'",
        "links[1].bandwidth_bytes_per_s: missing",
        "gpu.memory_bytes.value: unit 'Gb' in '40 Gb' is not allowed (bits",
        "gpu.peak_flops_per_s.bf16.value: unit 'GB' in '312 GB'",
        "links[0].latency_seconds: got 2e-06; allowed: {value: ...",
        "jitter_fraction: missing",
        "ranks_per_node: got 'four'; allowed: a whole number",
    ):
        assert any(problem.startswith(part) for problem in problems), part
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("keys", "value", "text"),
    [
        (("gpu", "n_multiprocessors"), 0, "gpu.n_multiprocessors: is 0; allowed: a whole number"),
        (
            ("links", 1, "bandwidth_bytes_per_s", "value"),
            0,
            "links[1].bandwidth_bytes_per_s: is 0.0; allowed: above 0",
        ),
        (("gemm", "tiles"), [], "gemm.tiles: is empty"),
        (("jitter_fraction", "origin"), "guessed", "jitter_fraction.origin: is 'guessed'; allowed"),
        (("links",), [], "links: is empty"),
        (("gemm", "mode_fraction", "NN", "value"), -1, "gemm.mode_fraction.NN: is -1.0"),
        (("gemm", "points", 0, "mode"), "XX", "gemm.points[0].mode: is 'XX'; allowed: NN, NT, TN"),
    ],
)
def test_a_check_of_a_dataclass_names_its_key(
    keys: tuple[str | int, ...], value: object, text: str
) -> None:
    data = _machine()
    place: Any = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    problems = _problems(Machine, data)
    assert len(problems) == 1
    assert problems[0].startswith(text)


@dataclass(frozen=True)
class _Kinds:
    count: int
    ratio: float
    flag: bool
    name: str
    maybe: bool | None = None
    words: tuple[str, ...] = ()
    table: Mapping[str, float] = field(default_factory=dict)


GOOD = {"count": 1, "ratio": 0.5, "flag": True, "name": "a"}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("count", True, "a whole number"),
        ("count", 1.0, "a whole number"),
        ("count", "1", "a whole number"),
        ("count", None, "a whole number"),
        ("count", 10**30, "a whole number up to"),
        ("ratio", True, "a number"),
        ("ratio", None, "a number"),
        ("ratio", math.nan, "a finite number"),
        ("ratio", math.inf, "a finite number"),
        ("ratio", "1e999", "a finite number"),
        ("ratio", 10**400, "a finite number"),
        ("ratio", [1.0], "a number"),
        ("flag", 1, "true or false"),
        ("flag", "yes", "true or false"),
        ("name", 5, "text"),
        ("name", False, "text"),
        ("maybe", 1, "true or false"),
        ("words", "ab", "a list"),
        ("words", {"a": 1}, "a list"),
        ("table", [1], "a mapping"),
        ("table", {5: 1.0}, "a key of text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object, allowed: str) -> None:
    problems = _problems(_Kinds, GOOD | {key: value})
    assert len(problems) == 1
    assert problems[0].startswith(key)
    assert f"allowed: {allowed}" in problems[0]


def test_optional_values_may_be_nothing() -> None:
    assert build(_Kinds, GOOD | {"maybe": None}).maybe is None
    assert build(_Kinds, GOOD | {"maybe": False}).maybe is False


@pytest.mark.parametrize("data", [None, 5, "text", [], [{"count": 1}]])
def test_data_that_is_no_mapping_is_refused(data: object) -> None:
    assert "allowed: keys count, ratio, flag, name" in _problems(_Kinds, data)[0]


def test_problems_inside_lists_carry_their_index() -> None:
    assert _problems(_Kinds, GOOD | {"words": ["a", 2, "c", 4]}) == [
        "words[1]: got 2; allowed: text, in quotes",
        "words[3]: got 4; allowed: text, in quotes",
    ]


def test_a_flood_of_problems_is_cut_and_counted() -> None:
    with pytest.raises(InputError, match="and 980 more") as caught:
        build(_Kinds, GOOD | {"words": list(range(1000))})
    assert len(str(caught.value)) < 2000


def test_a_message_stays_one_printable_line() -> None:
    with pytest.raises(SchemaError) as caught:
        build(_Kinds, GOOD | {"ratio": "1\n\x1b[31m s"})
    assert str(caught.value).isprintable()


def test_a_type_that_files_cannot_hold_is_our_own_bug() -> None:
    @dataclass(frozen=True)
    class Wrong:
        numbers: set[int]

    with pytest.raises(TypeError, match="numbers"):
        build(Wrong, {"numbers": []})


def test_dotted() -> None:
    assert dotted(("links", 1, "a", "b")) == "links[1].a.b"
    assert dotted(()) == ""
