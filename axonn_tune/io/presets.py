"""Find models, machines and clusters to emulate by name or path.

A name is looked up in the folders of AXONN_TUNE_PATH, then among the presets; only the
file that it resolves to is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.errors import FileError, InputError, choices_hint
from axonn_tune.io.files import read_text
from axonn_tune.io.hf_config import model_from_hf
from axonn_tune.io.yaml_files import load_yaml
from axonn_tune.spec.cluster import Cluster
from axonn_tune.spec.machine import PROFILE_VERSION, Machine
from axonn_tune.spec.model import Model

PATH_VARIABLE = "AXONN_TUNE_PATH"

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class _Kind:
    """What is looked for: its noun, its folder, and a key that only its files have."""

    noun: str
    folder: str
    marker: re.Pattern[str]


_MODEL = _Kind("model", "models", re.compile(r"\bn_layers\b"))
_MACHINE = _Kind("machine", "hardware_profiles", re.compile(r"\bmemory_reserve\b"))
_CLUSTER = _Kind("cluster", "emulate/clusters", re.compile(r"\blevels:"))
_KINDS = (_MODEL, _MACHINE, _CLUSTER)


def load_model(name_or_path: str | os.PathLike[str]) -> Model:
    """A preset by name (``80b`` finds gpt-80b), or a YAML file or Hugging Face config by path.

    Raises
    ------
    InputError
        No preset, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a model.
    """
    given = os.fspath(name_or_path)
    if _is_path(given) or _hf_folder(given) is not None:
        path = _hf_folder(given) or Path(given)
        if path.suffix.lower() == ".json":
            return _load_hf(path)
        if not path.suffix and not path.exists():
            raise FileError(
                f"{given}: no such file; allowed: a preset's name, a YAML file, or a Hugging "
                "Face config.json (nothing is downloaded)"
            )
        return load_yaml(path, Model)
    return load_yaml(_resolve(given, _MODEL), Model)


def load_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """A hardware profile by name, or from a YAML file by path.

    Raises
    ------
    InputError
        No profile, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a machine.
    """
    given = os.fspath(name_or_path)
    path = given if _is_path(given) else _resolve(given, _MACHINE)
    return load_yaml(path, Machine, "profile_version", PROFILE_VERSION)


def machine_of_gpu(name: str) -> Machine:
    """A profile by name or path, or else the first preset whose GPU has that in its name.

    Raises
    ------
    InputError
        No profile has such a GPU.
    """
    if _is_path(name) or name.lower() in _files(_MACHINE):
        return load_machine(name)
    machines = preset_machines()
    for machine in machines:
        if name.lower() in re.split(r"[^a-z0-9]+", machine.gpu.name.lower()):
            return machine
    known = ", ".join(dict.fromkeys(machine.gpu.name for machine in machines))
    raise InputError(f"no preset has a GPU '{name}'; allowed: a profile, or part of {known}")


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A ready cluster to emulate by name, or one from a YAML file by path.

    Raises
    ------
    InputError
        No cluster, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a cluster.
    """
    given = os.fspath(name_or_path)
    return load_yaml(given if _is_path(given) else _resolve(given, _CLUSTER), Cluster)


def preset_machines() -> list[Machine]:
    """The shipped profiles."""
    return [load_machine(path) for path in _yaml_files(_preset_folder(_MACHINE))]


def list_models() -> list[str]:
    """Names of all models that can be found, in natural order."""
    return _names(_MODEL)


def list_machines() -> list[str]:
    """Names of all hardware profiles that can be found, in natural order."""
    return _names(_MACHINE)


def list_clusters() -> list[str]:
    """Names of all clusters to emulate that can be found, in natural order."""
    return _names(_CLUSTER)


def _names(kind: _Kind) -> list[str]:
    return sorted((path.stem for path in _files(kind).values()), key=_natural)


def _natural(name: str) -> list[str | int]:
    """Sorts gpt-5b before gpt-10b: text and numbers alternate."""
    parts = re.split(r"([0-9]+)", name.lower())
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _is_path(text: str) -> bool:
    separators = {"/", os.sep}
    named = any(s in text for s in separators) or text.lower().endswith((*_SUFFIXES, ".json"))
    return named or os.path.isfile(text)


def _hf_folder(text: str) -> Path | None:
    config = Path(text, "config.json")
    return config if text and os.path.isfile(config) else None


def _resolve(name: str, kind: _Kind) -> Path:
    """The file of the name: exactly, else the match on dash-separated parts with fewest parts."""
    files = _files(kind, name.lower())
    wanted = name.lower().split("-")
    exact = files.get("-".join(wanted))
    if exact is not None:
        return exact
    matches: dict[int, list[str]] = {}
    for known in files:
        parts = known.split("-")
        if wanted in (parts[: len(wanted)], parts[-len(wanted) :]):
            matches.setdefault(len(parts), []).append(known)
    if not matches:
        hint = choices_hint(name, files) or "; there are no presets"
        raise InputError(f"unknown {kind.noun} '{name}'{hint}{_broken_path()}")
    best = matches[min(matches)]
    if len(best) > 1:
        choices = ", ".join(sorted(best, key=_natural))
        raise InputError(f"{kind.noun} '{name}' is ambiguous; allowed: {choices}")
    return files[best[0]]


def _files(kind: _Kind, asked: str = "") -> dict[str, Path]:
    """Lower-case name to file; the first folder that has a name wins."""
    found: dict[str, Path] = {}
    for folder in _user_folders():
        for path in _yaml_files(folder):
            if path.stem.lower() not in found and _is_of(kind, path, asked):
                found[path.stem.lower()] = path
        for path in _yaml_files(folder / kind.folder):
            found.setdefault(path.stem.lower(), path)
    for path in _yaml_files(_preset_folder(kind)):
        found.setdefault(path.stem.lower(), path)
    return found


def _user_folders() -> list[Path]:
    entries = os.environ.get(PATH_VARIABLE, "").split(os.pathsep)
    return [Path(entry).expanduser() for entry in entries if entry]


def _broken_path() -> str:
    missing = [str(folder) for folder in _user_folders() if not folder.is_dir()]
    return f" ({PATH_VARIABLE} names no folder: {', '.join(missing)})" if missing else ""


def _preset_folder(kind: _Kind) -> Path:
    """In the package where it is installed, in the repository's root otherwise."""
    installed = _PACKAGE / kind.folder
    return installed if installed.is_dir() else _PACKAGE.parent / kind.folder


def _yaml_files(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.lower().endswith(_SUFFIXES) and not entry.startswith("."):
            yield folder / entry


def _is_of(kind: _Kind, path: Path, asked: str) -> bool:
    """Whether a file of a mixed folder is of this kind, without parsing it.

    A file that bears the very name asked for is taken unless it is of another kind, so
    that loading it says what is wrong with it.
    """
    others = [other for other in _KINDS if other is not kind]
    try:
        text = read_text(path)
    except FileError:
        return path.stem.lower() == asked
    named = path.stem.lower() == asked and not any(o.marker.search(text) for o in others)
    return named or bool(kind.marker.search(text))


def _load_hf(path: Path) -> Model:
    import json

    text = read_text(path)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}, line {error.lineno}: malformed JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise FileError(f"{path}: malformed JSON: a number too long or nested too deeply") from None
    if not isinstance(config, dict):
        raise FileError(f"{path}: not a Hugging Face config; allowed: a JSON object")
    return model_from_hf(config, str(path))
