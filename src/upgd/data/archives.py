"""Iterate over files in folders, tar archives and zip archives, without extracting anything to disk."""

import gzip
import os
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Protocol

from upgd.data.dataset import DataError
from upgd.data.packing import RATIO, is_packed, most_unpacked, peek, unpack

__all__ = ["TAR_LIMIT", "Leaf", "Problems", "leaves"]

#: Reasons why files were skipped, as clauses without a full stop; shown if something turns out to be missing.
Problems = list[str]

#: No folder or archive of data sets has this many files; the path is probably wrong.
MOST_FILES = 10_000
#: Limits on what one call reads from all archives and packed files: number of files and bytes.
MOST_MEMBERS, MOST_BYTES = 100_000, 1 << 33
#: Time limit for one archive in seconds; the largest official archive takes a few.
TIME_LIMIT = 300.0
#: Limit on the size of the central directory of a zip archive; zipfile reads it in one piece, whatever size it claims.
_ZIP_LIST = 4 << 20
#: Limit on the sum of squared lengths of extended headers in a tar archive. tarfile parses them with a regular expression
#: that takes quadratic time; this limit corresponds to a few seconds.
_TAR_HEADERS = 1 << 29
#: Larger than the unpacked official archive of CIFAR-10 (176 MiB).
TAR_LIMIT = 1 << 28
_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error)
_TAR_NAMES = (".tar", ".tar.gz", ".tgz")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass
class Leaf:
    """A file in a folder or an archive. It can be read once, before the iterator advances."""

    name: str
    size: int
    _file: _Readable
    _allowance: "_Allowance"

    def unpack(self, data: bytes, limit: int) -> bytes:
        """Unpack the file's content; see :func:`upgd.data.packing.unpack`."""
        content = unpack(data, self.name, limit)
        if is_packed(data):
            self._allowance.spend(len(content))
        return content

    def read(self, most: int) -> bytes:
        """Read the next ``most`` bytes, or fewer at the end of the file."""
        chunks, missing = [], most
        with _one_kind_of_error(self.name):
            while missing and (chunk := self._file.read(min(missing, 1 << 20))):
                chunks.append(chunk)
                missing -= len(chunk)
        return b"".join(chunks)


def leaves(path: Path, problems: Problems) -> Iterator[Leaf]:
    """Iterate over every file in a folder and its subfolders, in archives found there, or in the given file.

    Damaged and unsafe archives are skipped, with the reason appended to ``problems``. Everything that remains is skipped if
    the archives and packed files exceed the limits.
    """
    allowance = _Allowance(path)
    for file_path in _files(path):
        if allowance.spent:
            problems.append(allowance.reason)
            return
        name = str(file_path.relative_to(path)) if path.is_dir() else file_path.name
        with file_path.open("rb") as file:
            read_members = _archive_reader(file, name)
            if read_members is None:
                yield Leaf(name, file_path.stat().st_size, file, allowance)
                continue
            try:
                with _one_kind_of_error(name):
                    yield from read_members(file, name, allowance)
            except DataError as error:
                problems.append(str(error).removesuffix("."))


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; check the path")
    if path.is_file():
        yield path
        return
    if not path.is_dir():  # reading from a named pipe would block forever
        raise DataError(f"{path} is neither a file nor a folder; give the one that contains the data set")
    count = 0
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise DataError(
                    f"{path} has more than {MOST_FILES:,} files: give the folder that contains the data set"
                )
            file = Path(folder, name)
            if stat.S_ISREG(file.stat().st_mode if file.exists() else 0) and os.access(file, os.R_OK):
                yield file


class _Allowance:
    """Limits what one call may read from all archives and packed files together."""

    def __init__(self, path: Path) -> None:
        self._path, self._members, self._bytes = path, MOST_MEMBERS, MOST_BYTES

    @property
    def spent(self) -> bool:
        return self._members < 0 or self._bytes < 0

    @property
    def reason(self) -> str:
        most = f"{MOST_BYTES:,} bytes" if self._bytes < 0 else f"{MOST_MEMBERS:,} files"
        return f"archives and packed files in {self._path} contain more than {most}, so the rest was not opened"

    def spend(self, count: int, members: int = 0) -> None:
        """Count bytes and members, and raise a DataError if the limit is exceeded."""
        self._bytes -= count
        self._members -= members
        if self.spent:
            raise DataError(f"{self.reason}")


class _Archive:
    """Counts what is read from one archive, and raises a DataError if it exceeds a limit."""

    def __init__(self, name: str, size: int, most: int, allowance: _Allowance) -> None:
        self.name, self.allowance = name, allowance
        self._most, self._ratio, self._headers = most, most_unpacked(size), _TAR_HEADERS
        self._members = self._bytes = 0
        self._deadline = time.monotonic() + TIME_LIMIT

    def member(self) -> None:
        """Count a member."""
        self._members += 1
        if self._members > MOST_FILES:
            raise DataError(f"{self.name} contains more than {MOST_FILES:,} files, more than any data set")
        self.allowance.spend(0, members=1)

    def header(self, size: int) -> None:
        """Count an extended header of a tar archive."""
        self._headers -= size * size
        if self._headers < 0:
            raise DataError(f"{self.name} has longer extended headers than any data set needs; it was not opened")

    def give(self, chunk: bytes) -> bytes:
        """Count a chunk and return it."""
        self._bytes += len(chunk)
        if self._bytes > self._most:
            raise DataError(f"{self.name} unpacks to more than {self._most:,} bytes, more than expected")
        if self._bytes > self._ratio:
            raise DataError(f"{self.name} unpacks to more than {RATIO} times its size, unlike any image data")
        if time.monotonic() > self._deadline:
            raise DataError(f"{self.name} takes longer than {TIME_LIMIT:g} seconds to read; unpack it yourself")
        self.allowance.spend(len(chunk))
        return chunk


class _MemberReader(Protocol):
    def __call__(self, file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]: ...


def _archive_reader(file: IO[bytes], name: str) -> _MemberReader | None:
    head = file.read(1 << 16)
    file.seek(0)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_members
    start = peek(head, 512)
    if start[257:262] == b"ustar" or name.lower().endswith(_TAR_NAMES):
        return _tar_gz_members if is_packed(head) else _tar_members
    return None


def _zip_members(file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]:
    counted = _Archive(name, _size(file), MOST_BYTES, allowance)
    with zipfile.ZipFile(_InPieces(file, name)) as archive:
        for member in archive.infolist():
            counted.member()
            _refuse_unsafe(member.filename, name)
            # Other compression methods can require gigabytes of memory to unpack a few bytes.
            if member.filename.endswith("/") or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                continue
            with archive.open(member) as content:
                yield Leaf(f"{name}/{member.filename}", member.file_size, _Limited(content, counted), allowance)


class _InPieces:
    """Wraps a file so that zipfile cannot read too much at once."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _ZIP_LIST:
            raise DataError(f"{self._name} has a file list of {size:,} bytes, longer than any data set needs")
        return self._file.read(size)


def _tar_gz_members(file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield from _members_of_tar(unpacked, _Archive(name, _size(file), TAR_LIMIT, allowance))


def _tar_members(file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]:
    yield from _members_of_tar(file, _Archive(name, _size(file), TAR_LIMIT, allowance))


def _members_of_tar(file: _Readable, counted: _Archive) -> Iterator[Leaf]:
    name = counted.name

    class Member(tarfile.TarInfo):
        """Counts extended headers and rejects sparse files, which can make tarfile do much work for a few bytes."""

        def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
            counted.member()
            if self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
                counted.header(self.size)
            member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
            return member

        def _proc_gnusparse_10(self, *_: object) -> None:
            raise DataError(f"{name} contains a sparse file; it was not opened")

    # "r|" reads forwards only, so no header can make it loop.
    limited = _Limited(file, counted)
    with tarfile.open(fileobj=limited, mode="r|", tarinfo=Member) as archive:  # type: ignore[call-overload]
        for member in archive:
            _refuse_unsafe(member.name, name)
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None:
                raise DataError(f"{name} contains {member.name!r}, which is not a regular file; it was not opened")
            yield Leaf(f"{name}/{member.name}", member.size, content, counted.allowance)


class _Limited:
    """Wraps a file so that everything read from it counts towards the archive's limits."""

    def __init__(self, file: _Readable, counted: _Archive) -> None:
        self._file, self._counted = file, counted

    def read(self, size: int) -> bytes:
        return self._counted.give(self._file.read(size))


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _refuse_unsafe(member: str, archive: str) -> None:
    """Reject an archive with a member path outside its folder. Nothing is extracted, but such an archive is suspect."""
    for path in (PurePosixPath(member), PureWindowsPath(member)):
        if path.anchor or ".." in path.parts:
            raise DataError(f"{archive} contains {member!r}, a path outside the archive's folder; it was not opened")


@contextmanager
def _one_kind_of_error(name: str) -> Iterator[None]:
    """Convert the many exceptions that Python's archive modules raise on damaged files into DataError."""
    try:
        yield
    except DataError:
        raise
    except EOFError:
        raise DataError(f"{name} is truncated") from None
    except (*_ARCHIVE_ERRORS, OSError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise DataError(f"{name} cannot be read: {error}") from None
