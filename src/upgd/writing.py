"""Output files that are complete or absent and never overwrite data.

Everything that a command writes for the user (pages, figures, exports) goes through :func:`output` or :func:`text`. They
refuse to replace a store, a data set or a checkpoint, regardless of its name or of links that lead to it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with text(Path(folder, "notes.txt")) as file:
    ...         _ = file.write("done")
    ...     Path(folder, "notes.txt").read_text()
    'done'
"""

import errno
import io
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

from upgd.data.cache import owner

__all__ = ["check", "output", "text", "whole"]

_SQLITE = b"SQLite format 3\0"

#: The first bytes of files that hold data. No output starts with any of them, so refusing to replace them is safe.
_DATA = {
    _SQLITE: "a store, or another SQLite database",
    b"PK\x03\x04": "a checkpoint, or another zip archive",
    b"\x80\x02": "a checkpoint or a data set",  # pickled, as by torch before 1.6 and in CIFAR's batches
    b"\x93NUMPY": "a NumPy array",
    b"\0\0\x08\x01": "a data set",  # IDX: labels
    b"\0\0\x08\x03": "a data set",  # IDX: images
    b"\x1f\x8b": "a compressed file",
    b"\xfd7zXZ\0": "a compressed file",
    b"BZh": "a compressed file",
}

#: Suffixes of the files that SQLite and the store create next to a store.
_COMPANIONS = re.compile(r"(-wal|-shm|-journal|\.lock|\.progress)+$")


def check(path: str | os.PathLike[str], replaces: Callable[[IO[bytes]], bool] = lambda _: False) -> None:
    """Raise ValueError if ``path`` cannot be written. Call it before computing the output.

    Args:
        path: the file.
        replaces: returns whether an existing file that holds data is an earlier version of the same output.
    """
    path = Path(path)
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a folder; the output must be a file, such as {path / 'output'}")
    if mode is not None and not stat.S_ISREG(mode):
        return
    target = Path(os.path.realpath(path))
    if (held := _held(target)) and not _may_be_replaced(target, replaces):
        raise ValueError(f"{path} is {held}, which is never overwritten; choose another file")
    if not target.parent.is_dir():
        raise ValueError(f"the folder {path.parent} for {path.name} does not exist; create it, or choose another file")


@contextmanager
def output(
    path: str | os.PathLike[str], replaces: Callable[[IO[bytes]], bool] = lambda _: False
) -> Iterator[IO[bytes]]:
    """Open an output file: :func:`check` the path, then write it as :func:`whole` does."""
    check(path, replaces)
    with whole(path) as file:
        yield file


@contextmanager
def text(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text output file in UTF-8, without newline translation; see :func:`output`."""
    with output(path) as file:
        stream = io.TextIOWrapper(file, encoding="utf-8", newline="")
        yield stream
        stream.detach()


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that is moved to ``path``, replacing any existing file, when the ``with`` block ends without an error.

    Symbolic links are followed. Special files, such as devices and pipes, are written to and not replaced; so is the file
    that the standard output is redirected to (``/dev/stdout`` may lead there).
    """
    path = Path(path)
    if (mode := _mode(path)) is not None and ((number := _standard_stream(path)) or not stat.S_ISREG(mode)):
        content = io.BytesIO()  # some formats need to seek, which a pipe does not support
        yield content
        with _names(path), open(os.dup(number) if number else os.open(path, os.O_WRONLY), "wb") as stream:
            stream.write(content.getbuffer())
        return
    target = Path(os.path.realpath(path))
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    partial = target.with_name(f".{os.getpid()}-{uuid.uuid4().hex[:8]}.partial")
    try:
        with _names(path, partial):
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if mode is not None:
                shutil.copymode(target, partial)
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Return the mode of the file that a name leads to, or None if there is no such file."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _held(target: Path) -> str | None:
    """Return a description of the data that a file holds or belongs to, or None."""
    store = target.with_name(_COMPANIONS.sub("", target.name) or target.name)
    if store != target and _first_bytes(store).startswith(_SQLITE):
        return f"part of the store {store.name}"
    if target.parent.name.endswith(".checkpoints"):
        return "a checkpoint"
    if (name := owner(target)) is not None:
        return f"part of the data set {name}"
    first = _first_bytes(target)
    return next((what for magic, what in _DATA.items() if first.startswith(magic)), None)


def _may_be_replaced(target: Path, replaces: Callable[[IO[bytes]], bool]) -> bool:
    if not target.is_file():
        return False
    with target.open("rb") as file:
        return replaces(file)


def _first_bytes(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(16)


def _standard_stream(path: Path) -> int | None:
    """Return the descriptor of the standard output or error if the path leads to it; writing there does not truncate it."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(number)):
                stream.flush()
                return number
    return None


@contextmanager
def _names(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Context manager that makes OSErrors name the file that the user gave."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
