"""``axonn-tune report``: what must be right before a page is made; browser/ looks at the page."""

from command_line import assert_refused

JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "128", "--recompute", "full"]


def test_a_page_needs_a_validation_and_a_place_to_be_written(capsys, tmp_path):
    validation = ["--validation", tmp_path / "none.json"]
    assert_refused(capsys, "report", *JOB, *validation, culprit="none.json")
    output = ["--details", "1", "--output", tmp_path / "no" / "page.html"]
    assert_refused(capsys, "report", *JOB, *output, culprit="page.html")
