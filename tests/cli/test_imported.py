"""``calibrate --import`` puts tables of measurements into a profile; it needs no GPU."""

from pathlib import Path

import pytest

from axonn_tune.cli.main import main
from axonn_tune.io.presets import load_machine

DATA = Path(__file__).parents[1] / "data"
TABLES = ["--import", str(DATA / "collectives_one_node.csv")]
TABLES += ["--import", str(DATA / "products_one_gpu.csv")]
H200 = ["--where", "system=h200_sxm"]


def calibrate(path, *options, machine="dgx-h100"):
    main(["calibrate", *TABLES, "--machine", machine, "--output", str(path), *options])


def test_tables_become_a_profile_that_holds_few_points(tmp_path, capsys):
    path = tmp_path / "ours.yaml"
    calibrate(path, *H200, "--thin", "5", "--most-shapes", "10", machine="perlmutter")
    machine = load_machine(path)
    assert machine.name == "ours"
    assert len(machine.gemm.points) == 10
    assert 12 * 2 <= len(machine.link_points) < 12 * 12
    assert "144 collectives and 43 products read" in capsys.readouterr().out


def test_all_points_stay_unless_fewer_are_asked_for(tmp_path):
    path = tmp_path / "ours.yaml"
    calibrate(path, *H200, machine="perlmutter")
    machine = load_machine(path)
    assert (len(machine.link_points), len(machine.gemm.points)) == (12 * 12, 43)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "several machines; give --where system=NAME"),
        (["--where", "h200"], "--where h200: write COLUMN=VALUE, such as system=h100_sxm"),
        ([*H200, "--where", "SYSTEM=b200_sxm"], "the column has a value already"),
        ([*H200, "--thin", "-1"], "-1"),
    ],
)
def test_bad_choices_are_one_line(options, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        calibrate(tmp_path / "x.yaml", *options)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
