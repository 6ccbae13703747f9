"""Plant wrong formulas one at a time and count those that the quick tests notice.

    python tests/mutation.py --seed 1 --mutants 150

A mutant is the package with one small mistake: another operator, a boundary, a negated condition,
another constant, a dropped term of a sum, min for max, or the name of another axis. Larger modules
get more of them. Each runs in a copy of the package in a temporary folder, never in the real tree:
the tests of the six rooms, and of its own room, that reach the changed function run, those that are
quick and of the same room first, until one fails. Mutants that no test fails on are shown at the
end, with the line as it was and as it became. The ones that cannot change any result are listed
with a reason in equivalent_mutants.yaml, and are not counted.

Files of tests are timed first, on the package as it is, with a note of the functions that each test
enters; this is kept in the temporary folder of the system until the package or the file changes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy  # noqa: F401  (every child process has it already)
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "axonn_tune"
ROOMS = ("cost", "simulate", "strategies", "step", "search", "studies")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")

# Names of which one is replaced by another of the same row.
ALTERNATIVES = (
    ("x", "y", "z", "data"),
    ("tensor", "context", "data", "pipeline"),
    ("shard", "replica"),
    ("secondary", "across"),
    ("weights", "gradients", "states"),
    ("all_gather", "all_reduce", "reduce_scatter"),
    ("forward", "backward"),
    ("none", "selective", "full"),
    ("flash", "unfused"),
    ("qkv", "proj", "up", "down"),
    ("NN", "NT", "TN"),
)
OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-", "*"),
    ast.Sub: ("+",),
    ast.Mult: ("/", "+"),
    ast.Div: ("*",),
    ast.FloorDiv: ("*", "/"),
    ast.Mod: ("//",),
    ast.Pow: ("*",),
    ast.BitAnd: ("|",),
    ast.BitOr: ("&",),
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
FUNCTIONS = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmin": "argmax",
    "argmax": "argmin",
    "floor": "ceil",
    "ceil": "floor",
    "any": "all",
    "all": "any",
}


@dataclass(frozen=True)
class Mutant:
    """One changed piece of source: characters `start` to `end` of a file become `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    function: int | None  # first line of the function around it

    @property
    def room(self) -> str:
        """The folder of the package in which the file lies."""
        return Path(self.path).parts[1]

    def source(self) -> str:
        """Return the changed file."""
        before = (ROOT / self.path).read_text()
        return before[: self.start] + self.text + before[self.end :]

    def change(self) -> tuple[str, str]:
        """Return the lines around the change as they were, and as they became."""
        before = (ROOT / self.path).read_text()
        first = before.rfind("\n", 0, self.start) + 1
        last = before.find("\n", self.end)
        tail = before[self.end : last]
        return _one_line(before[first:last]), _one_line(
            before[first : self.start] + self.text + tail
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Planting ----------------------------------------------------------------------------------


class _Planter(ast.NodeVisitor):
    """Collects every mutant of one file."""

    def __init__(self, path: str) -> None:
        self.path, self.source = path, (ROOT / path).read_text()
        self.offsets = [0]
        for line in self.source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line.encode()))
        self.bytes = self.source.encode()
        self.functions: list[int] = []
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(self.source))

    def plant(self, node: ast.expr, text: str) -> None:
        """Note the mutant that has `text` in the place of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (
            len(self.bytes[: self.offsets[line - 1] + column].decode())
            for line, column in (
                (node.lineno, node.col_offset),
                (node.end_lineno, node.end_col_offset),
            )
        )
        if self.source[start:end] != text:
            function = self.functions[-1] if self.functions else None
            self.mutants.append(Mutant(self.path, node.lineno, start, end, text, function))

    def visit_body(self, node: ast.AST) -> None:
        """Visit statements, but no docstrings."""
        for statement in getattr(node, "body", []):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text:
                self.visit(statement)

    def visit_Module(self, node: ast.Module) -> None:
        self.visit_body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self.functions.append(first)
        self.visit_body(node)
        self.functions.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions as they are."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave the words of errors as they are."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts as they are."""

    def visit_keyword(self, node: ast.keyword) -> None:
        """Leave alone whether `zip` checks lengths: it is no part of a formula."""
        if node.arg != "strict":
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        """Leave imports as they are."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave imports as they are."""

    def visit_If(self, node: ast.If) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Take the other branch; comparisons have mutants of their own."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        if not isinstance(test, ast.Compare) or len(test.ops) > 1:
            self.plant(test, f"(not ({ast.unparse(test)}))")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        is_text = any(
            isinstance(n, ast.Constant | ast.JoinedStr) and isinstance(getattr(n, "value", ""), str)
            for n in (node.left, node.right)
        )
        is_type = isinstance(node.op, ast.BitOr) and (left[:1].isupper() or right == "None")
        if not is_text and not is_type:
            for symbol in OPERATORS.get(type(node.op), ()):
                self.plant(node, f"(({left}) {symbol} ({right}))")
            if isinstance(node.op, ast.Add | ast.Sub):
                self.plant(node, f"({left})")
            if isinstance(node.op, ast.Add):
                self.plant(node, f"({right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = " or " if isinstance(node.op, ast.And) else " and "
        self.plant(node, f"({other.join(f'({ast.unparse(value)})' for value in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.plant(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            values = [ast.unparse(value) for value in (node.left, *node.comparators)]
            symbols = [_SYMBOLS[type(other)] for other in node.ops]
            symbols[i] = COMPARISONS[type(operator)]
            text = f"({values[0]})"
            for symbol, value in zip(symbols, values[1:], strict=True):
                text += f" {symbol} ({value})"
            self.plant(node, f"({text})")
            if isinstance(operator, ast.Lt | ast.Gt | ast.LtE | ast.GtE) and len(node.ops) == 1:
                self.plant(node, f"(not {text})".replace(symbols[0], _SYMBOLS[type(operator)], 1))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name in FUNCTIONS:
            if isinstance(node.func, ast.Name):
                self.plant(node.func, FUNCTIONS[name])
            elif isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                self.plant(node.func, f"{owner}.{FUNCTIONS[name]}")
        if name == "isinstance":
            return
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # np.minimum.reduce and the like
        if node.attr in ("reduce", "accumulate") and isinstance(node.value, ast.Attribute):
            other = FUNCTIONS.get(node.value.attr)
            if other:
                self.plant(node, f"np.{other}.{node.attr}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.plant(node, str(not value))
        elif isinstance(value, int | float):
            self.plant(node, repr(value + 1 if abs(value) < 100 else value * 2))
            if isinstance(value, float) and value not in (0.0, 1.0):
                self.plant(node, repr(value / 2))
        elif isinstance(value, str):
            rows = [row for row in ALTERNATIVES if value in row]
            for other in dict.fromkeys(name for row in rows for name in row):
                if other != value:
                    self.plant(node, f'"{other}"')


_SYMBOLS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}


def _is_program(mutant: Mutant) -> bool:
    """Whether the changed file can be compiled, and is another program than the original."""
    try:
        changed = ast.parse(mutant.source())
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse((ROOT / mutant.path).read_text()))


def drawn(rooms: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """So many mutants at random, from each module in proportion to its lines of code."""
    chance = random.Random(seed)
    left = {}
    for room in rooms:
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            mutants = _Planter(name).mutants
            chance.shuffle(mutants)
            if mutants:
                left[name] = (sum(1 for line in path.read_text().splitlines() if line), mutants)
    chosen: list[Mutant] = []
    while len(chosen) < count and left:
        names = list(left)
        (name,) = chance.choices(names, [left[name][0] for name in names])
        mutant = left[name][1].pop()
        if _is_program(mutant):
            chosen.append(mutant)
        if not left[name][1]:
            del left[name]
    return chosen


def all_at(places: Sequence[str]) -> list[Mutant]:
    """Every mutant of some lines, each written as ``path:line``."""
    chosen = []
    for place in places:
        path, _, line = place.rpartition(":")
        of_line = [mutant for mutant in _Planter(path).mutants if mutant.line == int(line)]
        chosen += [mutant for mutant in of_line if _is_program(mutant)]
    return chosen


# Running -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """What is known of the tests: seconds of each, and the functions that each enters.

    reached : by ``path:first line of a function``, the tests that enter it
    """

    seconds: dict[str, float]
    reached: dict[str, list[str]]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Tests that may notice the mutant: quick ones of its room first, slow ones last."""
        if mutant.function is None:
            keys = [key for key in self.reached if key.startswith(f"{mutant.path}:")]
            names = set(self.seconds) if not keys else set()
            names |= {name for name in self.seconds if f"tests/{mutant.room}/" in name}
            for key in keys:
                names |= set(self.reached[key])
        else:
            names = set(self.reached.get(f"{mutant.path}:{mutant.function}", ()))

        def order(name: str) -> tuple[int, str]:
            doublings = round(math.log2(max(self.seconds[name], 0.01)))
            return doublings - 2 * (f"tests/{mutant.room}/" in name), name

        return sorted(names, key=order)


class _Recorder:
    """A pytest plugin that times tests and notes which functions they enter.

    What a fixture enters counts for all tests of its file, and a function that keeps its results
    for all tests that enter its module: these do not enter it again.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = str(folder / PACKAGE) + os.sep
        self._folder = str(folder) + os.sep
        self._entered: set[tuple[str, int]] = set()
        self._own: dict[str, set[str]] = defaultdict(set)
        self._of_file: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def _trace(self, frame, event, argument):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if code.co_filename.startswith(self._prefix):
            self._entered.add((code.co_filename, code.co_firstlineno))

    @contextlib.contextmanager
    def _recording(self, into: set[str]) -> Iterator[None]:
        self._entered = set()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            into |= {f"{path[len(self._folder) :]}:{line}" for path, line in self._entered}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item):  # type: ignore[no-untyped-def]
        with self._recording(self._of_file[item.nodeid.partition("::")[0]]):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):  # type: ignore[no-untyped-def]
        with self._recording(self._own[item.nodeid]):
            yield

    def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def entered(self) -> dict[str, list[str]]:
        """Return by test the functions of the package that it enters."""
        cached = _cached_functions()
        found = {}
        for name in self.seconds:
            entered = self._own[name] | self._of_file[name.partition("::")[0]]
            paths = {key.rpartition(":")[0] for key in entered}
            kept = {key for path in paths for key in cached.get(path, ())}
            found[name] = sorted(entered | kept)
        return found


def _cached_functions() -> dict[str, list[str]]:
    """Return, by file, the functions whose decorators keep results between calls."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if any("cache" in ast.unparse(decorator) for decorator in decorators):
                found[name].append(f"{name}:{min(decorator.lineno for decorator in decorators)}")
    return found


class _Orderly:
    """A pytest plugin that runs the wanted tests alone, in their order."""

    def __init__(self, wanted: Sequence[str], seconds: dict[str, float]) -> None:
        self._place = {name: i for i, name in enumerate(wanted)}
        self._seconds = seconds
        self.killer = ""

    def pytest_collection_modifyitems(self, config, items):  # type: ignore[no-untyped-def]
        kept = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(kept, key=lambda item: self._place[item.nodeid])
        if config.pluginmanager.hasplugin("timeout"):
            for item in items:
                limit = 20.0 + 10.0 * self._seconds[item.nodeid]
                item.add_marker(pytest.mark.timeout(limit))

    def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
        if report.failed:
            self.killer = self.killer or report.nodeid

    def pytest_collectreport(self, report):  # type: ignore[no-untyped-def]
        if report.failed:
            self.killer = self.killer or f"import of {report.nodeid}"


def _prepare(folder: Path) -> None:
    """Copy package and tests into a folder, and link to the rest of the tree."""
    for entry in ROOT.iterdir():
        if entry.name in (PACKAGE, "tests"):
            ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache")
            shutil.copytree(entry, folder / entry.name, ignore=ignored)
        elif entry.name not in (".git", ".hypothesis"):
            (folder / entry.name).symlink_to(entry)


def _enter(folder: Path) -> None:
    """Let this process import the package from a folder, and always draw the same examples."""
    os.chdir(folder)
    os.environ.update(CI="1", PYTHONPATH=str(folder), PYTHONHASHSEED="0")
    here = [str(ROOT), str(ROOT / "tests"), ""]
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in here)]


_OPTIONS = (
    "-q",
    "-m",
    "not slow and not sweep",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestWarning",
)


def _pytest(arguments: Sequence[str], plugin: object, folder: Path) -> int:
    options = [*_OPTIONS, f"--rootdir={folder}", f"-c{folder / 'pyproject.toml'}"]
    with (
        (folder / "output.txt").open("w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        return int(pytest.main([*options, *arguments], plugins=[plugin]))


def _forked(work: Callable[[], dict[str, object]], answer: Path) -> int:
    """Start a process that does the work and writes its answer; its number."""
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    status = 1
    try:
        answer.write_text(json.dumps(work()))
        status = 0
    except BaseException as error:
        answer.write_text(json.dumps({"error": repr(error)}))
    finally:
        os._exit(status)


def _time_tests(folder: Path, files: Sequence[str]) -> dict[str, object]:
    _enter(folder)
    recorder = _Recorder(folder)
    _pytest(files, recorder, folder)
    return {
        "seconds": recorder.seconds,
        "entered": recorder.entered(),
        "failed": recorder.failed,
    }


def _digests(files: Sequence[str]) -> dict[str, str]:
    """Return, by test file, a digest of it and of all that it uses."""
    shared, helpers = hashlib.sha256(sys.version.encode()), {}
    for folder in (PACKAGE, "models", "hardware_profiles", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if folder == "tests" and path.suffix == ".py" and path.name != "conftest.py":
                helpers[path.stem] = path.read_bytes()
            elif path.suffix in (".py", ".yaml", ".csv", ".txt") and path != EQUIVALENT:
                shared.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    digests = {}
    for file in files:
        sha, text = shared.copy(), (ROOT / file).read_text()
        sha.update(file.encode() + text.encode())
        for imported in re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE):
            sha.update(helpers.get(imported, b""))
        digests[file] = sha.hexdigest()[:20]
    return digests


def baseline(folder: Path, rooms: Collection[str], wanted: str) -> Baseline:
    """Time the tests on the package as it is; those of files that have changed since last time.

    Files are those of rooms whose path has one of the words in it that `wanted` lists.
    """
    files = [
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in sorted((ROOT / "tests" / room).rglob("test_*.py"))
        if any(word in path.relative_to(ROOT).as_posix() for word in wanted.split(","))
    ]
    store = Path(tempfile.gettempdir()) / "axonn-tune-mutation"
    store.mkdir(exist_ok=True)
    kept = {file: store / f"{digest}.json" for file, digest in _digests(files).items()}
    new = [file for file in files if not kept[file].exists()]
    if new:
        print(f"timing {len(new)} files of tests on the package as it is ...", flush=True)
        answer = folder / "answer.json"
        os.waitpid(_forked(lambda: _time_tests(folder, new), answer), 0)
        known = json.loads(answer.read_text())
        if known.get("error") or known["failed"]:
            problem = known.get("error") or ", ".join(known["failed"])
            output = (folder / "output.txt").read_text()[-3000:]
            sys.exit(f"{output}\nthe tests fail on the package as it is: {problem}")
        for file in new:
            own = {name for name in known["seconds"] if name.partition("::")[0] == file}
            parts = {part: {n: known[part][n] for n in own} for part in ("seconds", "entered")}
            kept[file].write_text(json.dumps(parts))
    seconds: dict[str, float] = {}
    reached: dict[str, list[str]] = defaultdict(list)
    for path in kept.values():
        known = json.loads(path.read_text())
        seconds |= known["seconds"]
        for name, entered in known["entered"].items():
            for key in entered:
                reached[key].append(name)
    print(f"{len(seconds)} tests take {sum(seconds.values()):.0f} s", flush=True)
    return Baseline(seconds, dict(reached))


def _try(mutant: Mutant, tests: Sequence[str], known: Baseline, folder: Path) -> dict[str, object]:
    """Run tests on a mutant until one fails."""
    sys.dont_write_bytecode = True
    target = folder / mutant.path
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink()
    original = target.read_text()
    target.write_text(mutant.source())
    try:
        _enter(folder)
        plugin = _Orderly(tests, known.seconds)
        files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        status = _pytest(["-x", *files], plugin, folder)
        return {"killer": plugin.killer or (f"pytest status {status}" if status else "")}
    finally:
        target.write_text(original)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; `killer` names the test that failed, or is empty."""

    number: int
    mutant: Mutant
    killer: str
    seconds: float
    equivalent: str = ""


def run_mutants(
    chosen: Sequence[tuple[int, Mutant]], known: Baseline, folders: Sequence[Path]
) -> Iterator[Outcome]:
    """Try mutants, as many at once as there are folders."""
    waiting, free = list(chosen)[::-1], list(folders)
    running: dict[int, tuple[int, Mutant, Path, float, float]] = {}
    equivalent = {
        (entry["path"], entry["before"], entry["after"]): entry["reason"]
        for entry in yaml.safe_load(EQUIVALENT.read_text()) or []
    }
    try:
        while waiting or running:
            while waiting and free:
                number, mutant = waiting.pop()
                reason = equivalent.get((mutant.path, *mutant.change()))
                tests = known.tests_of(mutant)
                if reason or not tests:
                    yield Outcome(number, mutant, "", 0.0, reason or "")
                    continue
                folder = free.pop()
                limit = 120.0 + 10.0 * sum(known.seconds[name] for name in tests)
                (folder / mutant.path).write_text((ROOT / mutant.path).read_text())
                process = _forked(
                    lambda m=mutant, t=tests, f=folder: _try(m, t, known, f), folder / "answer.json"
                )
                running[process] = (number, mutant, folder, time.monotonic(), limit)
            time.sleep(0.02)
            for process, (number, mutant, folder, started, limit) in list(running.items()):
                ended, _ = os.waitpid(process, os.WNOHANG)
                seconds = time.monotonic() - started
                if not ended and seconds < limit:
                    continue
                if ended:
                    answer = json.loads((folder / "answer.json").read_text())
                    killer = str(answer.get("killer", answer.get("error")))
                else:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    killer = "time limit"
                del running[process]
                free.append(folder)
                yield Outcome(number, mutant, killer, seconds)
    finally:
        for process in running:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


# The command -------------------------------------------------------------------------------


def _shown(outcome: Outcome) -> str:
    before, after = outcome.mutant.change()
    where = f"{outcome.mutant.path}:{outcome.mutant.line}"
    note = f"\n    equivalent: {outcome.equivalent}" if outcome.equivalent else ""
    return f"#{outcome.number} {where}\n  - {before}\n  + {after}{note}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    lines = ["", "room          tried  killed  equivalent  survived"]
    for room in sorted({outcome.mutant.room for outcome in outcomes}):
        of_room = [outcome for outcome in outcomes if outcome.mutant.room == room]
        kinds = Counter(_kind(outcome) for outcome in of_room)
        lines.append(
            f"{room:12s} {len(of_room):6d} {kinds['killed']:7d} {kinds['equivalent']:11d} "
            f"{kinds['survived']:9d}"
        )
    kinds = Counter(map(_kind, outcomes))
    counted = len(outcomes) - kinds["equivalent"]
    share = kinds["killed"] / counted if counted else 1.0
    lines.append(
        f"{kinds['killed']} of {counted} mutants killed, {share:.1%} "
        f"({kinds['equivalent']} equivalent ones not counted)"
    )
    return "\n".join(lines)


def _kind(outcome: Outcome) -> str:
    if outcome.equivalent:
        return "equivalent"
    return "killed" if outcome.killer else "survived"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--mutants", type=int, default=150, help="how many mutants are planted")
    parser.add_argument(
        "--rooms", default=",".join(ROOMS), help="folders of the package, joined by commas"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants run at once")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    parser.add_argument(
        "--only", default="", help="run these numbers of the drawn mutants, joined by commas"
    )
    parser.add_argument(
        "--at", default="", help="run every mutant of these lines (PATH:LINE,...) instead"
    )
    parser.add_argument(
        "--tests", default="", help="use only files of tests with one of these words in their path"
    )
    parser.add_argument("--verbose", action="store_true", help="name the test that noticed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, run and report; the exit status is 1 if a mutant survives."""
    options = _options(arguments)
    rooms = options.rooms.split(",")
    if options.at:
        mutants = all_at(options.at.split(","))
    else:
        mutants = drawn(rooms, options.seed, options.mutants)
    chosen = list(enumerate(mutants, start=1))
    if options.only:
        wanted = {int(number) for number in options.only.split(",")}
        chosen = [(number, mutant) for number, mutant in chosen if number in wanted]
    if options.list:
        for number, mutant in chosen:
            print(_shown(Outcome(number, mutant, "", 0.0)))
        return 0
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="axonn-tune-mutation-") as temporary:
        folders = [Path(temporary).resolve() / f"job{i}" for i in range(options.jobs)]
        for folder in folders:
            folder.mkdir()
            _prepare(folder)
        tested = dict.fromkeys((*ROOMS, *(mutant.room for _, mutant in chosen)))
        known = baseline(folders[0], tested, options.tests)
        for outcome in run_mutants(chosen, known, folders):
            outcomes.append(outcome)
            line = f"[{len(outcomes)}/{len(chosen)}] {_kind(outcome)} #{outcome.number} "
            line += f"{outcome.mutant.path}:{outcome.mutant.line} ({outcome.seconds:.1f} s)"
            print(f"{line} {outcome.killer if options.verbose else ''}".rstrip(), flush=True)
    for kind in ("equivalent", "survived"):
        rows = sorted((o for o in outcomes if _kind(o) == kind), key=lambda o: o.number)
        if rows:
            print(f"\n{kind}:")
            print("\n".join(map(_shown, rows)))
    print(_summary(outcomes))
    return int(any(_kind(outcome) == "survived" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
