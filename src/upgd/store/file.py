"""The file of results: reading, adding, checking and repairing."""

import os
import sqlite3
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from upgd.store.connections import check_exists, connect, connect_to_read, locked, open_to_read
from upgd.store.errors import SQLITE_ERRORS, DamagedStoreWarning, StoreError, explained, is_damage
from upgd.store.records import SUMMED, Record, as_json, checksum_of, is_plausible, record_of, row_of
from upgd.store.schema import prepare, tables_of, transaction, version_of

__all__ = ["Store", "repair"]

#: Number of findings of one kind that a message lists.
_LISTED = 10
#: The state of files when a writer of this process closed them. A file that is unchanged since then need not be checked again
#: by the next writer, so that adding records one by one does not become slower with every record.
_LEFT: dict[str, tuple[tuple[int, int, int], ...]] = {}


class Store:
    """A file of results. Open it with :meth:`read` or :meth:`write`; both return context managers.

    Attributes:
        path: the file.
        damage: descriptions of any damage, from the last :meth:`check`, which opening the store performs.
    """

    def __init__(self, path: str | Path, connection: sqlite3.Connection, lock: sqlite3.Connection | None) -> None:
        self.path = Path(path)
        self._connection = connection
        self._lock = lock
        self.damage: list[str] = []
        self._damaged: set[int] = set()

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open a store for reading, even while another process writes to it. Nothing is changed, even in an old store.

        Warns:
            DamagedStoreWarning: If the file or some of its rows are damaged. Damaged rows are skipped.
        """
        store = cls(path, open_to_read(path), None)
        try:
            if found := store.check():
                warnings.warn(_damaged(path, found, "the damaged part is skipped"), DamagedStoreWarning, stacklevel=1)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def write(cls, path: str | Path) -> Self:
        """Open a store for writing, or create it. ``":memory:"`` creates a temporary store in memory.

        Raises:
            StoreError: If it cannot be written to, or is damaged, because writing could destroy readable data.
        """
        in_memory = str(path) == ":memory:"
        lock = None if in_memory else locked(Path(path))
        try:
            with explained(path):
                store = cls(path, connect(path, timeout=30), lock)
                try:
                    if _LEFT.get(os.path.realpath(path)) != _stamp(path) and (found := store.check()):
                        raise StoreError(_damaged(path, found, "nothing was written"))
                    prepare(store._connection, path)
                except BaseException:
                    store._connection.close()
                    raise
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return store

    def close(self) -> None:
        """Close the store and release the writer's lock."""
        self._connection.close()
        if self._lock is not None:
            _LEFT[os.path.realpath(self.path)] = _stamp(self.path)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with explained(self.path):
            (rows,) = self._connection.execute(f"SELECT count(*) FROM {self._runs}").fetchone()
        return int(rows) - len(self._damaged)

    @property
    def _runs(self) -> str:
        """The table to read indexed columns from; without its indexes if something is damaged, because they may be."""
        return "runs NOT INDEXED" if self.damage else "runs"

    def add(self, records: Iterable[Record]) -> int:
        """Add records in one transaction: all of them or, in case of an error, none.

        Returns:
            The number of new records; existing ones are not changed.
        """
        rows: dict[str, dict[str, Any]] = {}
        for row in map(row_of, records):
            rows.setdefault(row["digest"], row)
        marks = ", ".join("?" * (len(SUMMED) + 1))
        sql = f"INSERT INTO runs ({', '.join(SUMMED)}, checksum) VALUES ({marks})"
        with explained(self.path), transaction(self._connection):
            there = "SELECT digest FROM runs WHERE digest IN (SELECT value FROM json_each(?))"
            for (digest,) in self._connection.execute(there, [as_json(list(rows))]).fetchall():
                del rows[digest]
            (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()
            for number, row in enumerate(rows.values(), last + 1):
                values = [row[name] if name != "id" else number for name in SUMMED]
                self._connection.execute(sql, (*values, checksum_of(zip(SUMMED, values, strict=True))))
            return len(rows)

    def digests(self) -> set[str]:
        """Return the digests of all keys."""
        with explained(self.path):
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
        """Return the records that match all given criteria, in the order in which they were added; None matches all."""
        single = {"problem": problem, "network": network, "steps": steps}
        several = {"method": methods, "seed": seeds, "digest": digests}
        conditions = {f"{name} = ?": value for name, value in single.items() if value is not None}
        # A list is passed as one JSON text, because it may exceed SQLite's limit on variables.
        conditions |= {
            f"{name} IN (SELECT value FROM json_each(?))": as_json(list(values))
            for name, values in several.items()
            if values is not None
        }
        with explained(self.path):
            # Select ids first, so that curves are read only for matching rows and never sorted.
            where = f"WHERE id IN (SELECT id FROM {self._runs} WHERE {' AND '.join(conditions) or '1'}) ORDER BY id"
            found = _rows(self._connection, where, tuple(conditions.values()))
            return [record_of(row) for row, intact in found if intact]

    def check(self) -> list[str]:
        """Check the file's structure and the checksum of every row.

        Returns:
            Descriptions of the damage; an empty list if there is none.
        """
        findings: list[str] = []
        damaged: list[int] = []
        with explained(self.path):
            try:
                if tables_of(self._connection):  # not an empty file, which a writer has just created
                    structure = self._connection.execute(f"PRAGMA integrity_check({_LISTED})").fetchall()
                    findings += [line.replace("*** in database main ***", "") for (line,) in structure if line != "ok"]
                    damaged += [row["id"] for row, intact in _rows(self._connection) if not intact]
            except SQLITE_ERRORS as error:
                if not is_damage(error):
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
        """Remove records permanently, free their space, and return their number."""
        with explained(self.path):
            with transaction(self._connection):
                before = self._connection.total_changes
                self._connection.executemany("DELETE FROM runs WHERE id = ?", [(i,) for i in ids])
                deleted = self._connection.total_changes - before
            self._connection.execute("VACUUM")
        return deleted


def repair(path: str | Path, target: str | Path) -> tuple[int, list[int]]:
    """Copy all intact records of a damaged store to a new store. The damaged store is not changed.

    Args:
        path: the damaged store.
        target: the new store; the file must not exist.

    Returns:
        The number of saved records, and the ids of the rows that were not saved. The ids of rows on unreadable pages may be
        unknown.
    """
    check_exists(Path(path))
    if Path(target).exists():
        raise StoreError(f"{target} exists, but repair needs a new file; choose another name")
    saved: list[Record] = []
    lost: list[int] = []
    with explained(path), closing(connect_to_read(Path(path), "PRAGMA writable_schema = ON")) as connection:
        if "runs" not in tables_of(connection):
            raise StoreError(f"{path} has no table of results; restore it from a copy")
        for number in sorted(_numbers(connection)):
            found: list[Record] = []
            with suppress(*SQLITE_ERRORS):
                found = [record_of(row) for row, intact in _rows(connection, "WHERE id = ?", (number,)) if intact]
            saved += found
            lost += [] if found else [number]
    with Store.write(target) as store:
        return store.add(saved), lost


def _numbers(connection: sqlite3.Connection) -> set[int]:
    """Return the ids of all rows found in the table, read from both ends, and in its indexes."""
    orders = ["NOT INDEXED ORDER BY id", "NOT INDEXED ORDER BY id DESC"]
    with suppress(*SQLITE_ERRORS):
        orders += [
            f'INDEXED BY "{name}"' for (name,) in connection.execute("SELECT name FROM pragma_index_list('runs')")
        ]
    found: set[int] = set()
    for order in orders:
        with suppress(*SQLITE_ERRORS):
            for (number,) in connection.execute(f"SELECT id FROM runs {order}"):
                found.add(number)
    return found


def _rows(
    connection: sqlite3.Connection, where: str = "ORDER BY id", values: tuple[Any, ...] = ()
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield rows by column, and whether they are intact."""
    there = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('runs')")}
    summed = "checksum" in there or version_of(connection) >= 3
    # Columns that are missing from an old store are NULL.
    names = [name if name in there else f"NULL AS {name}" for name in (*SUMMED, "checksum")]
    for *columns, checksum in connection.execute(f"SELECT {', '.join(names)} FROM runs {where}", values):
        row = dict(zip(SUMMED, columns, strict=True))
        yield row, checksum == checksum_of(row.items()) if summed else is_plausible(row)


def _stamp(path: str | Path) -> tuple[tuple[int, int, int], ...]:
    """Return size and times of a file and its log, which differ after every change."""
    stamps = []
    for name in (path, f"{path}-wal"):
        with suppress(FileNotFoundError):
            seen = os.stat(name)
            if seen.st_size:  # readers may leave an empty log
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
