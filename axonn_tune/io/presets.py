"""Find models, machines and clusters to emulate by name or path.

A name is looked up in the folders that the environment variable AXONN_TUNE_PATH lists, and
then among the presets. Only the file that it resolves to is parsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from axonn_tune.errors import FileError, InputError, choices_hint
from axonn_tune.io.files import FileName, file_name, read_text
from axonn_tune.io.yaml_files import load_yaml
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import PROFILE_VERSION, Machine
from axonn_tune.spec.model import Model

if TYPE_CHECKING:
    from axonn_tune.spec.cluster import Cluster

T = TypeVar("T")
Named = TypeVar("Named", Model, Machine, Engine, "Cluster")

PATH_VARIABLE = "AXONN_TUNE_PATH"

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml")


class _PresetKind(NamedTuple):
    """A kind of file to find: its noun, its folder, and a key that only its files have."""

    noun: str
    folder: str
    marker: re.Pattern[str]


_MODEL = _PresetKind("model", "models", re.compile(r"\bn_layers\b"))
_MACHINE = _PresetKind("machine", "hardware_profiles", re.compile(r"\bmemory_reserve\b"))
_CLUSTER = _PresetKind("cluster", "emulate/clusters", re.compile(r"\blevels:"))
_ENGINE = _PresetKind("engine", "engines", re.compile(r"^strategies:", re.MULTILINE))
_PRESET_KINDS = (_MODEL, _MACHINE, _CLUSTER, _ENGINE)
# The line that names the base of a file, without a quotation mark or a comment.
_BASE = re.compile(r"""^base:\s*["']?([^\s"'#]+)""", re.MULTILINE)


def load_model(name_or_path: FileName) -> Model:
    """Return a model by name, or from a YAML file or a Hugging Face config by path.

    A part of a name is enough if it is unique: ``80b`` finds gpt-80b.

    Raises
    ------
    InputError
        No preset, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a model.
    """
    given = file_name(name_or_path, "the model")
    if _is_path(given) or _hf_folder(given) is not None:
        path = _hf_folder(given) or Path(given)
        if path.suffix.lower() == ".json":
            # To import what only these files, or clusters, need takes 4 ms.
            from axonn_tune.io.hf.config import load_hf_config

            return load_hf_config(path)
        if not path.suffix and not path.exists():
            raise FileError(
                f"{given}: no such file; allowed: a preset's name, a YAML file, or a Hugging "
                "Face config.json (nothing is downloaded)"
            )
        return _load(path, Model, _MODEL)
    return _load(_resolve(given, _MODEL), Model, _MODEL)


def load_machine(name_or_path: FileName) -> Machine:
    """Return a hardware profile by name, or from a YAML file by path.

    Raises
    ------
    InputError
        No profile, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a machine.
    """
    path = _path_of(name_or_path, _MACHINE)
    return _load(
        path, Machine, _MACHINE, "profile_version", PROFILE_VERSION, Machine.without_foreign_points
    )


def machine_of_gpu(name: str) -> Machine:
    """Return a profile by name or path, or the first preset whose GPU has the name in its own.

    For example, ``h100`` finds the first profile of an "NVIDIA H100".

    Raises
    ------
    InputError
        No preset has such a GPU.
    """
    if _is_path(name) or name.lower() in _files_by_name(_MACHINE):
        return load_machine(name)
    machines = preset_machines()
    for machine in machines:
        if name and name.lower() in re.split(r"[^a-z0-9]+", machine.gpu.name.lower()):
            return machine
    known = ", ".join(dict.fromkeys(machine.gpu.name for machine in machines))
    raise InputError(f"no preset has a GPU '{name}'; allowed: a profile, or part of {known}")


def load_cluster(name_or_path: FileName) -> Cluster:
    """Return a cluster to emulate by name, or from a YAML file by path.

    Raises
    ------
    InputError
        No cluster, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe a cluster.
    """
    from axonn_tune.spec.cluster import Cluster

    return _load(_path_of(name_or_path, _CLUSTER), Cluster, _CLUSTER)


def load_engine(name_or_path: FileName) -> Engine:
    """Return an engine by name, or from a YAML file by path.

    Raises
    ------
    InputError
        No engine, or more than one, has such a name.
    FileError
        The file is missing, malformed, or does not describe an engine.
    """
    return _load(_path_of(name_or_path, _ENGINE), Engine, _ENGINE)


def _load(
    path: str | Path,
    cls: type[T],
    kind: _PresetKind,
    version_key: str = "",
    newest: int = 0,
    settle: Callable[[T, T], T] | None = None,
) -> T:
    """Return what a file describes, which may name another file of its kind as its base."""
    return load_yaml(path, cls, version_key, newest, partial(_base_of, kind), settle)


def _base_of(kind: _PresetKind, named: str, derived: FileName) -> Path:
    """Return the file that a file names as its base: by its full name, or by the path to it.

    A file with the name of a preset may have that preset as its base.
    """
    if _looks_like_path(named):
        path = Path(derived).parent / named
        if not path.exists():
            raise InputError(f"no such file as {path}; allowed: a preset's name, or a file's path")
        return path
    files = _files_by_name(kind, named.lower(), Path(derived))
    if named.lower() not in files:
        raise InputError(f"unknown {kind.noun}{choices_hint(named, files)}")
    return files[named.lower()]


def _path_of(name_or_path: FileName, kind: _PresetKind) -> str | Path:
    """Return the file of a name, or the path itself."""
    given = file_name(name_or_path, f"the {kind.noun}")
    return given if _is_path(given) else _resolve(given, kind)


def preset_machines() -> list[Machine]:
    """Return the hardware profiles that ship with the package."""
    return [load_machine(path) for path in _yaml_files(_preset_folder(_MACHINE))]


def as_found(load: Callable[[str], Named], names: Iterable[str]) -> list[Named]:
    """Return what is loaded under some names, each with the name under which it is found.

    A file is found by its own name, whatever name stands in it.
    """
    return [replace(load(name), name=name) for name in names]


def list_models() -> list[str]:
    """Return the names of all models that can be found, in natural order."""
    return _names(_MODEL)


def list_machines() -> list[str]:
    """Return the names of all hardware profiles that can be found, in natural order."""
    return _names(_MACHINE)


def list_clusters() -> list[str]:
    """Return the names of all clusters to emulate that can be found, in natural order."""
    return _names(_CLUSTER)


def list_engines() -> list[str]:
    """Return the names of all engines that can be found, in natural order."""
    return _names(_ENGINE)


def _names(kind: _PresetKind) -> list[str]:
    return sorted((path.stem for path in _files_by_name(kind).values()), key=_natural_order)


def _natural_order(name: str) -> list[str | int]:
    """Return a sort key that puts gpt-5b before gpt-10b: text and numbers alternate."""
    parts = re.split(r"([0-9]+)", name.lower())
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _is_path(text: str) -> bool:
    return _looks_like_path(text) or os.path.isfile(text)


def _looks_like_path(text: str) -> bool:
    has_separator = "/" in text or os.sep in text
    return has_separator or text.lower().endswith((*_SUFFIXES, ".json"))


def _hf_folder(text: str) -> Path | None:
    config = Path(text, "config.json")
    return config if text and os.path.isfile(config) else None


def _resolve(name: str, kind: _PresetKind) -> Path:
    """Return the file of a name.

    If no file has exactly this name, it may be the beginning or the end of a longer one, cut at
    a dash: ``80b`` finds gpt-80b. Among several longer names, those with the fewest parts count.
    """
    name_parts = name.lower().split("-")
    files = _files_by_name(kind, name.lower())
    if name.lower() in files:
        return files[name.lower()]
    matches: dict[int, list[str]] = {}
    for known in files:
        parts = known.split("-")
        if name_parts in (parts[: len(name_parts)], parts[-len(name_parts) :]):
            matches.setdefault(len(parts), []).append(known)
    if not matches:
        hint = choices_hint(name, files) or "; there are no presets"
        raise InputError(f"unknown {kind.noun} '{name}'{hint}{_missing_folders_hint()}")
    best = matches[min(matches)]
    if len(best) > 1:
        choices = ", ".join(sorted(best, key=_natural_order))
        raise InputError(f"{kind.noun} '{name}' is ambiguous; allowed: {choices}")
    return files[best[0]]


def _files_by_name(
    kind: _PresetKind, asked: str = "", other_than: Path | None = None
) -> dict[str, Path]:
    """Return the files by their lower-case names; the first folder that has a name wins.

    Parameters
    ----------
    asked : str
        The lower-case name that the user asked for, if there is one.
    other_than : Path or None
        A file that is passed over.
    """
    files: dict[str, Path] = {}
    passed_over = other_than and os.path.realpath(other_than)

    def add(path: Path) -> None:
        if passed_over is None or os.path.realpath(path) != passed_over:
            files.setdefault(path.stem.lower(), path)

    for folder in _user_folders():
        for path in _yaml_files(folder):
            if path.stem.lower() not in files and _is_of_kind(kind, path, asked):
                add(path)
        for path in _yaml_files(folder / kind.folder):
            add(path)
    for path in _yaml_files(_preset_folder(kind)):
        add(path)
    return files


def _user_folders() -> list[Path]:
    entries = os.environ.get(PATH_VARIABLE, "").split(os.pathsep)
    # Unlike Path.expanduser, this leaves the home of an unknown user as it stands.
    return [Path(os.path.expanduser(entry)) for entry in entries if entry]


def _missing_folders_hint() -> str:
    missing = [str(folder) for folder in _user_folders() if not folder.is_dir()]
    return f" ({PATH_VARIABLE} names no folder: {', '.join(missing)})" if missing else ""


def _preset_folder(kind: _PresetKind) -> Path:
    """Return the folder of the presets, in an installed package or in the repository's root."""
    installed = _PACKAGE / kind.folder
    return installed if installed.is_dir() else _PACKAGE.parent / kind.folder


def _yaml_files(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except (OSError, ValueError):  # The name of the folder contains a zero byte.
        return
    for name in names:
        if name.lower().endswith(_SUFFIXES) and not name.startswith("."):
            yield folder / name


def _is_of_kind(kind: _PresetKind, path: Path, asked: str) -> bool:
    """Return whether a file of a mixed folder is of this kind, without parsing it.

    A file with exactly the name that the user asked for is accepted unless it is of another
    kind, so that loading it says what is wrong with it.
    """
    is_asked = path.stem.lower() == asked
    try:
        found = _kind_of(path)
    except FileError:
        return is_asked
    return found is kind or (is_asked and found is None)


def _kind_of(path: Path, derived: tuple[Path, ...] = ()) -> _PresetKind | None:
    """Return the kind of a file, or of its base; None if neither tells.

    `derived` are files of which this one is the base.
    """
    text = read_text(path)
    for kind in _PRESET_KINDS:
        if kind.marker.search(text):
            return kind
    named = _BASE.search(text)
    if named is None:
        return None
    base = named[1]
    for kind in _PRESET_KINDS:
        if base.lower() in {preset.stem.lower() for preset in _yaml_files(_preset_folder(kind))}:
            return kind
    files = (path, *derived)
    for file in (path.with_name(base + suffix) for suffix in ("", *_SUFFIXES)):
        if file.is_file() and file not in files:
            return _kind_of(file, files)
    return None
