"""The rules of the house, read off the source: imports run downwards only."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "axonn_tune"

# The room "" is axonn_tune/__init__.py, the public API.
BELOW = {
    "": {"io", "api"},
    "errors": set(),
    "units": {"errors"},
    "spec": {"errors", "units"},
    "cost": {"errors", "units", "spec"},
    "strategies": {"errors", "units", "spec"},
    "simulate": {"spec"},
    "step": {"errors", "units", "spec", "cost", "strategies", "simulate"},
    "search": {"errors", "units", "spec", "cost", "strategies", "simulate", "step"},
    "studies": {"errors", "units", "spec", "strategies", "step", "search"},
    "io": {"errors", "units", "spec"},
    "runtime": {"errors", "spec", "strategies"},
    "calibrate": {"errors", "units", "spec", "cost", "strategies", "step", "search", "runtime"},
    "validate": {"errors", "units", "spec", "step", "search"},
    "reproduce": {"errors", "units", "spec", "cost", "strategies", "step", "search"},
    "emulate": {"errors", "spec", "io"},
    "launch": {"errors", "units", "spec", "strategies", "step"},
    "report": {
        *("errors", "units", "spec", "cost", "step", "search", "studies", "calibrate"),
        *("validate", "reproduce"),
    },
    "api": {"errors", "units", "spec", "strategies", "step", "search", "studies", "io", "report"},
    "cli": {
        *("", "errors", "units", "spec", "strategies", "step", "search", "studies", "validate"),
        *("reproduce", "io", "report", "api", "launch", "runtime", "calibrate", "emulate"),
    },
}
# Third-party modules that only these rooms may import, at any depth of the code.
ONLY_IN = {
    "yaml": {"io"},
    "click": {"cli"},
    "torch": {"calibrate", "runtime"},
    "pandas": {"api", "report"},
    "scipy": {"calibrate", "validate", "reproduce"},
    "matplotlib": {"report"},
}
# Never on the start-up path, so never at the top of a module.
LATE = {"pandas", "scipy", "torch", "matplotlib"}
# Rooms that commands import when they need torch.
LOADED_LATE = {"calibrate", "runtime"}
# As a function or a method: open(), Path.open(), os.open(), np.loadtxt() ...
FILE_CALLS = {"open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes"}
FILE_CALLS |= {"loadtxt", "genfromtxt", "savetxt", "fromfile", "tofile", "read_csv", "to_csv"}


def room(path):
    relative = path.relative_to(PACKAGE)
    if relative.name == "__init__.py" and len(relative.parts) == 1:
        return ""
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree):
    """Module and node; ``from axonn_tune import spec`` imports the module axonn_tune.spec."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "axonn_tune":
            for alias in node.names:
                yield f"axonn_tune.{alias.name}" if alias.name in BELOW else "axonn_tune", node
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node


def type_checking_only(tree):
    """Imports under ``if TYPE_CHECKING``."""
    return {
        id(inner)
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def inside_functions(tree):
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    tree, own = ast.parse(path.read_text()), room(path)
    for module, _ in imports(tree):
        assert not module.startswith("."), f"{own} must name {module} in full"
        if module.split(".")[0] == "axonn_tune":
            target = [*module.split("."), ""][1]
            assert target == own or target in BELOW[own], f"{own} must not import {module}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_third_party_modules_stay_in_their_rooms(path):
    tree = ast.parse(path.read_text())
    late = inside_functions(tree) | type_checking_only(tree)
    for module, node in imports(tree):
        name = module.split(".")[0]
        assert room(path) in ONLY_IN.get(name, {room(path)}), f"{name} belongs to {ONLY_IN[name]}"
        is_late = id(node) in late or room(path) in LOADED_LATE
        assert is_late or name not in LATE, f"{name} is imported at start-up"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_io_opens_files(path):
    if room(path) == "io":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # These without an owner are functions of the room io; devnull is no file.
            first = ast.unparse(node.args[0]) if node.args else ""
            allowed = called in ("write_text", "write_bytes") or first == "os.devnull"
            opens = called.rpartition(".")[2] in FILE_CALLS
            assert not opens or allowed, f"{path.name} opens a file: {called}"


def test_every_room_has_its_rule():
    assert {room(path) for path in sources()} == set(BELOW)


def test_no_cycle_between_rooms():
    TopologicalSorter(BELOW).prepare()


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.parametrize("output_format", ["table", "json", "csv", "yaml"])
def test_suggest_loads_neither_torch_nor_pandas_nor_scipy(output_format):
    loaded = run_python(
        "import sys; from axonn_tune.cli.main import main;"
        f"main(['suggest','--gpus','8','--model','tiny','--format','{output_format}']);"
        "print('LOADED', *sorted(m.split('.')[0] for m in sys.modules))"
    ).split("LOADED")[1]
    assert not {"torch", "pandas", "scipy", "matplotlib"} & set(loaded.split())
    assert "numpy" in loaded


def test_version_loads_no_numpy_and_is_in_one_place():
    printed = run_python(
        "import sys; from axonn_tune.cli.main import main; main(['--version']);"
        "print('numpy' in sys.modules)"
    )
    version = re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.M)[1]
    assert version in printed and printed.rstrip().endswith("False")
    for name in ("setup.cfg", "pyproject.toml"):
        assert f"= {version}\n" not in (ROOT / name).read_text()
