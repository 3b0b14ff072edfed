"""Files in folders, tar and zip archives, one after the other. Nothing is ever extracted to disk."""

import gzip
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Protocol

from upgd.data.dataset import DataError
from upgd.data.packing import is_packed, peek

__all__ = ["Leaf", "Problems", "leaves"]

#: What was wrong with files that were passed over: clauses without a full stop, to be told if something is missing.
Problems = list[str]

#: More files than any folder of data sets has: somebody named the wrong folder.
MOST_FILES = 10_000
#: More than the official archive of CIFAR-10 unpacks to (176 MiB).
TAR_LIMIT = 1 << 28
_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error)
_TAR_NAMES = (".tar", ".tar.gz", ".tgz")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass
class Leaf:
    """One file, in a folder or an archive; it can be read, once, until the next one is asked for."""

    name: str
    size: int
    _file: _Readable

    def read(self, most: int) -> bytes:
        """The next bytes, ``most`` at most; read until there are no more or as many as asked for."""
        chunks, missing = [], most
        with _one_kind_of_error(self.name):
            while missing and (chunk := self._file.read(min(missing, 1 << 20))):
                chunks.append(chunk)
                missing -= len(chunk)
        return b"".join(chunks)


def leaves(path: Path, problems: Problems) -> Iterator[Leaf]:
    """Every file in a folder and below it, in an archive, or the file itself; in archives in that folder, too.

    An archive that is damaged or unsafe is passed over, and ``problems`` gets a clause that says why.
    """
    for file_path in _files(path):
        name = str(file_path.relative_to(path)) if path.is_dir() else file_path.name
        with file_path.open("rb") as file:
            read_members = _archive_reader(file, name)
            if read_members is None:
                yield Leaf(name, file_path.stat().st_size, file)
                continue
            try:
                with _one_kind_of_error(name):
                    yield from read_members(file, name)
            except DataError as error:
                problems.append(str(error).removesuffix("."))


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}.")
    if path.is_file():
        yield path
        return
    count = 0
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise DataError(f"{path} has more than {MOST_FILES:,} files: name the folder that holds the data set.")
            file = Path(folder, name)
            # A named pipe would wait for ever.
            if stat.S_ISREG(file.stat().st_mode if file.exists() else 0) and os.access(file, os.R_OK):
                yield file


class _MemberReader(Protocol):
    def __call__(self, file: IO[bytes], name: str) -> Iterator[Leaf]: ...


def _archive_reader(file: IO[bytes], name: str) -> _MemberReader | None:
    head = file.read(1 << 16)
    file.seek(0)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_members
    start = peek(head, 512)
    if start[257:262] == b"ustar" or name.lower().endswith(_TAR_NAMES):
        return _tar_gz_members if is_packed(head) else _tar_members
    return None


def _zip_members(file: IO[bytes], name: str) -> Iterator[Leaf]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            _refuse_unsafe(member.filename, name)
            # Other methods may ask for gigabytes to unpack a few bytes.
            if member.filename.endswith("/") or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                continue
            with archive.open(member) as content:
                yield Leaf(f"{name}/{member.filename}", member.file_size, content)


def _tar_gz_members(file: IO[bytes], name: str) -> Iterator[Leaf]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield from _tar_members(unpacked, name)


def _tar_members(file: _Readable, name: str) -> Iterator[Leaf]:
    # "r|" reads forwards only: no header can send it back and round in circles.
    with tarfile.open(fileobj=_Limited(file, name), mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            _refuse_unsafe(member.name, name)
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None:
                raise DataError(f"{name} holds {member.name!r}, which is no plain file; it was not opened.")
            yield Leaf(f"{name}/{member.name}", member.size, content)


class _Limited:
    """Reads from a file until it has given more than any good archive holds."""

    def __init__(self, file: _Readable, name: str) -> None:
        self._file, self._name, self._left = file, name, TAR_LIMIT

    def read(self, size: int) -> bytes:
        chunk = self._file.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(f"{self._name} unpacks to more than {TAR_LIMIT:,} bytes, more than it should.")
        return chunk


def _refuse_unsafe(member: str, archive: str) -> None:
    """Nothing is written where an archive says, but one that tries to leave its folder deserves no trust at all."""
    for path in (PurePosixPath(member), PureWindowsPath(member)):
        if path.anchor or ".." in path.parts:
            raise DataError(f"{archive} holds {member!r}, which points out of the archive's folder; it was not opened.")


@contextmanager
def _one_kind_of_error(name: str) -> Iterator[None]:
    """Whatever Python's archive modules raise at a damaged file, and that is a lot, becomes a DataError."""
    try:
        yield
    except DataError:
        raise
    except EOFError:
        raise DataError(f"{name} is cut off.") from None
    except (*_ARCHIVE_ERRORS, OSError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise DataError(f"{name} cannot be read: {error}.") from None
