"""The stored data of a learner, its key and its curves, as objects and as rows."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SUMMED", "Curve", "Key", "Record", "as_json", "checksum_of", "is_plausible", "record_of", "row_of"]

Curve = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Everything that identifies a run.

    Attributes:
        problem: the name of the stream.
        options: the options of the stream that differ from its defaults.
        network: the name of the network.
        method: the name of the method.
        settings: all settings of the method, including defaults.
        seed: the seed of the learner.
        steps: the number of steps.
        engine: the version of the computation; different versions may give different numbers.
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
        """A hash of the key, 64 characters; equal keys have equal digests on every machine."""
        values = {**{name: getattr(self, name) for name in _KEY_COLUMNS}, "settings": _stored(self.settings)}
        return hashlib.sha256(as_json(values).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Record:
    """The results of one learner.

    Attributes:
        key: identifies the run.
        window: number of steps per entry of the curves; only the last entry may have fewer.
        loss, accuracy: means over windows, of predictions made before the update; accuracy is None for regression. NaN from
            the window in which the learner diverged.
        diverged_at: the step (from 0) at which it diverged; None if it did not.
        device, backend: the device and the backend of the computation.
        seconds: its share of the time that its chunk took.
        package, torch: versions.
        finished: the time of completion, in UTC.
        diagnostics: ``"step"`` and every diagnostic by name, each a list with one entry (a number, a list, or None) per
            snapshot; None if no diagnostics were recorded.
        plugins: third-party modules that define its method, stream, network or data set, each with its distribution,
            version and a digest of its source, such as ``{"decay_home.method": "decay-home 0.1.0, source 5f1c2a90"}``;
            None if there were none.
        id: the row in the store; None if the record is not from a store.
        source: the store that it was read from, if several are compared; not stored.
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

    @property
    def steps_taken(self) -> int:
        """The number of steps until the end or the divergence."""
        return self.key.steps if self.diverged_at is None else self.diverged_at

    def __post_init__(self) -> None:
        for name in ("loss", "accuracy"):
            curve = getattr(self, name)
            if curve is not None:
                object.__setattr__(self, name, np.asarray(curve, np.float32))
        windows = -(-self.key.steps // self.window)
        for curve in (self.loss, self.accuracy):
            if curve is not None and curve.shape != (windows,):
                raise ValueError(
                    f"{self.key.steps} steps in windows of {self.window} need {windows} means, not {curve.shape}"
                )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``(windows,)``: number of steps in each window."""
        lengths = np.full(len(self.loss), self.window, np.int64)
        lengths[-1] = self.key.steps - self.window * (len(self.loss) - 1)
        return lengths

    @property
    def ends(self) -> NDArray[np.int64]:
        """``(windows,)``: number of steps at the end of each window."""
        return np.cumsum(self.lengths)


_KEY_COLUMNS = tuple(f.name for f in fields(Key))
_OWN_COLUMNS = tuple(f.name for f in fields(Record) if f.name not in ("key", "id", "source"))
COLUMNS = (*_KEY_COLUMNS, *_OWN_COLUMNS)
SUMMED = tuple(sorted(("id", "digest", *COLUMNS)))  # the columns that a checksum covers


def row_of(record: Record) -> dict[str, Any]:
    """Return all columns of a record except its id and checksum, with the types that SQLite returns."""
    key = record.key
    values: dict[str, Any] = {name: getattr(key, name) for name in _KEY_COLUMNS}
    values |= {name: getattr(record, name) for name in _OWN_COLUMNS}
    values |= {"options": as_json(values["options"]), "settings": as_json(_stored(values["settings"]))}
    values |= {name: _blob(values[name]) for name in ("loss", "accuracy")}
    values |= {name: None if values[name] is None else as_json(values[name]) for name in ("diagnostics", "plugins")}
    values |= {"window": int(record.window), "seconds": float(record.seconds)}
    values["diverged_at"] = None if record.diverged_at is None else int(record.diverged_at)
    return values | {"digest": key.digest}


def checksum_of(columns: Iterable[tuple[str, Any]]) -> bytes:
    """Return the checksum of the columns of a row, in the order of their names.

    NULL columns are skipped, so that columns can be added to existing rows.
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


def is_plausible(row: Mapping[str, Any]) -> bool:
    """Return whether a row without a checksum is a valid record whose key matches its digest."""
    try:
        record = record_of(row)
        datetime.fromisoformat(record.finished)
        numbers = isinstance(record.seconds, float) and isinstance(record.diverged_at, int | None)
        return numbers and record.key.digest == row["digest"]
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


def record_of(row: Mapping[str, Any]) -> Record:
    values = {name: value for name, value in row.items() if name != "digest"}
    values |= {name: json.loads(values[name]) for name in ("options", "settings")}
    values |= {name: _curve(values[name]) for name in ("loss", "accuracy")}
    given = {name: values[name] for name in ("diagnostics", "plugins") if values[name] is not None}
    values |= {name: json.loads(text) for name, text in given.items()}
    key = Key(**{name: values.pop(name) for name in _KEY_COLUMNS})
    return Record(key, **values)


#: Current names of settings, by their names in stores.
_PRESENT = {"wise": "granularity"}


def _stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names used in stores, so that old results are found under their keys."""
    names = {present: old for old, present in _PRESENT.items()}
    return {names.get(name, name): value for name, value in settings.items()}


def _blob(curve: NDArray[Any] | None) -> bytes | None:
    return None if curve is None else curve.astype("<f4").tobytes()


def _curve(blob: bytes | None) -> Curve | None:
    return None if blob is None else np.frombuffer(blob, "<f4").astype(np.float32)


def _plain(value: Any) -> Any:
    """Convert equal numbers, such as 1.0 and 1, to one representation."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _package_version() -> str:
    from upgd import __version__

    return __version__


def _torch_version() -> str:
    import torch  # imported late, because reading results does not need it

    return str(torch.__version__)
