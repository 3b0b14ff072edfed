"""Portable results: a compressed CSV file with everything that a store needs to resume from it.

A file has one row per learner: its key (problem, options, network, method, settings, seed, steps, engine), its means over all
steps, the step at which it diverged, its curves, where it was computed, and a checksum. Any program that reads CSV can
recompute tables from it. :func:`read` returns the records, and :func:`merge` adds records to a file.

The writer chooses the number of windows per curve, and all numbers have six significant digits, so reading and writing a
file again gives the same bytes. Diagnostics are not part of the file.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from upgd import writing
from upgd.store import Key, Record

__all__ = ["COLUMNS", "SUMMARY", "WINDOWS", "coarsened", "merge", "read", "write"]

#: Maximum number of windows per curve: more than a figure shows.
WINDOWS = 200
#: Number of windows that is enough for means over all steps and over the first and last quarter.
SUMMARY = 4

_KEY = ("problem", "options", "network", "method", "settings", "seed", "steps", "engine")
_REST = ("loss", "accuracy", "diverged_at", "window", "loss_curve", "accuracy_curve")
_ORIGIN = ("device", "backend", "seconds", "package", "torch", "finished", "plugins")
#: The header of every file.
COLUMNS = (*_KEY, *_REST, *_ORIGIN, "check")

_MAGIC = b"\x1f\x8b"
_MAGIC_OF_STORES = b"SQLite format 3\0"


def coarsened(record: Record, windows: int) -> Record:
    """Return the record as stored in a file: neighbouring windows are merged so that curves have at most ``windows`` entries,
    and numbers have six digits.

    Example:
        >>> key = Key(problem="toy", network="5", method="sgd", settings={"lr": 0.1}, seed=0, steps=6)
        >>> coarsened(Record(key, window=1, loss=[6, 5, 4, 3, 2, 1]), 2).loss.tolist()
        [5.0, 2.0]
    """
    together = max(1, -(-len(record.loss) // windows))
    first = np.arange(0, len(record.loss), together)
    lengths = record.lengths

    def joined(curve: NDArray[Any]) -> NDArray[np.float32]:
        if together > 1:
            curve = np.add.reduceat(curve * lengths, first) / np.add.reduceat(lengths, first)
        return np.array([f"{value:.6g}" for value in curve.astype(np.float32).tolist()], np.float32)

    accuracy = None if record.accuracy is None else joined(record.accuracy)
    return replace(record, window=record.window * together, loss=joined(record.loss), accuracy=accuracy)


def write(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write records to a file whose name ends in ``.csv.gz``, or in ``.csv`` for an uncompressed one.

    The rows are sorted, so the same records give the same bytes. A file written by this function is replaced; other
    compressed files are not.
    """
    content = _text(records).encode()
    if os.fspath(path).endswith(".gz"):
        content = gzip.compress(content, 9, mtime=0)
    with writing.output(path, replaces=_is_ours) as file:
        file.write(content)


def merge(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Add records to a file, which is created if necessary; of duplicate records, the one with longer curves is kept.

    A file that has all of them already is not written again, because another version of zlib may compress it differently.

    Args:
        path: the file.
        records: the records to add.

    Returns:
        The number of records in the file.
    """
    exists = os.path.exists(path)
    found = {record.key.digest: record for record in (read(path) if exists else ())}
    new: dict[str, Record] = {}
    for record in records:
        there = new.get(record.key.digest) or found.get(record.key.digest)
        if there is None or len(there.loss) < len(record.loss):
            new[record.key.digest] = record
    if new or not exists:
        write(path, (found | new).values())
    return len(found | new)


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of a file.

    Raises:
        ValueError: If the file is damaged; no part of it is used then.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {path}; write one with `upgd export {Path(path).name} --portable`, or check the path"
        ) from None
    if content.startswith(_MAGIC_OF_STORES):
        raise ValueError(
            f"{os.fspath(path)} is a store and not a file of `upgd export --portable`; add it with `upgd runs merge {path}`"
        )
    try:
        if content.startswith(_MAGIC):
            content = gzip.decompress(content)  # verifies gzip's checksum
        text = content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        if tuple(header) != COLUMNS:
            raise ValueError("it does not have the columns of `upgd export --portable`")
        found = [_record(row) for row in rows]
    except (csv.Error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"line {rows.line_num}: {error}") from error
    if not text.endswith("\n"):
        raise _damaged(path, "the last line is incomplete")
    if len({record.key.digest for record in found}) < len(found):
        raise _damaged(path, "a learner occurs twice")
    return found


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)} is damaged or not a file of results ({why}); replace it with an intact copy")


def _is_ours(file: IO[bytes]) -> bool:
    """Return whether a compressed file starts like those of :func:`write`."""
    try:
        with gzip.GzipFile(fileobj=file) as opened:
            return opened.read(256).startswith(",".join(COLUMNS).encode()[:256])
    except (OSError, EOFError, zlib.error):
        return False


def _text(records: Iterable[Record]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(COLUMNS)
    ordered = sorted(((_cells(record), record.key) for record in records), key=_order)
    writer.writerows([*cells, _check(key, cells)] for cells, key in ordered)
    return stream.getvalue()


def _order(row: tuple[list[str], Key]) -> tuple[Any, ...]:
    cells, key = row
    problem, options, network, method, settings, *_ = cells
    return key.engine, problem, options, network, key.steps, method, settings, key.seed


def _cells(record: Record) -> list[str]:
    """Return all columns but the checksum, as text."""
    key = record.key
    values = {
        **{name: str(getattr(key, name)) for name in _KEY},
        "options": _json(key.options),
        "settings": _json(key.settings),
        "loss": _mean(record, record.loss),
        "accuracy": _mean(record, record.accuracy),
        "diverged_at": "" if record.diverged_at is None else str(record.diverged_at),
        "window": str(record.window),
        "loss_curve": _numbers(record.loss),
        "accuracy_curve": "" if record.accuracy is None else _numbers(record.accuracy),
        **{name: getattr(record, name) for name in ("device", "backend", "package", "torch", "finished")},
        "seconds": f"{record.seconds:.4g}",
        "plugins": "" if record.plugins is None else _json(record.plugins),
    }
    return [values[name] for name in COLUMNS[:-1]]


def _record(row: list[str]) -> Record:
    """Parse a row, after verifying its checksum."""
    if len(row) != len(COLUMNS):
        raise ValueError(f"it has {len(row)} columns instead of {len(COLUMNS)}")
    cells = dict(zip(COLUMNS, row, strict=True))
    key = Key(
        problem=cells["problem"],
        options=json.loads(cells["options"]),
        network=cells["network"],
        method=cells["method"],
        settings=json.loads(cells["settings"]),
        seed=int(cells["seed"]),
        steps=int(cells["steps"]),
        engine=int(cells["engine"]),
    )
    if _check(key, row[:-1]) != cells["check"]:
        raise ValueError("its checksum is wrong")
    window = int(cells["window"])
    windows = -(-key.steps // window)
    return Record(
        key,
        window=window,
        loss=_curve(cells["loss_curve"], windows),
        accuracy=_curve(cells["accuracy_curve"], windows) if cells["accuracy_curve"] else None,
        diverged_at=int(cells["diverged_at"]) if cells["diverged_at"] else None,
        device=cells["device"],
        backend=cells["backend"],
        seconds=float(cells["seconds"]),
        package=cells["package"],
        torch=cells["torch"],
        finished=cells["finished"],
        plugins=json.loads(cells["plugins"]) if cells["plugins"] else None,
    )


def _check(key: Key, cells: list[str]) -> str:
    """Return the checksum of the row's text and of the key that it was made from, which detects misparsed keys."""
    said = json.dumps([key.digest, *cells]).encode()
    return hashlib.blake2b(said, digest_size=4).hexdigest()


def _mean(record: Record, curve: NDArray[Any] | None) -> str:
    """Return the mean over all steps of the rounded curve; empty for a diverged learner."""
    if curve is None or record.diverged_at is not None:
        return ""
    rounded = np.array([float(f"{value:.6g}") for value in curve.tolist()])
    return f"{float(rounded @ record.lengths) / record.key.steps:.6g}"


def _numbers(curve: NDArray[Any]) -> str:
    """Format the curve up to the window in which the learner diverged, which is nan like all that follow."""
    bad = np.flatnonzero(~np.isfinite(curve))
    values = [*curve.tolist()[: bad[0]], np.nan] if len(bad) else curve.tolist()
    return " ".join(f"{value:.6g}" for value in values)


def _curve(text: str, windows: int) -> NDArray[np.float32]:
    values = np.array(text.split(), np.float32)
    if len(values) < windows and np.isnan(values[-1:]).all():
        values = np.pad(values, (0, windows - len(values)), constant_values=np.nan)
    if len(values) != windows or np.isinf(values).any():
        raise ValueError(f"its curve has {len(values)} numbers instead of {windows}")
    return values


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
