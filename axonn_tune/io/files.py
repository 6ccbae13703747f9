"""Read and write whole files of text or bytes.

Reading is bounded: a device is refused, and so is a file that is larger than any that makes
sense. Writing is atomic: a new file is written next to the old one and then takes its place, so
that a failure leaves the old file as it was.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from axonn_tune.errors import FileError, InputError

FileName = str | os.PathLike[str]

# A report of a thousand measured configurations has 20 MB.
LARGEST_FILE_BYTES = 2**26
# These paths stand for files that the process has open, such as what its output is redirected to.
_OPEN_FILES = re.compile(r"/(?:dev|proc/[^/]+)/fd/\d+|/dev/std(?:out|err)")


def file_name(given: FileName, what: str) -> str:
    """Return a name or a path as a text.

    Raises
    ------
    InputError
        It is neither, as None and tables are, which Python callers may give.
    """
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    raise InputError(f"{what} is of the type {type(given).__name__}; allowed: a name or a path")


def require_path(path: FileName) -> None:
    """Raise FileError if a path is empty, which would mean the folder in which a program runs."""
    if not os.fspath(path):
        raise FileError("the path of a file is empty; allowed: a path")


def read_text(
    path: FileName,
    largest_bytes: int = LARGEST_FILE_BYTES,
    longest_line_bytes: int | None = None,
) -> str:
    """Return the text of a UTF-8 file or of a pipe, without a byte order mark.

    Parameters
    ----------
    largest_bytes : int
        The size above which a file is refused.
    longest_line_bytes : int or None
        The size of a line above which a file is refused; None allows lines of any size.

    Raises
    ------
    FileError
        The file is missing, cannot be read, is too large, has too long a line, or is not UTF-8.
    """
    try:
        data = _read_bytes(path, largest_bytes)
        if longest_line_bytes is not None:
            _require_short_lines(path, data, longest_line_bytes)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise os_failure(path, "cannot be read", error) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise FileError(f"{os.fspath(path)}, line {line}: not UTF-8 text") from None
    except ValueError as error:  # The name contains a zero byte.
        raise FileError(f"{os.fspath(path)!r}: {error}") from None


def read_packed_text(path: FileName, largest_bytes: int = LARGEST_FILE_BYTES) -> str:
    """Return the UTF-8 text that a gzip file holds, which may have at most `largest_bytes`.

    Raises
    ------
    FileError
        The file is missing, cannot be read, is no whole gzip file, holds too much, or no UTF-8.
    """
    name = os.fspath(path)
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16 stands for the header of gzip.
    try:
        data = unpacker.decompress(_read_bytes(path, largest_bytes), largest_bytes + 1)
        text = data.decode()
    except OSError as error:
        raise os_failure(path, "cannot be read", error) from None
    except (zlib.error, ValueError) as error:
        raise FileError(f"{name}: not a gzip file of UTF-8 text: {error}") from None
    if len(data) > largest_bytes:
        raise FileError(f"{name} holds too much; allowed: at most {largest_bytes >> 20} MiB")
    if not unpacker.eof:
        raise FileError(f"{name}: the gzip file is cut short")
    return text


def _read_bytes(path: FileName, largest_bytes: int) -> bytes:
    require_path(path)
    # Without O_NONBLOCK, a pipe to which nobody writes would hold up the opening itself.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise FileError(f"{os.fspath(path)} is a device; allowed: a file or a pipe")
            os.set_blocking(descriptor, True)
            data = file.read(largest_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > largest_bytes:
        raise FileError(
            f"{os.fspath(path)} is too large; allowed: at most {largest_bytes >> 20} MiB"
        )
    return data


def _require_short_lines(path: FileName, data: bytes, longest_bytes: int) -> None:
    """Raise FileError if a line is too long; bars of progress end theirs with a carriage return."""
    start = 0
    while len(data) - start > longest_bytes:
        stop = start + longest_bytes + 1
        end = data.rfind(b"\n", start, stop)
        if end < 0:
            end = data.rfind(b"\r", start, stop)
        if end < 0:
            line = data.count(b"\n", 0, start) + 1
            raise FileError(
                f"{os.fspath(path)}, line {line} is too long; "
                f"allowed: at most {longest_bytes >> 20} MiB"
            )
        start = end + 1


def digest(path: FileName) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal digits.

    Raises
    ------
    FileError
        The file is missing or cannot be read.
    """
    # Few commands need this import, which takes 2 ms.
    import hashlib

    hashed = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                hashed.update(block)
    except OSError as error:
        raise os_failure(path, "cannot be read", error) from None
    return hashed.hexdigest()


def write_text(path: FileName, text: str) -> None:
    """Write a whole file in UTF-8, or leave the old file as it was.

    Raises
    ------
    FileError
        The folder is missing or cannot be written, or the disk is full.
    """
    try:
        data = text.encode()
    except ValueError as error:  # The text contains a lone surrogate.
        raise FileError(f"{os.fspath(path)!r} cannot be written: {error}") from None
    write_bytes(path, data)


def write_bytes(path: FileName, data: bytes, is_lasting: bool = True) -> None:
    """Write a whole file, or leave the old file as it was.

    A symbolic link stays a link, and a file that is replaced keeps its permissions. A lasting file
    is on the disk before the old one goes, so that it outlives a failure of the power, too.

    Raises
    ------
    FileError
        The folder is missing or cannot be written, or the disk is full.
    """
    try:
        if is_replaced(path):
            _replace(os.path.realpath(path), data, _mode(path), is_lasting)
        else:  # The path is a pipe, a terminal or /dev/stdout, which may stand for a file.
            with open(path, "ab") as file:
                file.write(data)
    except OSError as error:
        raise os_failure(path, "cannot be written", error) from None
    except ValueError as error:  # The name contains a zero byte.
        raise FileError(f"{os.fspath(path)!r} cannot be written: {error}") from None


def is_replaced(path: FileName) -> bool:
    """Return whether writing to a path makes a regular file or replaces one.

    Raises
    ------
    FileError
        The path is empty.
    """
    require_path(path)
    mode = _mode(path)
    is_open_file = _OPEN_FILES.fullmatch(os.path.abspath(path)) is not None
    return mode is None or (stat.S_ISREG(mode) and not is_open_file)


def write_files(directory: str, files: Mapping[str, str]) -> list[str]:
    """Write several texts into one directory and return the paths of the files.

    Each file is written atomically, but not all of them together. The directory is made if it
    does not exist.

    Parameters
    ----------
    files : mapping of str to str
        The text of each file by the file's name.

    Raises
    ------
    FileError
        The directory or a file cannot be written.
    """
    folder = _made_folder(directory)
    paths = []
    for name, text in files.items():
        write_text(folder / name, text)
        paths.append(str(folder / name))
    return paths


def write_byte_files(directory: str, files: Iterable[tuple[str, bytes]]) -> int:
    """Write several files, given by name and content, as `write_files` does; return their bytes.

    Files may be many and large: each is written before the next one is asked for, and none waits
    for the disk, since they can be computed again.

    Raises
    ------
    FileError
        The directory or a file cannot be written.
    """
    folder = _made_folder(directory)
    nbytes = 0
    for name, data in files:
        write_bytes(folder / name, data, is_lasting=False)
        nbytes += len(data)
    return nbytes


def _made_folder(directory: str) -> Path:
    """Return a directory, which is made if it does not exist."""
    require_path(directory)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_failure(directory, "cannot be made", error) from None
    return folder


def changed_files(directory: str, files: Mapping[str, str]) -> list[str]:
    """Return the paths of files that stand in a directory with another text.

    Parameters
    ----------
    files : mapping of str to str
        The text of each file by the file's name.

    Raises
    ------
    FileError
        A file cannot be read.
    """
    paths = {str(Path(directory, name)): text for name, text in files.items()}
    return [
        path for path, text in paths.items() if os.path.lexists(path) and read_text(path) != text
    ]


def os_failure(path: FileName, complaint: str, error: OSError) -> FileError:
    """Return an error of one line that names the file and gives the system's reason."""
    reason = error.strerror or str(error)
    return FileError(f"{os.fspath(path)} {complaint}: {reason[:1].lower()}{reason[1:]}")


def _mode(path: FileName) -> int | None:
    """Return the type and permissions of a file, or None if there is no such file."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(path: str, data: bytes, mode: int | None, is_lasting: bool) -> None:
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only")
    temporary = os.path.join(os.path.dirname(path), f".axonn-tune-{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            if is_lasting:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):  # An interrupt may come after the replacement.
            os.unlink(temporary)
        raise
