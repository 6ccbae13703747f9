"""Logs that a test writes and reads at once."""

import pytest
from worlds import machine_of

from axonn_tune.io.logs import LogOptions, read_logs

_CELLS = "     time   algbw   busbw #wrong"
NCCL_COLUMNS = f"#       size         count      type   redop    root{_CELLS}{_CELLS}\n"


@pytest.fixture
def read_files():
    """Read logs by path, made on nodes of four ranks."""
    return lambda *paths, **options: read_logs(
        list(map(str, paths)), machine_of(units=(1, 4), ranks_per_node=4), LogOptions(**options)
    )


@pytest.fixture
def read(tmp_path, read_files):
    """Read the texts of logs, each from a file of the given name."""

    def read(*texts, name="run.log", **options):
        paths = []
        for number, text in enumerate(texts):
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            paths.append(folder / name)
            paths[-1].write_text(text)
        return read_files(*paths, **options)

    return read


@pytest.fixture
def nccl_log():
    """Make a log of nccl-tests with one row of 1 MiB, or with none."""

    def log(n_hosts, ranks_per_host, redop="sum", busbw=17.5, time_us="100.0", rows=1):
        ranks = [
            f"#  Rank {host * ranks_per_host + i} Pid {100 + i} on n{host} device {i} [0x07] H100\n"
            for host in range(n_hosts)
            for i in range(ranks_per_host)
        ]
        cells = f"  {time_us}  10.0  {busbw}  0"
        row = f"  1048576  262144  float  {redop}  -1{cells}{cells}\n"
        head = "# nThread 1 nGpus 1 minBytes 8\n"
        return head + "".join(ranks) + NCCL_COLUMNS + row * rows

    return log
