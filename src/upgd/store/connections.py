"""Opening files of results: connections for readers, and the lock of the one writer."""

import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from upgd.store.errors import StoreError, explained
from upgd.store.records import checksum_of
from upgd.store.schema import checked_version, prepare

__all__ = ["check_exists", "connect", "connect_to_read", "locked", "open_to_read"]


def check_exists(path: Path) -> None:
    if not path.exists():
        raise StoreError(
            f"there is no store {path}; `upgd run` and `upgd sweep` make one; or name another file (--store, UPGD_STORE)"
        )
    _check_is_no_folder(path)


def _check_is_no_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder; the store must be a file, such as {path / 'upgd.db'}")
    if path.exists() and not path.is_file():  # SQLite would wait for the other end of a named pipe, for ever
        raise StoreError(f"{path} is no regular file; choose another file for the store")


def connect(address: str | Path, **options: Any) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(address, isolation_level=None, **options)
    # A damaged text shall make its row a damaged row, and not stop the reading of all others.
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    connection.create_function("checksum_of", -1, lambda *pairs: checksum_of(zip(pairs[::2], pairs[1::2], strict=True)))
    return connection


def open_to_read(path: str | Path) -> sqlite3.Connection:
    check_exists(Path(path))
    with explained(path):
        connection = connect_to_read(Path(path))
        try:
            if checked_version(connection, path) == 0:  # an empty file, as a writer has it at first
                connection.close()
                connection = connect(":memory:")
                prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def connect_to_read(path: Path, pragma: str = "") -> sqlite3.Connection:
    if 0 < path.stat().st_size < 512:  # SQLite takes less than its smallest page for an empty file
        raise StoreError(f"{path} is damaged or no store (file is too short); put a copy in its place")
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        return _connected(address, pragma)
    except sqlite3.OperationalError:
        if Path(f"{path}-wal").exists():
            raise
        # In a folder that cannot be written to, SQLite cannot make the files through which it talks with a writer; there
        # is no writer then, either.
        return _connected(f"{address}&immutable=1", pragma)


def _connected(address: str, pragma: str) -> sqlite3.Connection:
    """A connection that has read something; a file that cannot be read leaves none behind.

    SQLite shares the state of a file among the connections of a process. One that stays open would hand what it remembers
    of a damaged file to whoever opens the file that has been put in its place.
    """
    connection = connect(address, uri=True, timeout=30)
    try:
        connection.execute(pragma)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def locked(path: Path) -> sqlite3.Connection:
    """Hold the writer's lock until the connection is closed or the process ends, in whatever way.

    SQLite locks files on every system, and lets go of them when a process dies. So the lock is an empty database beside the
    store that the writer has in an exclusive transaction. Symbolic links are followed: all names of a store share its lock.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent} for the store {path.name}; make it, or choose another file")
    _check_is_no_folder(path)
    if path.is_file():
        open_to_read(path).close()  # or a file that is no store would get a lock beside it before it is refused
        if (names := target.stat().st_nlink) > 1:
            raise StoreError(
                f"{path} has {names} names (hard links), and writing under two of them at once would damage it; copy the "
                "file and use the copy, or remove the other names"
            )
    with explained(path):
        lock = sqlite3.connect(f"{target}.lock", isolation_level=None, timeout=0)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except BaseException:
            lock.close()
            raise
    return lock
