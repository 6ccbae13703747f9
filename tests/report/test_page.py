"""The report page's data, and that the page brings along all that it needs."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.json_files import load_json
from axonn_tune.io.package_data import page_parts
from axonn_tune.report.report import page_document, page_html
from axonn_tune.report.suggest import ranking_text
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.validation import Validation

REMARKS = ("No clear winner", "Track record", "* ", "tight:", "near:")
ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "axonn_tune" / "report" / "web" / "vendor"


def rankings_of(*strategies, gpus=32, **options):
    options = {"global_batch": 128, "include_oom": True, **options}
    searches = [build_search("5b", gpus, strategy=strategy, **options) for strategy in strategies]
    return [rank_candidates(search) for search in searches]


@pytest.fixture(scope="module")
def rankings():
    return rankings_of("axonn", "megatron")


@pytest.fixture(scope="module")
def document(rankings):
    return page_document(rankings, "--gpus 32 --model 5b", ["axonn"], "written today", 60, 10)


@pytest.mark.slow
def test_rows_are_the_fastest_of_all_rankings_and_what_does_not_fit_comes_last(document, rankings):
    rows = document["rows"]
    fits = rows["fits"]
    assert len(fits) == 60 < document["n_candidates"] and fits == sorted(fits, reverse=True)
    steps = rows["step"][: sum(fits)]
    assert steps == sorted(steps)
    assert set(rows["strategy"]) == {0, 1}
    best = min(r.step_seconds[r.fits].min() for r in rankings)
    assert rows["step"][0] == pytest.approx(best, rel=1e-4)
    for row, layout in enumerate(rows["layout"]):
        of_strategy = ("x", "y", "z") if rows["strategy"][row] == 0 else ("tensor", "context")
        assert all(
            (rows["axes"][a][row] is None) == (a not in of_strategy) for a in ("x", "tensor")
        )
        assert str(rows["axes"][of_strategy[0]][row]) in layout


def test_a_page_names_the_batch_of_each_row(document):
    assert set(document["rows"]["global_batch"]) == {128} and not document["names_batch"]
    ranking = rank_candidates(build_search("5b", 32, global_batch=100, within=0.3))
    page = page_document([ranking], "--gpus 32", [], "", 5, 1)
    assert set(page["rows"]["global_batch"]) == {ranking.search.scenario.job.global_batch}
    assert page["names_batch"] and "the fastest for each token" in page["assumptions"]


def test_steps_of_different_batches_are_compared_by_the_time_of_a_sequence():
    of_one = rankings_of("axonn", global_batch=64) + rankings_of("megatron", global_batch=256)
    page = page_document(of_one, "", [], "", 400, 1)
    rows, batches = page["rows"], page["rows"]["global_batch"]
    assert set(batches) == {64, 256} and "global batches from 64 to 256" in page["subtitle"]
    seconds = [step / batch for step, batch in zip(rows["step"], batches, strict=True)]
    assert 0 in page["front"]
    for row in page["front"]:
        assert not any(
            seconds[other] < seconds[row] and rows["memory"][other] < rows["memory"][row]
            for other in range(len(seconds))
            if rows["fits"][other]
        )


def test_a_page_says_what_the_text_says(rankings):
    """Every remark below the table of `suggest` stands on the page of the same ranking."""
    for ranking in rankings:
        page = page_document([ranking], "", [], "", 5000, 1)
        said = [
            line
            for line in ranking_text(ranking, len(ranking)).splitlines()
            if line.startswith(REMARKS)
        ]
        assert any(line.startswith("Track record") for line in said)
        assert set(said) <= set(page["remarks"])


def test_strategies_with_a_caveat_are_marked_and_those_left_out_are_named():
    rankings = rankings_of("zero3", "zeropp", gpus=8)
    page = page_document(rankings, "", [], "", 50, 1, left_out={"for a reason": ["zero-topo"]})
    assert page["strategies"] == ["zero3", "zeropp"] and page["marked"] == ["zero3", "zeropp *"]
    assert any(remark.startswith("* zeropp quantises messages") for remark in page["remarks"])
    assert any(remark == "Left out: zero-topo, for a reason." for remark in page["remarks"])


def test_a_pipeline_of_one_stage_has_no_row_of_its_own():
    rankings = rankings_of("axonn", "axonn-pipeline", gpus=8, recompute="full")
    both = page_document(rankings, "", [], "", 5000, 1)
    alone = page_document(rankings[1:], "", [], "", 5000, 1)
    assert both["n_candidates"] == alone["n_candidates"] == len(both["rows"]["layout"])


def test_memory_is_marked_where_it_may_not_do(document):
    rows = document["rows"]
    capacity = document["capacity_gib"]
    for mark, fits, low, memory, high in zip(
        *(rows[key] for key in ("memory_mark", "fits", "memory_low", "memory", "memory_high")),
        strict=True,
    ):
        assert low < memory < high and (mark in ("", "tight")) == bool(fits)
        assert (mark in ("tight", "near")) == (low <= capacity < high)


def test_details_are_of_the_fastest_and_the_front_and_their_parts_make_up_the_step(document):
    details = {int(row): detail for row, detail in document["details"].items()}
    assert set(details) == {*range(10), *document["front"]}
    for row, detail in details.items():
        assert sum(detail["parts"].values()) == pytest.approx(
            document["rows"]["step"][row], rel=1e-3
        )
        assert min(detail["parts"].values()) > 0
        totals = [operation[5] for operation in detail["operations"]]
        assert totals == sorted(totals, reverse=True)


def test_a_packed_timeline_unpacks_to_streams_that_never_overlap(document):
    packed_ones = [detail["timeline"] for detail in document["details"].values()]
    assert all(packed["streams"][0] == "compute" for packed in packed_ones)
    packed_ones += [detail["passes"] for detail in document["details"].values() if detail["passes"]]
    assert len(packed_ones) > len(document["details"])
    for packed in packed_ones:
        ends = dict.fromkeys(range(len(packed["streams"])), 0)
        for stream, name, kind, idle, length in packed["operations"]:
            assert name < len(packed["names"]) and kind < len(packed["kinds"])
            assert idle >= -1 and length >= 0  # a tick of rounding
            ends[stream] += idle + length
        assert max(ends.values()) == pytest.approx(1e6, abs=2)


def test_memory_terms_sum_up(document):
    rows = document["rows"]
    for row, total in enumerate(rows["memory"]):
        terms = sum(of[row] for of in rows["memory_terms"].values())
        assert terms == pytest.approx(total, rel=1e-3)


def test_the_page_holds_its_data_and_asks_for_nothing(document):
    page = page_html({**document, "title": "<b> & 'co'"}, page_parts())
    assert "<title>&lt;b&gt; &amp; &#x27;co&#x27;</title>" in page
    packed = re.search(r'type="application/octet-stream">([^<]+)<', page)[1]
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["rows"] == document["rows"]
    assert "default-src 'none'" in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="', page)
    assert len(page) < 1.5e6


@pytest.mark.slow
def test_the_same_search_writes_the_same_page(document):
    again = page_document(
        rankings_of("axonn", "megatron"), "--gpus 32 --model 5b", ["axonn"], "written today", 60, 10
    )
    assert page_html(again, page_parts()) == page_html(document, page_parts())


def test_the_plotting_library_is_as_it_was_published():
    for line in (VENDOR / "SOURCES.txt").read_text().splitlines()[3:]:
        digest, name, _ = line.split(maxsplit=2)
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert (VENDOR / f"{name.split('.')[0]}.LICENSE").exists()


@pytest.mark.slow
def test_measured_steps_go_to_their_candidates_and_others_are_refused():
    folder = ROOT / "docs" / "emulated"
    validation = load_json(folder / "frontier-mini-overlap.json", Validation)
    search = build_search(
        "tiny",
        validation.n_ranks,
        str(folder / "frontier-mini.yaml"),
        global_batch=validation.global_batch,
        seq_len=validation.seq_len,
        dtype="fp32",
        every_configuration=True,
        include_oom=True,
    )
    document = page_document([rank_candidates(search)], "", [], "", 1000, 1, validation)
    assert len(document["measured"]) == len(validation.measured)
    by_step = {outcome.measured_seconds for outcome in validation.measured}
    assert {m["step"] for m in document["measured"].values()} == {
        float(f"{seconds:.5g}") for seconds in by_step
    }
    job = replace(search.scenario.job, n_gpus=16, global_batch=16)
    other = replace(search, scenario=replace(search.scenario, job=job))
    with pytest.raises(InputError, match="has ranks 8, and the report 16"):
        page_document([rank_candidates(other)], "", [], "", 10, 1, validation)
    unlike = replace(search, recomputes=("selective",), every_configuration=False)
    with pytest.raises(InputError, match="holds none of the candidates"):
        page_document([rank_candidates(unlike)], "", [], "", 10, 1, validation)
