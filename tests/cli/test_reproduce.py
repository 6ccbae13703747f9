"""``axonn-tune reproduce``: every comparison is a row."""

import csv
import io

import pytest

from axonn_tune.report.reproduce import reproduction_text


@pytest.mark.slow
def test_the_command_prints_every_row(reproduce_command):
    rows = list(csv.DictReader(io.StringIO(reproduce_command.csv)))
    found = reproduce_command.reproduction
    n_steps = sum(len(timed) for timed in found.steps.values())
    n_collectives = sum(len(timed) for timed in found.collectives.values())
    assert len(rows) == len(found.results) + len(found.links) + n_steps + n_collectives
    assert n_steps == 55 + 360 + 133 + 12 + 69 + 814
    assert n_collectives == 102 + 240
    runs = [row for row in rows if row["known"]]
    assert len(runs) == len(found.results) + n_steps


@pytest.mark.slow
def test_the_tables_of_text_fit_a_hundred_characters(reproduce_command):
    text = reproduction_text(reproduce_command.reproduction)
    assert max(map(len, text.splitlines())) <= 100
    assert "near: mean %" in text and "predicted not to fit" in text
