"""YAML files: what is read and where errors lie, and that data survives a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from worlds import machine_of

from axonn_tune.errors import FileError
from axonn_tune.io.yaml_files import dump_yaml, load_yaml, parse_yaml, save_yaml
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import AttentionPoint, GemmPoint


@dataclass(frozen=True)
class Inner:
    width: int
    ratio: float = 0.0


@dataclass(frozen=True)
class Outer:
    name: str
    size_bytes: float
    inner: tuple[Inner, ...] = ()
    table: Mapping[str, float] = field(default_factory=dict)


GOOD = "name: a\nsize_bytes: 2 GB\ninner:\n  - width: 1\n  - width: 2\n    ratio: 2e-1\n"


def _message(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        load_yaml(path, Outer)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    return message.removeprefix(str(path))


def test_a_file_becomes_a_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    assert load_yaml(path, Outer) == Outer("a", 2e9, (Inner(1), Inner(2, 0.2)))
    assert load_yaml(str(path), Outer).name == "a"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e11", 2e11),
        ("1E-6", 1e-6),
        ("+3e2", 300.0),
        ("-1.5e+3", -1500.0),
        ("1.0", 1.0),
        (".5", 0.5),
        ("1.e3", 1000.0),
        ("7", 7),
        ("-7", -7),
        ("1_000", 1000),
        ("010", "010"),
        ("0x10", "0x10"),
        ("no", "no"),
        ("NO", "NO"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("2024-13-45", "2024-13-45"),
        ("12:30", "12:30"),
        ("1e5x", "1e5x"),
        ("e5", "e5"),
        ("'2e11'", "2e11"),
    ],
)
def test_plain_words(text: str, value: object) -> None:
    read = parse_yaml(f"key: {text}\n", "x.yaml")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nsize_bytes: 1\nname: b\n",
        'name: a\nsize_bytes: 1\n"name": b\n',
        "size_bytes: 1\ninner:\n  - width: 1\n    width: 2\nname: a\n",
    ],
)
def test_duplicate_keys_are_refused(tmp_path: Path, text: str) -> None:
    message = _message(tmp_path / "a.yaml", text)
    assert "appears twice" in message
    assert message.startswith((", line 3: key 'name'", ", line 4: key 'width'"))


def test_merge_keys_may_be_overridden() -> None:
    data = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", "x.yaml")
    assert data["b"] == {"x": 1, "y": 3}


def test_every_problem_has_its_line(tmp_path: Path) -> None:
    message = _message(
        tmp_path / "a.yaml",
        "# head\nname: 5\nsize_bytes: 2 Gb\n\ninner:\n  - width: 1\n  - widht: 2\n    ratio: x\n",
    )
    assert message.startswith(", line 2: name: got 5; allowed: text")
    assert "; line 3: size_bytes: unit 'Gb'" in message
    assert "; line 7: inner[1].widht: unknown key; did you mean 'width'?" in message
    assert "; line 7: inner[1].width: missing" in message
    assert "; line 8: inner[1].ratio: 'x' is not a number" in message


def test_a_missing_key_of_the_outermost_mapping_has_no_line(tmp_path: Path) -> None:
    assert _message(tmp_path / "a.yaml", "name: a\n") == ": size_bytes: missing"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: [1, 2\n", "line 2: "),
        ("name: a\n\tsize_bytes: 1\n", "line 2: "),
        ("name: a: b\n", "needs quotes"),
        ("name: 'a\n", "line 2: "),
        ("name: *b\n", "line 1: found undefined alias"),
        ("name: !!python/object/apply:os.system [ls]\n", "apply:os.system' is not allowed"),
        ("name: !!bool maybe\n", "line 1: the tag 'tag:yaml.org,2002:bool' is not allowed"),
        ("name: !!timestamp x\n", "is not allowed"),
        ('name: !!int ""\n', "is not allowed"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("? [a]\n: 1\n", "line 1: found unhashable key"),
        ("name: !!float abc\n", "is not allowed"),
        ("name: a\ninner: &a [*a]\n", "line 2: the alias 'a' names what it is part of"),
        (f"name: {'9' * 5000}\n", "a number is too long"),
        ("name: \x01\n", "characters are not allowed"),
        ("[" * 100_000, "nested deeper"),
        ("- " * 100_000 + "1", "nested deeper"),
        ("{a: " * 100_000, "nested deeper"),
        ("\n".join(" " * i + "a:" for i in range(2000)), "nested deeper"),
        ("", "got nothing"),
        ("# only a comment\n", "got nothing"),
        ("- a\n- b\n", "got a list"),
        ("just text", "got 'just text'"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, text: str, part: str) -> None:
    assert part in _message(tmp_path / "a.yaml", text)


BOMB_OF_MERGE_KEYS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 27)
)
BOMB_OF_ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 27)
)
ONE_LONG_TEXT = f"a: &a {'x' * 10_000}\nb: [{'*a, ' * 10_000}]\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [BOMB_OF_MERGE_KEYS, BOMB_OF_ALIASES, ONE_LONG_TEXT])
def test_what_aliases_multiply_is_counted(tmp_path: Path, text: str) -> None:
    assert "too many values" in _message(tmp_path / "a.yaml", text)


@pytest.mark.slow
@pytest.mark.timeout(20)
def test_a_huge_file_is_refused_soon(tmp_path: Path) -> None:
    a_million_keys = "".join(f"k{i}: 1\n" for i in range(1_000_000))
    assert "too many values" in _message(tmp_path / "a.yaml", a_million_keys)
    unknown_keys = a_million_keys[:500_000]
    assert "more" in _message(tmp_path / "a.yaml", unknown_keys)


def test_other_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"name: a\nsize_bytes: \xff\n")
    with pytest.raises(FileError, match="line 2: not UTF-8"):
        load_yaml(path, Outer)
    path.write_bytes(b"\xef\xbb\xbfname: a\r\nsize_bytes: 1\r\n")
    assert load_yaml(path, Outer) == Outer("a", 1.0)


@pytest.mark.parametrize("name", ["missing.yaml", "", "a\0b", "x" * 300])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError):
        load_yaml(str(tmp_path / name), Outer)


def test_saving_and_loading_is_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    outer = Outer("µ: no", 1e-7, (Inner(1), Inner(2, 1 / 3)), {"2e11": 2e11, "a b": 1e300})
    save_yaml(path, outer, comment="made\nby me")
    assert load_yaml(path, Outer) == outer
    assert path.read_text().startswith("# made\n# by me\nname: ")


# PyYAML's emitter in Python writes U+0085 plainly and reads it as a space; libyaml's is right.
TEXT = st.characters(
    exclude_categories=["Cs"], exclude_characters="" if yaml.__with_libyaml__ else "\x85"
)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False)
        | st.text(TEXT, max_size=10)
        | st.from_regex(r"[-+]?[0-9_.]{0,4}([eE][-+]?[0-9]{1,3})?", fullmatch=True)
        | st.sampled_from(["yes", "No", "null", "~", "<<", "=", "2001-01-01", "1:20", "0x1F"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1e "), inner),
        max_leaves=10,
    )
)
def test_plain_data_survives_a_file(data: object) -> None:
    assert parse_yaml(dump_yaml(data), "x.yaml") == data


def test_measured_points_are_kept_as_tables(tmp_path: Path) -> None:
    points = (GemmPoint(1024, 2048, 512, "NT", "bf16", 1.25e-4, 0.01),) * 2
    attention = (AttentionPoint(1, 8, 2048, 64, True, False, "fp32", 2e-3),)
    machine = machine_of(points=points)
    machine = replace(machine, kernels=replace(machine.kernels, attention_points=attention))
    path = tmp_path / "measured.yaml"
    save_yaml(path, machine)
    text = path.read_text()
    assert "1024,2048,512,NT,bf16,0.000125,0.01\n" in text and "true,false,fp32" in text
    assert load_yaml(path, Machine) == machine


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("1024,2048,512,NT,bf16", "gemm.points\\[0\\].seconds: missing"),
        ("1024,2048,x,NT,bf16,1e-4", "points\\[0\\].k: got 'x'; allowed: a whole number"),
        ("1024,2048,512,NT,bf16,1e-4,7", "points\\[0\\].column 7: unknown key"),
    ],
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    path = tmp_path / "bad.yaml"
    save_yaml(path, machine_of(points=[GemmPoint(8, 8, 8, "NN", "bf16", 1.0)]))
    table = f"m,n,k,mode,dtype,seconds\n    {row}\n"
    path.write_text(re.sub(r"m,n,k(.*\n)+?(?=\S)", table, path.read_text()))
    with pytest.raises(FileError, match=complaint):
        load_yaml(path, Machine)


def test_a_file_that_was_read_is_read_again_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "outer.yaml"
    for name in ("a", "b", "a"):
        path.write_text(f"name: {name}\nsize_bytes: 1\n")
        assert load_yaml(path, Outer).name == name
