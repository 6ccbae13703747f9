"""Tables of runs as they are read."""

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.tables import load_table


def test_an_unknown_column_has_the_nearest_name_and_no_list_of_all(tmp_path):
    """More than 80 names stood in one line."""
    path = tmp_path / "runs.csv"
    for column, hint in [
        ("globl_batch", "; did you mean 'global_batch'"),
        ("favourite_colour", "; docs/score.md has all columns"),
    ]:
        path.write_text(f"model,{column}\ntiny,8\n")
        with pytest.raises(FileError) as caught:
            load_table(path, ["model"], ["global_batch", "micro_batch", "gpus"])
        message = str(caught.value)
        assert f"unknown column '{column}'{hint}" in message
        assert message.endswith(" docs/score.md has all columns") and "gpus" not in message
