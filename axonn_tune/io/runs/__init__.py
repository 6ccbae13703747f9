"""Read the logs of training programs as runs; `read_runs` and `table_row` are the entries.

`read` recognises a file and hands its text to the module of its format. Each of these returns
`LoggedRun`s: what the log says of the layout and the sizes, and the seconds of its steps. `table`
turns a run into a row of a table of runs.
"""

from axonn_tune.io.runs.logged_run import LoggedRun
from axonn_tune.io.runs.read import FORMATS, read_runs
from axonn_tune.io.runs.table import TableRow, table_row

__all__ = ["FORMATS", "LoggedRun", "TableRow", "read_runs", "table_row"]
