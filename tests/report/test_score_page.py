"""What the page of a score holds."""

import pytest

from axonn_tune.api.scoring import score
from axonn_tune.io.package_data import page_parts
from axonn_tune.report.report import page_html
from axonn_tune.report.score import score_document, score_page
from axonn_tune.reproduce.score import Score, memory_verdicts

RUNS = """model,gpus,layout,global_batch,micro_batch,engine,recompute,step_seconds,memory_gib
llama3-8b,8,shard=8,16,2,torchtitan-2024,selective,2.457,77
llama3-8b,64,"tensor=8,shard=8",96,12,torchtitan,selective,2.807,
"""


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    table = tmp_path_factory.mktemp("score") / "runs.csv"
    table.write_text(RUNS)
    return score(table, "dgx-h100")


def test_it_has_every_run_of_the_score(scored):
    page = score_page(scored, "mine", "today", ["tensor"])
    runs = score_document(scored)["runs"]
    assert [run["measured"] for run in page["runs"]] == [run["measured_seconds"] for run in runs]
    assert [run["predicted"] for run in page["runs"]] == [run["predicted_seconds"] for run in runs]
    rows = {each["title"]: [row[0] for row in each["rows"]] for each in page["tables"]}
    assert rows["Runs"] == [run["run"] for run in runs]
    assert rows["Errors by tensor"] == ["1", "8"]
    for each in page["tables"]:
        assert {len(row) for row in each["rows"]} == {len(each["headers"])}


def test_a_score_without_steps_has_no_tables():
    page = score_page(Score((), memory_verdicts(())), "mine", "today")
    assert page["tables"] == page["runs"] == []
    assert page["sentences"][0].startswith("Memory: of 0 runs")


def test_the_page_asks_for_nothing(scored):
    page = page_html(score_page(scored, "<b>", "today"), page_parts("score"))
    assert "<title>&lt;b&gt;</title>" in page and "default-src 'none'" in page
    assert 'src="' not in page.split("<script>")[0]
