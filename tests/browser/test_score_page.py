"""The page of a score in a real browser: it shows every run, and its tables sort."""

import pytest
from browser.chromium import texts

from axonn_tune.cli.main import main

pytestmark = pytest.mark.slow

RUNS = """model,gpus,layout,global_batch,micro_batch,engine,recompute,step_seconds,memory_gib
llama3-8b,8,shard=8,16,2,torchtitan-2024,selective,2.457,77
llama3-8b,8,shard=8,16,2,torchtitan-2024-eager,selective,2.843,82.4
llama3-8b,64,"tensor=8,shard=8",96,12,torchtitan,selective,2.807,
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("score")
    (folder / "runs.csv").write_text(RUNS)
    arguments = ["--machine", "dgx-h100", "--by", "tensor", "--html", str(folder / "score.html")]
    main(["score", str(folder / "runs.csv"), *arguments])
    return folder / "score.html"


def test_every_run_is_a_point_and_a_row(open_page, page):
    with open_page(page.as_uri()) as chrome:
        assert texts(chrome, "#tables h2") == ["Errors", "Errors by tensor", "Runs"]
        measured = texts(chrome, "#tables section:last-child td:nth-child(2)")
        assert measured == ["2.457", "2.843", "2.807"]
        dots = "#steps svg g[data-mark=dot] circle"
        assert len(texts(chrome, dots)) == 3
        swatches = texts(chrome, "#steps [class*=swatch]")
        assert any("torchtitan-2024-eager on dgx-h100" in text for text in swatches)


def test_a_table_is_sorted_by_its_heads(open_page, page):
    with open_page(page.as_uri()) as chrome:
        head = chrome.find_elements("css selector", "#tables section:last-child th button")[1]
        for expected in (["2.843", "2.807", "2.457"], ["2.457", "2.807", "2.843"]):
            head.click()
            assert texts(chrome, "#tables section:last-child td:nth-child(2)") == expected
        assert texts(chrome, "#tables th[aria-sort=ascending]") == ["measured s"]
