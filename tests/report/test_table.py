"""Tables fit in a line of text."""

from axonn_tune.report.table import WIDTH, fitted_table_of

COLUMNS = [("name", str), ("long", lambda item: "x" * 60), ("other", lambda item: "y" * 50)]


def test_columns_that_have_no_room_are_named_below_the_table():
    text = fitted_table_of(["a", "b"], COLUMNS, ["other", "long"])
    header, _, *rows, remark = text.splitlines()
    assert header.split() == ["name", "long"]
    assert len(rows) == 2
    assert max(map(len, text.splitlines())) <= WIDTH
    assert remark == "Columns left out for lack of width: other"


def test_a_table_that_fits_leaves_nothing_out():
    text = fitted_table_of(["a"], COLUMNS[:2], ["long"])
    assert "left out" not in text
    assert "x" * 60 in text
