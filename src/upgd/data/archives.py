"""Files in folders, tar and zip archives, one after the other. Nothing is ever extracted to disk."""

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

#: What was wrong with files that were passed over: clauses without a full stop, to be told if something is missing.
Problems = list[str]

#: More files than any folder or archive of data sets has: somebody named the wrong one.
MOST_FILES = 10_000
#: The most that one call takes out of archives and packed files together: files, and bytes.
MOST_MEMBERS, MOST_BYTES = 100_000, 1 << 33
#: Seconds after which an archive is given up; the largest official one takes a few.
TIME_LIMIT = 300.0
#: How long the list of files in a zip archive may be; zipfile reads it at once, whatever length an archive claims.
_ZIP_LIST = 4 << 20
#: For the sum of the squares of the lengths of extended headers in a tar archive. tarfile takes seconds for this much, as
#: it looks for numbers in them by a pattern whose time grows with the square of the length.
_TAR_HEADERS = 1 << 29
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
    _allowance: "_Allowance"

    def unpack(self, data: bytes, limit: int) -> bytes:
        """What is packed in the file's content; see :func:`upgd.data.packing.unpack`."""
        content = unpack(data, self.name, limit)
        if is_packed(data):
            self._allowance.spend(len(content))
        return content

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

    An archive that is damaged or unsafe is passed over, and ``problems`` gets a clause that says why; so is the rest if
    archives and packed files turn out to hold more than any data sets do.
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
        raise DataError(f"there is no file or folder {path}.")
    if path.is_file():
        yield path
        return
    if not path.is_dir():  # a named pipe would wait for ever
        raise DataError(f"{path} is neither a file nor a folder; name the one that holds the data set.")
    count = 0
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
        for name in sorted(names):
            count += 1
            if count > MOST_FILES:
                raise DataError(f"{path} has more than {MOST_FILES:,} files: name the folder that holds the data set.")
            file = Path(folder, name)
            if stat.S_ISREG(file.stat().st_mode if file.exists() else 0) and os.access(file, os.R_OK):
                yield file


class _Allowance:
    """What one call may take out of archives and packed files, all of them together."""

    def __init__(self, path: Path) -> None:
        self._path, self._members, self._bytes = path, MOST_MEMBERS, MOST_BYTES

    @property
    def spent(self) -> bool:
        return self._members < 0 or self._bytes < 0

    @property
    def reason(self) -> str:
        most = f"{MOST_BYTES:,} bytes" if self._bytes < 0 else f"{MOST_MEMBERS:,} files"
        return f"archives and packed files in {self._path} hold more than {most}, so the rest was not opened"

    def spend(self, count: int, members: int = 0) -> None:
        """Take note of bytes and members, and raise a DataError when it is too much."""
        self._bytes -= count
        self._members -= members
        if self.spent:
            raise DataError(f"{self.reason}.")


class _Archive:
    """Counts what comes out of one archive, and raises a DataError when it is more than any good one holds."""

    def __init__(self, name: str, size: int, most: int, allowance: _Allowance) -> None:
        self.name, self.allowance = name, allowance
        self._most, self._ratio, self._headers = most, most_unpacked(size), _TAR_HEADERS
        self._members = self._bytes = 0
        self._deadline = time.monotonic() + TIME_LIMIT

    def member(self) -> None:
        """Another member."""
        self._members += 1
        if self._members > MOST_FILES:
            raise DataError(f"{self.name} holds more than {MOST_FILES:,} files, more than any data set.")
        self.allowance.spend(0, members=1)

    def header(self, size: int) -> None:
        """An extended header of a tar archive."""
        self._headers -= size * size
        if self._headers < 0:
            raise DataError(f"{self.name} has long headers, as no data set needs them; it was not opened.")

    def give(self, chunk: bytes) -> bytes:
        """The chunk itself."""
        self._bytes += len(chunk)
        if self._bytes > self._most:
            raise DataError(f"{self.name} unpacks to more than {self._most:,} bytes, more than it should.")
        if self._bytes > self._ratio:
            raise DataError(f"{self.name} unpacks to more than {RATIO} times its size, as no images do.")
        if time.monotonic() > self._deadline:
            raise DataError(f"{self.name} takes longer than {TIME_LIMIT:g} seconds to read; unpack it yourself.")
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
            # Other methods may ask for gigabytes to unpack a few bytes.
            if member.filename.endswith("/") or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                continue
            with archive.open(member) as content:
                yield Leaf(f"{name}/{member.filename}", member.file_size, _Limited(content, counted), allowance)


class _InPieces:
    """A file of which zipfile cannot read very much at once."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _ZIP_LIST:
            raise DataError(f"{self._name} has a list of files of {size:,} bytes, longer than any data set needs.")
        return self._file.read(size)


def _tar_gz_members(file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        yield from _members_of_tar(unpacked, _Archive(name, _size(file), TAR_LIMIT, allowance))


def _tar_members(file: IO[bytes], name: str, allowance: _Allowance) -> Iterator[Leaf]:
    yield from _members_of_tar(file, _Archive(name, _size(file), TAR_LIMIT, allowance))


def _members_of_tar(file: _Readable, counted: _Archive) -> Iterator[Leaf]:
    name = counted.name

    class Member(tarfile.TarInfo):
        """Extended headers and sparse files are where a few bytes make tarfile work for long."""

        def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
            counted.member()
            if self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
                counted.header(self.size)
            member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
            return member

        def _proc_gnusparse_10(self, *_: object) -> None:
            raise DataError(f"{name} holds a sparse file; it was not opened.")

    # "r|" reads forwards only: no header can send it back and round in circles.
    limited = _Limited(file, counted)
    with tarfile.open(fileobj=limited, mode="r|", tarinfo=Member) as archive:  # type: ignore[call-overload]
        for member in archive:
            _refuse_unsafe(member.name, name)
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is None:
                raise DataError(f"{name} holds {member.name!r}, which is no plain file; it was not opened.")
            yield Leaf(f"{name}/{member.name}", member.size, content, counted.allowance)


class _Limited:
    """Reads from a file until it has given more than any good archive holds."""

    def __init__(self, file: _Readable, counted: _Archive) -> None:
        self._file, self._counted = file, counted

    def read(self, size: int) -> bytes:
        return self._counted.give(self._file.read(size))


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


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
