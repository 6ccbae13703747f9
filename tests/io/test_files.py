"""Files are read in UTF-8, and a failure while writing never harms the old file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.files import (
    read_text,
    write_byte_files,
    write_bytes,
    write_files,
    write_text,
)
from axonn_tune.io.journal import Journal


def test_text_is_read_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(path) == "one\r\ntwo\r\n"
    path.write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(FileError, match=r"a\.txt, line 2: not UTF-8 text"):
        read_text(path)


@pytest.mark.parametrize("name", ["missing.txt", "", "a\0b", "x" * 300])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError):
        read_text(str(tmp_path / name))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/null"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises(FileError, match=f"{device} is a device; allowed: a file or a pipe"):
        read_text(device)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(10**11)
    with pytest.raises(FileError, match="large is too large; allowed: at most 64 MiB"):
        read_text(path)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_line_that_is_too_long_is_refused_by_its_number(tmp_path: Path, end: str) -> None:
    path = tmp_path / "log"
    longest = 2**20 - len(end)
    text = "first\n" + ("x" * longest + end) * 2 + "x" * 2**20
    path.write_bytes(text.encode())
    assert read_text(path, longest_line_bytes=2**20).count("x") == 2 * longest + 2**20
    path.write_bytes((text + "x").encode())
    line = 2 + 2 * end.count("\n")
    with pytest.raises(FileError, match=f"log, line {line} is too long; allowed: at most 1 MiB"):
        read_text(path, longest_line_bytes=2**20)
    assert read_text(path).endswith("x")


def test_a_pipe_is_read() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write("text")
    assert read_text(f"/dev/fd/{reading}") == "text"
    os.close(reading)


@pytest.mark.timeout(10)
def test_a_pipe_to_which_nobody_writes_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") == ""


def test_an_open_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "redirected.txt"
    with open(path, "w") as file:
        file.write("before\n")
        file.flush()
        write_text(f"/dev/fd/{file.fileno()}", "new\n")
    assert path.read_text() == "before\nnew\n"


def test_an_empty_path_is_not_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: read_text(""),
        lambda: write_text("", "text"),
        lambda: write_files("", {"a.txt": "text"}),
        lambda: Journal.beside(""),
    ):
        with pytest.raises(FileError, match="the path of a file is empty; allowed: a path"):
            use()
    assert not list(tmp_path.iterdir())


def test_several_files_go_into_one_directory(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = write_files(str(folder), {"a.txt": "one", "b.txt": "two"})
    assert paths == [str(folder / "a.txt"), str(folder / "b.txt")]
    assert [Path(path).read_text() for path in paths] == ["one", "two"]
    with pytest.raises(FileError, match=r"a\.txt cannot be made: file exists"):
        write_files(str(folder / "a.txt"), {})


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_bytes(path, b"\x89PNG\r\n\xff")
    assert path.read_bytes() == b"\x89PNG\r\n\xff"


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write_text(tmp_path / "a.txt", "\ud800")
    assert os.listdir(tmp_path) == []


def test_writing_replaces_the_whole_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "a long first content")
    path.chmod(0o640)
    write_text(path, "short")
    assert path.read_text() == "short"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def _refuses_to_write(path: Path | str) -> str:
    with pytest.raises(FileError) as caught:
        write_text(path, "new")
    message = str(caught.value)
    assert message.isprintable()
    assert "cannot be written" in message
    return message


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    assert "no such file" in _refuses_to_write(tmp_path / "missing" / "a.yaml")
    assert "ot a directory" in _refuses_to_write(tmp_path / "file" / "a.yaml")
    assert "s a directory" in _refuses_to_write(tmp_path)
    _refuses_to_write(str(tmp_path / "a\0b"))
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert "ermission denied" in _refuses_to_write(tmp_path / "a.yaml")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_on_a_device() -> None:
    assert "no space left" in _refuses_to_write("/dev/full")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    assert "no space left" in _refuses_to_write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_disk_that_fills_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import resource, sys\n"
        "from axonn_tune.errors import FileError\n"
        "from axonn_tune.io.files import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    write_text(sys.argv[1], 'x' * 100_000)\n"
        "except FileError:\n"
        "    sys.exit(7)\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment,
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_each_of_many_files_is_written_before_the_next_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def files() -> Iterator[tuple[str, bytes]]:
        yield "a.et", b"\x00\xff"
        assert (folder / "a.et").read_bytes() == b"\x00\xff"
        yield "b.et", b"12345"

    assert write_byte_files(str(folder), files()) == 7
    assert sorted(os.listdir(folder)) == ["a.et", "b.et"]
    with pytest.raises(FileError, match=r"a\.et cannot be made: file exists"):
        write_byte_files(str(folder / "a.et"), [])
