"""Results that travel: a compressed CSV file with all that a store needs to go on from it.

A file has one row for each learner: its key (problem, options, network, method, settings, seed, steps, engine), its means
over all steps, the step at which it diverged, its curves, where it was computed, and a checksum. Any program that reads CSV
can recompute tables from it; :func:`read` gives the records back, and :func:`merge` adds records to a file.

Curves are joined to a number of windows that the writer chooses, and all numbers have six significant digits. So a file that
is read and written again stays as it is, byte for byte. What looks inside a learner have shown is not part of the file.
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
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from upgd import writing
from upgd.store import Key, Record

__all__ = ["COLUMNS", "SUMMARY", "WINDOWS", "coarsened", "merge", "read", "write"]

#: How many windows a curve has at most: more than a figure shows.
WINDOWS = 200
#: How many windows are enough for a mean over all steps and over the outer quarters.
SUMMARY = 4

_KEY = ("problem", "options", "network", "method", "settings", "seed", "steps", "engine")
_REST = ("loss", "accuracy", "diverged_at", "window", "loss_curve", "accuracy_curve")
_ORIGIN = ("device", "backend", "seconds", "package", "torch", "finished", "plugins")
#: The header of every file.
COLUMNS = (*_KEY, *_REST, *_ORIGIN, "check")

_MAGIC = b"\x1f\x8b"


def coarsened(record: Record, windows: int) -> Record:
    """The record as a file has it: with neighbouring windows joined, so that its curves have at most ``windows`` entries, and
    with numbers of six digits.

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
    """Write records to a file whose name ends with ``.csv.gz``, or ``.csv`` for one that is not compressed.

    The rows are sorted, so the same records give the same bytes. A file that was written by this function is replaced; no
    other compressed file is.
    """
    content = _text(records).encode()
    if os.fspath(path).endswith(".gz"):
        content = gzip.compress(content, 9, mtime=0)
    with writing.output(path, replaces=_is_ours) as file:
        file.write(content)


def merge(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Add records to a file, which is made if it is not there; of a record that it has, the longer curves are kept.

    Args:
        path: the file.
        records: what to add.

    Returns:
        How many records the file has now.
    """
    found = {record.key.digest: record for record in (read(path) if os.path.exists(path) else ())}
    for record in records:
        there = found.get(record.key.digest)
        if there is None or len(there.loss) < len(record.loss):
            found[record.key.digest] = record
    write(path, found.values())
    return len(found)


def read(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: the file is not as it was written. Nothing of it is used then.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        if content.startswith(_MAGIC):
            content = gzip.decompress(content)  # which has a checksum of all of it
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
        raise _damaged(path, "the last line is not complete")
    if len({record.key.digest for record in found}) < len(found):
        raise _damaged(path, "a learner is there twice")
    return found


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{os.fspath(path)} is damaged or no file of results ({why}); put an intact copy in its place")


def _is_ours(file: IO[bytes]) -> bool:
    """Whether a compressed file begins as those of :func:`write` do."""
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
    """All columns but the checksum, as text."""
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
    """The record of a row, if the row is as it was written."""
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
        raise ValueError("it does not have the checksum that it was written with")
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
    """Of the row's text, and of the key that the text was made of: a reader that understands it otherwise finds out."""
    said = json.dumps([key.digest, *cells]).encode()
    return hashlib.blake2b(said, digest_size=4).hexdigest()


def _mean(record: Record, curve: NDArray[Any] | None) -> str:
    """The mean over all steps of the numbers that the curve's column has; empty for a learner that diverged."""
    if curve is None or record.diverged_at is not None:
        return ""
    rounded = np.array([float(f"{value:.6g}") for value in curve.tolist()])
    return f"{float(rounded @ record.lengths) / record.key.steps:.6g}"


def _numbers(curve: NDArray[Any]) -> str:
    """The curve up to the window in which the learner diverged, which is nan like all that follow."""
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
