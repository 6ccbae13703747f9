"""What a stranger installs: presets reach every kind of installation, README and CI agree."""

import configparser
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ASK = [
    "-c",
    "from axonn_tune.io.presets import list_machines, list_models, load_machine, load_model;"
    "from axonn_tune.io.package_data import load_published, page_parts, template; page_parts();"
    "template('model'); template('machine');"
    "from axonn_tune.io.package_data import note_on_validation, training_program;"
    "training_program('training.py'); note_on_validation('axonn');"
    "import axonn_tune, sys;"
    "[load_model(n) for n in list_models()]; [load_machine(n) for n in list_machines()];"
    "print(len(list_models()), len(list_machines()), len(load_published('axonn')));"
    "print(axonn_tune.__file__)",
]


def presets():
    return len(list((ROOT / "models").glob("*.yaml"))), len(
        list((ROOT / "hardware_profiles").glob("*.yaml"))
    )


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "axonn_tune").rglob("__init__.py")
    }
    assert listed == found | {"axonn_tune.models", "axonn_tune.hardware_profiles"}


def test_ci_calls_the_readmes_test_command_and_both_commands_are_on_its_first_screen():
    first_screen = (ROOT / "README.md").read_text().splitlines()[:32]
    commands = [line for line in first_screen if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "axonn-tune suggest --gpus 1024 --model 80b" in commands[0]
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[1] in steps
    assert "-m pytest -m 'slow and not sweep'" in steps[-1]


def environment():
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command, cwd):
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel that was built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_finds_the_presets(built, tmp_path):
    wheel, _ = built
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = [f"import sys; sys.path.insert(0, {str(target)!r});" + ASK[1]]
    n_models, n_machines = presets()
    out = run(sys.executable, "-I", "-c", *code, cwd=tmp_path).split()
    assert [int(word) for word in out[:3]] == [n_models, n_machines, 16]
    assert out[3].startswith(str(target))


@pytest.mark.slow
def test_the_sdist_holds_what_its_own_tests_read(built):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {".ci/run", "CHANGELOG.md", "LICENSE", "README.md", "constraints.txt"}
    assert files <= names
    for folder in ("docs", "models", "hardware_profiles", "tests"):
        here = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*.*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert here <= names


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, _ = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"axonn_tune"}
    assert "axonn_tune/py.typed" in names


@pytest.mark.slow
def test_an_editable_install_finds_the_presets(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    # The environment that runs the tests lends its packages.
    lent = next(path for path in sys.path if path.endswith("site-packages"))
    own = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (own / "lent.pth").write_text(lent + "\n")
    run(
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        ROOT,
        cwd=tmp_path,
    )
    n_models, n_machines = presets()
    out = run(python, *ASK, cwd=tmp_path).split()
    assert [int(word) for word in out[:3]] == [n_models, n_machines, 16]
    assert out[3].startswith(str(ROOT))
    command = tmp_path / "venv" / "bin" / "axonn-tune"
    assert "G_data" in run(command, "suggest", "--gpus", "8", "--model", "tiny", cwd=tmp_path)
