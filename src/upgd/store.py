"""Results in one SQLite file: a row for every finished learner, its curves beside it.

A learner is known by what makes it compute what it computes (:class:`Key`): to add it again changes nothing, to change a
setting makes another row. There is one writer; any number of readers may look on while it writes. What has been added is on
the disk: a process killed at any moment, a full disk or a power cut takes away nothing of it.

Every row carries a checksum of all its columns. Opening a store checks its structure and every row, so that damage is never
mistaken for results: readers leave damaged rows out and warn (:class:`DamagedStoreWarning`), writers refuse the file.

    >>> key = Key(problem="toy", network="300-150", method="sgd", settings={"lr": 0.01}, seed=0, steps=4)
    >>> record = Record(key, window=2, loss=[0.5, 0.25], device="cpu", backend="torch", seconds=0.1)
    >>> with Store.write(":memory:") as store:
    ...     store.add([record]), store.add([record]), len(store)
    (1, 0, 1)
"""

import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIGRATIONS", "DamagedStoreWarning", "Key", "Record", "Store", "StoreError", "repair"]

#: What is behind the file's first bytes: an SQLite file of this package ("upgd").
APPLICATION = 0x75706764

#: Statement lists that bring a store from version i to version i + 1. Never change one that was released: append. Readers
#: take an old store as it is, without columns that came later: a record must be able to do without them, too.
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
    ALTER TABLE runs ADD COLUMN checksum BLOB;  -- of the whole row, see _checksum; rows that were there get theirs now
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

Curve = NDArray[np.float32]


class StoreError(OSError):
    """Something is wrong with the file of results; the message says what to do."""


class DamagedStoreWarning(UserWarning):
    """Part of a store is not as it was written, and is left out of what was read."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What makes a run the run that it is.

    Attributes:
        problem: the stream's name.
        options: the stream's options that were given.
        network: the network's name.
        method: the method's name.
        settings: the method's settings, all of them, defaults included.
        seed: the learner's seed.
        steps: how many steps it took.
        engine: the version of the computation; a new one gives new numbers.
    """

    problem: str
    options: Mapping[str, Any] = field(default_factory=dict)
    network: str
    method: str
    settings: Mapping[str, Any]
    seed: int
    steps: int
    engine: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {name: _plain(value) for name, value in self.options.items()})
        object.__setattr__(self, "settings", {_PRESENT.get(name, name): value for name, value in self.settings.items()})

    @cached_property
    def digest(self) -> str:
        """The key in 64 letters; equal for equal keys on every machine."""
        values = {**{name: getattr(self, name) for name in _KEY_COLUMNS}, "settings": _stored(self.settings)}
        return hashlib.sha256(_json(values).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Record:
    """What one learner has shown.

    Attributes:
        key: what it was.
        window: how many steps an entry of the curves has; only the last may have fewer.
        loss, accuracy: means over windows, of predictions made before the update; accuracy is None in regression. NaN from
            the window on in which the learner diverged.
        diverged_at: the step (from 0) at which it stopped to be finite; None if it never did.
        device, backend: where it ran and what computed it.
        seconds: its share of the time that its chunk took.
        package, torch: versions.
        finished: when, in UTC.
        diagnostics: what looks inside the learner have shown, ``"step"`` and every figure by name, each a list with one
            entry (a number, a list, or None) for each look; None if nobody looked.
        plugins: the modules outside of this package that its method, stream, network or data set came from, each with
            distribution and version, such as ``{"decay_home.method": "decay-home 0.1.0"}``; None if there were none.
        id: the row in the store; None if it comes from none.
        source: the store it was read from, where several are compared; not stored.
    """

    key: Key
    window: int
    loss: Curve | NDArray[np.float64]
    accuracy: Curve | NDArray[np.float64] | None = None
    diverged_at: int | None = None
    device: str = "cpu"
    backend: str = "torch"
    seconds: float = 0.0
    package: str = field(default_factory=lambda: _package_version())
    torch: str = field(default_factory=lambda: _torch_version())
    finished: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    diagnostics: Mapping[str, list[Any]] | None = None
    plugins: Mapping[str, str] | None = None
    id: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("loss", "accuracy"):
            curve = getattr(self, name)
            if curve is not None:
                object.__setattr__(self, name, np.asarray(curve, np.float32))
        windows = -(-self.key.steps // self.window)
        for curve in (self.loss, self.accuracy):
            if curve is not None and curve.shape != (windows,):
                raise ValueError(
                    f"{self.key.steps} steps in windows of {self.window} have {windows} means, not {curve.shape}"
                )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``(windows,)``: how many steps each window has."""
        lengths = np.full(len(self.loss), self.window, np.int64)
        lengths[-1] = self.key.steps - self.window * (len(self.loss) - 1)
        return lengths

    @property
    def ends(self) -> NDArray[np.int64]:
        """``(windows,)``: how many steps had been taken when each window ended."""
        return np.cumsum(self.lengths)


_KEY_COLUMNS = tuple(f.name for f in fields(Key))
_OWN_COLUMNS = tuple(f.name for f in fields(Record) if f.name not in ("key", "id", "source"))
_COLUMNS = (*_KEY_COLUMNS, *_OWN_COLUMNS)
_SUMMED = tuple(sorted(("id", "digest", *_COLUMNS)))  # what a checksum covers

#: What the module sqlite3 raises. A damaged length asks for more memory than there is; and a message that quotes a damaged
#: schema may be no text.
_SQLITE_ERRORS = (sqlite3.Error, MemoryError, UnicodeDecodeError)

#: How many findings of one kind a message lists.
_LISTED = 10


#: How writers of this process left the files that they closed: one that nobody has touched since need not be checked again
#: by the next writer, so that adding records one by one does not take longer with every record.
_LEFT: dict[str, tuple[tuple[int, int, int], ...]] = {}


class Store:
    """A file of results. Make one with :meth:`read` or :meth:`write`; both are context managers.

    Attributes:
        path: the file.
        damage: what is damaged, in words, according to the last :meth:`check`, which opening the store begins with.
    """

    def __init__(self, path: str | Path, connection: sqlite3.Connection, lock: sqlite3.Connection | None) -> None:
        self.path = Path(path)
        self._connection = connection
        self._lock = lock
        self.damage: list[str] = []
        self._damaged: set[int] = set()

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open a store to look at it; also while somebody writes to it. Nothing in it is changed, however old it is.

        Warns:
            DamagedStoreWarning: if the file or some of its rows are damaged. Damaged rows are left out.
        """
        store = cls(path, _open_to_read(path), None)
        try:
            if found := store.check():
                warnings.warn(_damaged(path, found, "the damaged part is left out"), DamagedStoreWarning, stacklevel=1)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def write(cls, path: str | Path) -> Self:
        """Open a store, or make a new one, to add to it. ``":memory:"`` makes one that is gone with the process.

        Raises:
            StoreError: if it cannot be written to, or is damaged: writing could destroy what can still be read.
        """
        in_memory = str(path) == ":memory:"
        lock = None if in_memory else _locked(Path(path))
        try:
            with _explained(path):
                store = cls(path, _connect(path, timeout=30), lock)
                try:
                    if _LEFT.get(os.path.realpath(path)) != _stamp(path) and (found := store.check()):
                        raise StoreError(_damaged(path, found, "nothing was written"))
                    _prepare(store._connection, path)
                except BaseException:
                    store._connection.close()
                    raise
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return store

    def close(self) -> None:
        """Let others write."""
        self._connection.close()
        if self._lock is not None:
            _LEFT[os.path.realpath(self.path)] = _stamp(self.path)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with _explained(self.path):
            (rows,) = self._connection.execute(f"SELECT count(*) FROM {self._runs}").fetchone()
        return int(rows) - len(self._damaged)

    @property
    def _runs(self) -> str:
        """Where to read columns that an index has, too: where something is damaged, that may be the index."""
        return "runs NOT INDEXED" if self.damage else "runs"

    def add(self, records: Iterable[Record]) -> int:
        """Add records in one transaction: all of them or, if something goes wrong, none.

        Returns:
            How many were new; those that were there already are left as they are.
        """
        rows: dict[str, dict[str, Any]] = {}
        for row in map(_row, records):
            rows.setdefault(row["digest"], row)
        marks = ", ".join("?" * (len(_SUMMED) + 1))
        sql = f"INSERT INTO runs ({', '.join(_SUMMED)}, checksum) VALUES ({marks})"
        with _explained(self.path), _transaction(self._connection):
            there = "SELECT digest FROM runs WHERE digest IN (SELECT value FROM json_each(?))"
            for (digest,) in self._connection.execute(there, [_json(list(rows))]).fetchall():
                del rows[digest]
            (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()
            for number, row in enumerate(rows.values(), last + 1):
                values = [row[name] if name != "id" else number for name in _SUMMED]
                self._connection.execute(sql, (*values, _checksum(zip(_SUMMED, values, strict=True))))
            return len(rows)

    def digests(self) -> set[str]:
        """The keys of all records."""
        with _explained(self.path):
            found = self._connection.execute(f"SELECT id, digest FROM {self._runs}").fetchall()
        return {digest for number, digest in found if number not in self._damaged}

    def records(
        self,
        *,
        problem: str | None = None,
        methods: Collection[str] | None = None,
        network: str | None = None,
        steps: int | None = None,
        seeds: Collection[int] | None = None,
        digests: Collection[str] | None = None,
    ) -> list[Record]:
        """The records that match all that is given, in the order in which they were added; None matches everything."""
        single = {"problem": problem, "network": network, "steps": steps}
        several = {"method": methods, "seed": seeds, "digest": digests}
        conditions = {f"{name} = ?": value for name, value in single.items() if value is not None}
        # A list travels as one JSON text: it may be longer than SQLite lets a statement have variables.
        conditions |= {
            f"{name} IN (SELECT value FROM json_each(?))": _json(list(values))
            for name, values in several.items()
            if values is not None
        }
        with _explained(self.path):
            # Ids first, so that curves are read only of what is wanted, and never sorted.
            where = f"WHERE id IN (SELECT id FROM {self._runs} WHERE {' AND '.join(conditions) or '1'}) ORDER BY id"
            found = _rows(self._connection, where, tuple(conditions.values()))
            return [_record(row) for row, intact in found if intact]

    def check(self) -> list[str]:
        """Check the file's structure and the checksum of every row.

        Returns:
            What is damaged, in words; an empty list if nothing is.
        """
        findings: list[str] = []
        damaged: list[int] = []
        with _explained(self.path):
            try:
                if _tables(self._connection):  # and not an empty file, as a writer has it at first
                    structure = self._connection.execute(f"PRAGMA integrity_check({_LISTED})").fetchall()
                    findings += [line.replace("*** in database main ***", "") for (line,) in structure if line != "ok"]
                    damaged += [row["id"] for row, intact in _rows(self._connection) if not intact]
            except _SQLITE_ERRORS as error:
                if not _is_damage(error):
                    raise
                findings.append(f"not all rows can be read ({error})")
        if damaged:
            more = f" and {len(damaged) - _LISTED} more" if len(damaged) > _LISTED else ""
            verb = "is" if len(damaged) == 1 else "are"
            findings.insert(0, f"{_named_rows(damaged[:_LISTED])}{more} {verb} not as written")
        self.damage = [" ".join(finding.split()) for finding in findings]
        self._damaged = set(damaged)
        return self.damage

    def delete(self, ids: Iterable[int]) -> int:
        """Remove records for good, and give the space back; how many there were."""
        with _explained(self.path):
            with _transaction(self._connection):
                before = self._connection.total_changes
                self._connection.executemany("DELETE FROM runs WHERE id = ?", [(i,) for i in ids])
                deleted = self._connection.total_changes - before
            self._connection.execute("VACUUM")
        return deleted


def _check_exists(path: Path) -> None:
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


def repair(path: str | Path, target: str | Path) -> tuple[int, list[int]]:
    """Copy all records of a damaged store that are as they were written into a new store. The damaged one is not changed.

    Args:
        path: the damaged store.
        target: the new one; there must be no such file yet.

    Returns:
        How many records were saved, and the numbers of rows that were not. Of rows on pages that cannot be read, not even
        the number may be known.
    """
    _check_exists(Path(path))
    if Path(target).exists():
        raise StoreError(f"{target} exists; repair writes to a new file: choose another name")
    saved: list[Record] = []
    lost: list[int] = []
    with _explained(path), closing(_connect_to_read(Path(path), "PRAGMA writable_schema = ON")) as connection:
        if "runs" not in _tables(connection):
            raise StoreError(f"{path} has no table of results; put a copy in its place")
        for number in sorted(_numbers(connection)):
            found: list[Record] = []
            with suppress(*_SQLITE_ERRORS):
                found = [_record(row) for row, intact in _rows(connection, "WHERE id = ?", (number,)) if intact]
            saved += found
            lost += [] if found else [number]
    with Store.write(target) as store:
        return store.add(saved), lost


def _numbers(connection: sqlite3.Connection) -> set[int]:
    """The numbers of all rows that anything knows of: the table, from both of its ends, and its indexes."""
    orders = ["NOT INDEXED ORDER BY id", "NOT INDEXED ORDER BY id DESC"]
    with suppress(*_SQLITE_ERRORS):
        orders += [
            f'INDEXED BY "{name}"' for (name,) in connection.execute("SELECT name FROM pragma_index_list('runs')")
        ]
    found: set[int] = set()
    for order in orders:
        with suppress(*_SQLITE_ERRORS):
            for (number,) in connection.execute(f"SELECT id FROM runs {order}"):
                found.add(number)
    return found


def _stamp(path: str | Path) -> tuple[tuple[int, int, int], ...]:
    """What a file and its log look like from outside; another one after every change."""
    stamps = []
    for name in (path, f"{path}-wal"):
        with suppress(FileNotFoundError):
            seen = os.stat(name)
            if seen.st_size:  # a reader leaves an empty log there
                stamps.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
    return tuple(stamps)


def _damaged(path: str | Path, findings: list[str], consequence: str) -> str:
    more = f"; and more (`upgd store check {path}`)" if len(findings) > 2 else ""
    return (
        f"{path} is damaged: {'; '.join(findings[:2])}{more}; {consequence}. "
        f"`upgd store repair {path} NEW.db` copies what is intact into a new file"
    )


def _named_rows(numbers: list[int]) -> str:
    return f"row{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _connect(address: str | Path, **options: Any) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(address, isolation_level=None, **options)
    # A damaged text shall make its row a damaged row, and not stop the reading of all others.
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    connection.create_function("checksum_of", -1, lambda *pairs: _checksum(zip(pairs[::2], pairs[1::2], strict=True)))
    return connection


def _open_to_read(path: str | Path) -> sqlite3.Connection:
    _check_exists(Path(path))
    with _explained(path):
        connection = _connect_to_read(Path(path))
        try:
            if _checked_version(connection, path) == 0:  # an empty file, as a writer has it at first
                connection.close()
                connection = _connect(":memory:")
                _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_to_read(path: Path, pragma: str = "") -> sqlite3.Connection:
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
    connection = _connect(address, uri=True, timeout=30)
    try:
        connection.execute(pragma)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _locked(path: Path) -> sqlite3.Connection:
    """Hold the writer's lock until the connection is closed or the process ends, in whatever way.

    SQLite locks files on every system, and lets go of them when a process dies. So the lock is an empty database beside the
    store that the writer has in an exclusive transaction. Symbolic links are followed: all names of a store share its lock.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent} for the store {path.name}; make it, or choose another file")
    _check_is_no_folder(path)
    if path.is_file():
        _open_to_read(path).close()  # or a file that is no store would get a lock beside it before it is refused
        if (names := target.stat().st_nlink) > 1:
            raise StoreError(
                f"{path} has {names} names (hard links), and writing under two of them at once would damage it; copy the "
                "file and use the copy, or remove the other names"
            )
    with _explained(path):
        lock = sqlite3.connect(f"{target}.lock", isolation_level=None, timeout=0)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except BaseException:
            lock.close()
            raise
    return lock


def _prepare(connection: sqlite3.Connection, path: str | Path) -> None:
    """Make a new file a store and an old store a new one."""
    version = _checked_version(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    for number in range(version, len(MIGRATIONS)):
        with _transaction(connection):
            if number == 0:
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, applied TEXT NOT NULL)")
            for statement in _statements(MIGRATIONS[number]):
                connection.execute(statement)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (number + 1, now))


def _statements(script: str) -> Iterator[str]:
    """The statements of a script: sqlite3's own executescript would commit before it begins."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _checked_version(connection: sqlite3.Connection, path: str | Path) -> int:
    tables = _tables(connection)
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if not tables and application == 0:
        return 0
    if application != APPLICATION or "migrations" not in tables:
        raise StoreError(f"{path} is an SQLite file of another program; choose another file")
    version = _version(connection)
    if version < 1:
        raise StoreError(f"{path} is damaged: it does not say which schema it has; put a copy in its place")
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer version of upgd (schema {version}; this one knows {len(MIGRATIONS)}); "
            "upgrade upgd, or choose another file"
        )
    return version


def _version(connection: sqlite3.Connection) -> int:
    """Which schema a store has; 0 if it does not say."""
    (version,) = connection.execute("SELECT max(version) FROM migrations").fetchone()
    return version if isinstance(version, int) else 0


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Say in one sentence what SQLite's errors mean for the user."""
    try:
        yield
    except _SQLITE_ERRORS as error:
        name = getattr(error, "sqlite_errorname", "")
        raise StoreError(_reason(str(path), name, error)) from error


def _reason(path: str, name: str, error: Exception) -> str:
    if name.startswith("SQLITE_BUSY") or name.startswith("SQLITE_LOCKED"):
        return f"another process is writing to {path}; wait for it, stop it, or choose another file"
    if name == "SQLITE_FULL":
        return f"no space is left for {path}; what was finished is kept: make room and run the same again"
    if _is_damage(error):
        return (
            f"{path} is damaged or no store ({error}); put a copy in its place, or save what can be read with "
            f"`upgd store repair {path} NEW.db`"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
        return f"{path} cannot be opened ({error}); check the permissions of file and folder, or choose another file"
    return f"{path} cannot be used ({error}); what was finished is kept"


def _is_damage(error: Exception) -> bool:
    named = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
    return named or isinstance(error, UnicodeDecodeError | MemoryError)


def _row(record: Record) -> dict[str, Any]:
    """All columns of a record but its number and checksum, in the types in which SQLite gives them back."""
    key = record.key
    values: dict[str, Any] = {name: getattr(key, name) for name in _KEY_COLUMNS}
    values |= {name: getattr(record, name) for name in _OWN_COLUMNS}
    values |= {"options": _json(values["options"]), "settings": _json(_stored(values["settings"]))}
    values |= {name: _blob(values[name]) for name in ("loss", "accuracy")}
    values |= {name: None if values[name] is None else _json(values[name]) for name in ("diagnostics", "plugins")}
    values |= {"window": int(record.window), "seconds": float(record.seconds)}
    values["diverged_at"] = None if record.diverged_at is None else int(record.diverged_at)
    return values | {"digest": key.digest}


def _checksum(columns: Iterable[tuple[str, Any]]) -> bytes:
    """Of the columns of a row, in the order of their names.

    Those that are NULL do not count, so that a column can be added to rows that are there.
    """
    head: list[Any] = []
    blobs: list[bytes] = []
    for name, value in columns:
        if isinstance(value, bytes):
            head += name, [len(value)]
            blobs.append(value)
        elif value is not None:
            head += name, value
    return hashlib.blake2b(b"".join([json.dumps(head).encode(), *blobs]), digest_size=16).digest()


def _rows(
    connection: sqlite3.Connection, where: str = "ORDER BY id", values: tuple[Any, ...] = ()
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Rows by column, and whether they are as they were written."""
    there = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('runs')")}
    summed = "checksum" in there or _version(connection) >= 3
    # Columns that the store is too old to have are NULL.
    names = [name if name in there else f"NULL AS {name}" for name in (*_SUMMED, "checksum")]
    for *columns, checksum in connection.execute(f"SELECT {', '.join(names)} FROM runs {where}", values):
        row = dict(zip(_SUMMED, columns, strict=True))
        yield row, checksum == _checksum(row.items()) if summed else _is_plausible(row)


def _is_plausible(row: Mapping[str, Any]) -> bool:
    """Whether a row from before there were checksums makes a record, and has the key that its digest was made of."""
    try:
        record = _record(row)
        datetime.fromisoformat(record.finished)
        numbers = isinstance(record.seconds, float) and isinstance(record.diverged_at, int | None)
        return numbers and record.key.digest == row["digest"]
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


def _record(row: Mapping[str, Any]) -> Record:
    values = {name: value for name, value in row.items() if name != "digest"}
    values |= {name: json.loads(values[name]) for name in ("options", "settings")}
    values |= {name: _curve(values[name]) for name in ("loss", "accuracy")}
    given = {name: values[name] for name in ("diagnostics", "plugins") if values[name] is not None}
    values |= {name: json.loads(text) for name, text in given.items()}
    key = Key(**{name: values.pop(name) for name in _KEY_COLUMNS})
    return Record(key, **values)


#: The present name of a setting, by the one that stores have.
_PRESENT = {"wise": "granularity"}


def _stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names that stores have always had, so that an old result is found under its key."""
    names = {present: old for old, present in _PRESENT.items()}
    return {names.get(name, name): value for name, value in settings.items()}


def _blob(curve: NDArray[Any] | None) -> bytes | None:
    return None if curve is None else curve.astype("<f4").tobytes()


def _curve(blob: bytes | None) -> Curve | None:
    return None if blob is None else np.frombuffer(blob, "<f4").astype(np.float32)


def _plain(value: Any) -> Any:
    """1.0 and 1 are equal, and have one spelling."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _package_version() -> str:
    from upgd import __version__

    return __version__


def _torch_version() -> str:
    import torch  # here, because those who only read results can do without

    return str(torch.__version__)
