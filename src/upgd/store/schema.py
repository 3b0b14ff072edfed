"""The tables of a store, and their migrations."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from upgd.store.errors import StoreError

__all__ = ["APPLICATION", "MIGRATIONS", "checked_version", "prepare", "tables_of", "transaction", "version_of"]

#: Identifies an SQLite file of this package, in its header ("upgd").
APPLICATION = 0x75706764
#: Statements that migrate a store from version i to version i + 1. Never change a released one; append. Readers accept an old
#: store unchanged, without the columns that were added later, so records must work without these columns.
MIGRATIONS: list[str] = [
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL UNIQUE,      -- of all that follows up to engine
        problem TEXT NOT NULL,
        options TEXT NOT NULL,            -- JSON, like settings
        network TEXT NOT NULL,
        method TEXT NOT NULL,
        settings TEXT NOT NULL,
        seed INTEGER NOT NULL,
        steps INTEGER NOT NULL,
        engine INTEGER NOT NULL,
        window INTEGER NOT NULL,          -- steps per entry of the curves; the last may have fewer
        loss BLOB NOT NULL,               -- little-endian float32
        accuracy BLOB,                    -- the same; NULL in regression
        diverged_at INTEGER,              -- NULL: never
        device TEXT NOT NULL,
        backend TEXT NOT NULL,
        seconds REAL NOT NULL,
        package TEXT NOT NULL,
        torch TEXT NOT NULL,
        finished TEXT NOT NULL            -- UTC
    );
    CREATE INDEX runs_by_problem ON runs (problem, method);
    """,
    """
    ALTER TABLE runs ADD COLUMN diagnostics TEXT;  -- JSON; NULL where nobody looked inside
    """,
    """
    ALTER TABLE runs ADD COLUMN checksum BLOB;  -- of the whole row, see checksum_of; rows that were there get theirs now
    UPDATE runs SET checksum = checksum_of(
        'accuracy', accuracy, 'backend', backend, 'device', device, 'diagnostics', diagnostics, 'digest', digest,
        'diverged_at', diverged_at, 'engine', engine, 'finished', finished, 'id', id, 'loss', loss, 'method', method,
        'network', network, 'options', options, 'package', package, 'problem', problem, 'seconds', seconds,
        'seed', seed, 'settings', settings, 'steps', steps, 'torch', torch, 'window', window
    );
    """,
    """
    ALTER TABLE runs ADD COLUMN plugins TEXT;  -- JSON; NULL if everything was part of this package
    """,
]


def prepare(connection: sqlite3.Connection, path: str | Path) -> None:
    """Initialize a new file as a store, and migrate an old store."""
    version = checked_version(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    for number in range(version, len(MIGRATIONS)):
        with transaction(connection):
            if number == 0:
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TEXT NOT NULL)")
            for statement in _statements(MIGRATIONS[number]):
                connection.execute(statement)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (number + 1, now))


def _statements(script: str) -> Iterator[str]:
    """Return the statements of a script; sqlite3's executescript would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def checked_version(connection: sqlite3.Connection, path: str | Path) -> int:
    tables = tables_of(connection)
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if not tables and application == 0:
        return 0
    if application != APPLICATION or "migrations" not in tables:
        raise StoreError(f"{path} is an SQLite file of another program; choose another file")
    version = version_of(connection)
    if version < 1:
        raise StoreError(f"{path} is damaged: it has no schema version; restore it from a copy")
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer version of upgd (schema {version}; this version supports {len(MIGRATIONS)}); "
            "upgrade upgd, or choose another file"
        )
    return version


def version_of(connection: sqlite3.Connection) -> int:
    """Return the schema version of a store; 0 if it has none."""
    (version,) = connection.execute("SELECT max(version) FROM migrations").fetchone()
    return version if isinstance(version, int) else 0


def tables_of(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has already ended it
            connection.execute("ROLLBACK")
        raise
