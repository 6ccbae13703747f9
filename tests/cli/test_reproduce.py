"""Published results: the page in docs is what the command prints, and its numbers add up."""

import json
from pathlib import Path

import pytest

from axonn_tune.cli.main import main
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.io.published import load_published
from axonn_tune.validate.reproduce import (
    Comparison,
    Loaders,
    compare_links,
    compare_runs,
    summarise,
)

LOADERS = Loaders(load_model, load_machine)


def test_validation_page_is_up_to_date(capsys):
    page = Path(__file__).parents[2] / "docs" / "validation.md"
    main(["reproduce", "--format", "markdown"])
    assert capsys.readouterr().out.rstrip() == page.read_text().rstrip(), (
        "run: axonn-tune reproduce --format markdown --output docs/validation.md"
    )


def test_json_summary_follows_from_the_rows(capsys):
    main(["reproduce", "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    errors = [abs(r["error_fraction"]) for r in document["runs"] if r["predicted"] is not None]
    summary = document["summary"]["all_runs"]
    assert summary["n"] == len(errors) == 15
    assert summary["mape"] == pytest.approx(sum(errors) / len(errors))
    assert summary["max_error"] == pytest.approx(max(errors))


def test_every_published_row_is_compared_or_says_why_not():
    comparisons = compare_runs(load_published("axonn"), LOADERS)
    assert len(comparisons) == 16
    for c in comparisons:
        assert c.source and c.certainty
        assert c.predicted is not None or "not modelled" in c.setting


def test_sharing_law_reproduces_the_published_bandwidths():
    rows = load_published("axonn_links")
    for row, c in zip(rows, compare_links(rows, LOADERS), strict=True):
        bar = 0.18 if row["source"].startswith("measured") else 1e-9
        assert abs(c.error_fraction) <= bar


def test_summary_is_signed_where_it_must_be():
    def comparison(published, predicted):
        return Comparison("m", "s", "x", published, predicted, "", "", "")

    errors = summarise([comparison(1.0, 1.1), comparison(1.0, 0.7), comparison(1.0, None)])
    assert errors.n == 2
    assert errors.bias == pytest.approx(-0.1)
    assert errors.mape == pytest.approx(0.2)
    assert errors.max_error == pytest.approx(0.3)
    assert summarise([comparison(1.0, None)]) is None
