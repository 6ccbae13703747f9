"""JSON files: what is refused, and how the file and its problem are named."""

from dataclasses import dataclass

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.json_files import load_json, save_json


@dataclass(frozen=True)
class Point:
    name: str
    seconds: float


@dataclass(frozen=True)
class Curve:
    points: tuple[Point, ...]


def test_saving_and_loading_is_the_identity(tmp_path):
    save_json(tmp_path / "a.json", Point("µ", 1 / 3))
    assert load_json(tmp_path / "a.json", Point) == Point("µ", 1 / 3)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1: malformed JSON: Expecting value"),
        ('{"name":\n\n"a"', "line 3: malformed JSON"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 5_000, "a number is too long"),
        ('{"name": "a", "seconds": NaN}', "NaN is no number"),
        ('{"name": "a", "seconds": -Infinity}', "-Infinity is no number"),
        ('{"name": "a", "seconds": 1e999}', "seconds: got inf; allowed: a finite number"),
        ('{"name": "a\\u001b", "second": 1}', "unknown key; did you mean 'seconds'"),
        ("{" + ", ".join(f'"k{i}": 1' for i in range(300_000)) + "}", "more"),
        ("[1]", "got a list"),
    ],
    ids=lambda text: text[:20],
)
def test_malformed_files_are_named(tmp_path, text, part):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        load_json(path, Point)
    message = str(caught.value)
    assert message.startswith(str(path)) and part in message and message.isprintable()


@pytest.mark.timeout(20)
def test_nobody_waits_for_a_million_problems(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"points": [' + "{}," * 1_000_000 + "{}]}")
    with pytest.raises(FileError, match=r"points\[0\]\.name.*missing.* and 980 more"):
        load_json(path, Curve)
