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
# Files that `launch` copies next to a job script; the package does not import them.
COPIED = PACKAGE / "job_scripts" / "programs"

# The room "" is axonn_tune/__init__.py, the public API.
BELOW = {
    "": {"io", "api", "runtime"},
    "errors": set(),
    "correlation": set(),
    "processes": set(),
    "units": {"errors"},
    "spec": {"errors", "units"},
    "cost": {"errors", "units", "spec"},
    "strategies": {"errors", "units", "spec"},
    "simulate": {"spec"},
    "step": {"errors", "processes", "units", "spec", "cost", "simulate"},
    "search": {"errors", "processes", "units", "spec", "cost", "simulate", "step"},
    "studies": {"errors", "processes", "units", "spec", "step", "search"},
    "options": {"errors", "spec"},
    "io": {"errors", "units", "spec"},
    "runtime": {"errors", "spec", "strategies", "io"},
    "calibration": {"errors", "units", "spec", "cost", "strategies", "step", "search", "runtime"},
    "validation": {"correlation", "errors", "units", "spec", "strategies", "step", "search"},
    "reproduce": {
        "correlation",
        "errors",
        "processes",
        "units",
        "spec",
        "cost",
        "strategies",
        "step",
        "search",
    },
    "emulate": {"errors", "spec", "io"},
    "job_scripts": {"errors", "units", "spec", "io", "strategies", "step"},
    "report": {
        "errors",
        "processes",
        "learning",
        "units",
        "spec",
        "cost",
        "step",
        "search",
        "studies",
        "calibration",
        "validation",
        "reproduce",
    },
    "learning": {"errors", "units", "spec", "step", "search"},
    "api": {
        "errors",
        "units",
        "spec",
        "options",
        "strategies",
        "step",
        "search",
        "studies",
        "io",
        "learning",
        "runtime",
        "calibration",
        "validation",
        "reproduce",
        "job_scripts",
        "report",
    },
    "cli": {
        "",
        "errors",
        "units",
        "spec",
        "strategies",
        "step",
        "search",
        "studies",
        "validation",
        "reproduce",
        "io",
        "report",
        "options",
        "api",
        "job_scripts",
        "runtime",
        "calibration",
        "emulate",
    },
    "__main__": {"cli"},
}
# Third-party modules that only these rooms may import, at any depth of the code.
ONLY_IN = {
    "yaml": {"io"},
    "click": {"cli"},
    "torch": {"calibration", "runtime"},
    "pandas": {"api", "report"},
    "scipy": {"calibration", "validation"},
    "matplotlib": {"report"},
}
# Never on the start-up path, so never at the top of a module.
LATE = {"pandas", "scipy", "torch", "matplotlib"}
# Rooms that commands import when they need torch.
LOADED_LATE = {"calibration", "runtime"}
# As a function or a method: open(), Path.open(), os.open(), np.loadtxt() ...
FILE_CALLS = {"open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes"}
FILE_CALLS |= {"loadtxt", "genfromtxt", "savetxt", "fromfile", "tofile", "read_csv", "to_csv"}


def room(path):
    relative = path.relative_to(PACKAGE)
    if relative.name == "__init__.py" and len(relative.parts) == 1:
        return ""
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def sources():
    return sorted(path for path in PACKAGE.rglob("*.py") if COPIED not in path.parents)


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


def parsed_sources():
    """Every module's path in the repository, its room and its syntax tree."""
    for path in sources():
        yield path.relative_to(ROOT), room(path), ast.parse(path.read_text())


def assert_nobody_breaks(rule):
    """Fail with one message that lists every offender in the package."""
    offenders = [offender for source in parsed_sources() for offender in rule(*source)]
    assert not offenders, "\n".join(["", *offenders])


def wrong_imports(path, own_room, tree):
    """Imports that run upwards, to a neighbour without a rule, or by a relative name."""
    for module, node in imports(tree):
        place = f"{path}:{node.lineno}"
        if module.startswith("."):
            yield f"{place} must name {module} in full"
        elif module.split(".")[0] == "axonn_tune":
            target = [*module.split("."), ""][1]
            if target != own_room and target not in BELOW[own_room]:
                yield f"{place} {own_room} must not import {module}"


def test_imports_run_downwards():
    assert_nobody_breaks(wrong_imports)


def imported_algorithms(path, own_room, tree):
    """Imports of another algorithm's folder within the room strategies, which it does not need."""
    if own_room != "strategies" or path.name == "named.py":
        return
    folder = path.relative_to(PACKAGE.relative_to(ROOT) / "strategies").parent.as_posix()
    for module, node in imports(tree):
        target = re.match(r"axonn_tune\.strategies\.(axonn|megatron|zero)\b", module)
        if target and target[1] != folder:
            yield f"{path}:{node.lineno} must not import {module}"


def test_algorithms_know_nothing_of_each_other():
    assert_nobody_breaks(imported_algorithms)


def misplaced_libraries(path, own_room, tree):
    """Third-party modules outside their rooms, or loaded at start-up though they are slow."""
    late = inside_functions(tree) | type_checking_only(tree)
    for module, node in imports(tree):
        name = module.split(".")[0]
        place = f"{path}:{node.lineno}"
        if own_room not in ONLY_IN.get(name, {own_room}):
            yield f"{place} {name} belongs to {sorted(ONLY_IN[name])}"
        if name in LATE and id(node) not in late and own_room not in LOADED_LATE:
            yield f"{place} {name} is imported at start-up"


def test_third_party_modules_stay_in_their_rooms():
    assert_nobody_breaks(misplaced_libraries)


def opened_files(path, own_room, tree):
    """Calls that open a file outside the room io."""
    if own_room == "io":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # These without an owner are functions of the room io; devnull is no file.
            first = ast.unparse(node.args[0]) if node.args else ""
            allowed = called in ("write_text", "write_bytes") or first == "os.devnull"
            if called.rpartition(".")[2] in FILE_CALLS and not allowed:
                yield f"{path}:{node.lineno} opens a file: {called}"


def test_only_io_opens_files():
    assert_nobody_breaks(opened_files)


@pytest.mark.parametrize(
    ("rule", "own_room", "code", "said"),
    [
        (wrong_imports, "spec", "from axonn_tune.cost import links", "spec must not import"),
        (wrong_imports, "spec", "from . import model", "must name . in full"),
        (misplaced_libraries, "cost", "def f():\n    import torch", "torch belongs to"),
        (misplaced_libraries, "report", "import pandas", "pandas is imported at start-up"),
        (opened_files, "cost", "path.read_text()", "opens a file: path.read_text"),
    ],
)
def test_an_offender_is_found_and_named(rule, own_room, code, said):
    (offender,) = rule(Path("module.py"), own_room, ast.parse(code))
    assert offender.startswith("module.py:") and said in offender


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


GRID = ["--grid", "2x2x2x1"]
# What a command loads for some options only, or only for other strategies.
LEFT_OUT = {
    "suggest": {
        "json",
        "statistics",
        "numpy.random",
        "axonn_tune.simulate.pipeline",
        "axonn_tune.simulate.pipeline_schedule",
        "axonn_tune.search.one_layout",
    },
    "explain": {"json", "hashlib", "axonn_tune.io.kineto", "axonn_tune.report.traced"},
}


@pytest.mark.parametrize(("command", "words"), [("suggest", []), ("explain", GRID)])
def test_a_command_loads_only_what_it_needs(command, words):
    words = [command, "--gpus", "8", "--model", "tiny", "--strategy", "axonn", *words]
    loaded = run_python(
        "import sys; from axonn_tune.cli.main import main;"
        f"main({words}); print('LOADED', *sys.modules)"
    ).split("LOADED")[1]
    assert not LEFT_OUT[command] & set(loaded.split())


def test_version_loads_no_numpy_and_is_in_one_place():
    printed = run_python(
        "import sys; from axonn_tune.cli.main import main; main(['--version']);"
        "print('numpy' in sys.modules)"
    )
    version = re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.M)[1]
    assert version in printed and printed.rstrip().endswith("False")
    for name in ("setup.cfg", "pyproject.toml"):
        assert f"= {version}\n" not in (ROOT / name).read_text()


def test_the_package_itself_is_a_program():
    command = [sys.executable, "-m", "axonn_tune", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("axonn-tune, version ")
