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
            f"there is no store {path}; create it with `upgd run` or `upgd sweep`, or choose another (--store, UPGD_STORE)"
        )
    _check_is_no_folder(path)


def _check_is_no_folder(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder; the store must be a file, such as {path / 'upgd.db'}")
    if path.exists() and not path.is_file():  # SQLite would block on a named pipe
        raise StoreError(f"{path} is not a regular file; choose another file for the store")


def connect(address: str | Path, **options: Any) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(address, isolation_level=None, **options)
    # Decode leniently, so that a damaged text affects only its own row.
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    connection.create_function("checksum_of", -1, lambda *pairs: checksum_of(zip(pairs[::2], pairs[1::2], strict=True)))
    return connection


def open_to_read(path: str | Path) -> sqlite3.Connection:
    check_exists(Path(path))
    with explained(path):
        connection = connect_to_read(Path(path))
        try:
            if checked_version(connection, path) == 0:  # an empty file, which a writer has just created
                connection.close()
                connection = connect(":memory:")
                prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def connect_to_read(path: Path, pragma: str = "") -> sqlite3.Connection:
    if 0 < path.stat().st_size < 512:  # SQLite treats files smaller than a page as empty
        raise StoreError(f"{path} is damaged or not a store (file is too short); restore it from a copy")
    address = f"file:{quote(str(path.absolute()))}"
    # A read-only connection creates the files -wal and -shm and cannot remove them, so use one that may write, and refuse
    # statements that write. If these files exist, leave them to their writer: closing would add their content to the store.
    left_behind = any(Path(f"{path}{suffix}").exists() for suffix in ("-wal", "-journal"))
    mode = "ro" if left_behind else "rw"
    try:
        return _connected(f"{address}?mode={mode}", pragma)
    except sqlite3.OperationalError:
        if Path(f"{path}-wal").exists():
            raise
        # In a read-only folder, SQLite cannot create the files that it shares with a writer; there can be no writer
        # either.
        return _connected(f"{address}?mode=ro&immutable=1", pragma)


def _connected(address: str, pragma: str) -> sqlite3.Connection:
    """Return a connection after reading from it; if the file cannot be read, close the connection.

    SQLite shares the state of a file among the connections of a process. A connection that stays open would pass on cached
    content of a damaged file after the file has been replaced.
    """
    connection = connect(address, uri=True, timeout=30)
    try:
        connection.execute("PRAGMA query_only = 1")
        connection.execute(pragma)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def locked(path: Path) -> sqlite3.Connection:
    """Hold the writer's lock until the connection is closed or the process ends.

    SQLite locks files on every system and releases the locks when a process dies. The lock is therefore an empty database
    next to the store, held in an exclusive transaction. Symbolic links are resolved, so all names of a store share its lock.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise StoreError(
            f"the folder {path.parent} of the store {path.name} does not exist; create it, or choose another"
        )
    _check_is_no_folder(path)
    if path.is_file():
        open_to_read(path).close()  # otherwise, a file that is not a store would get a lock file before it is refused
        if (names := target.stat().st_nlink) > 1:
            raise StoreError(
                f"{path} has {names} names (hard links), and writing under two of them at once would damage it; use a copy "
                "of the file, or remove the other names"
            )
    with explained(path):
        lock = sqlite3.connect(f"{target}.lock", isolation_level=None, timeout=0)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except BaseException:
            lock.close()
            raise
    return lock
