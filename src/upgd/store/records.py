"""What a store keeps of a learner: its key and its curves, as objects and as rows."""

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
        return hashlib.sha256(as_json(values).encode()).hexdigest()


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
COLUMNS = (*_KEY_COLUMNS, *_OWN_COLUMNS)
SUMMED = tuple(sorted(("id", "digest", *COLUMNS)))  # what a checksum covers


def row_of(record: Record) -> dict[str, Any]:
    """All columns of a record but its number and checksum, in the types in which SQLite gives them back."""
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


def is_plausible(row: Mapping[str, Any]) -> bool:
    """Whether a row from before there were checksums makes a record, and has the key that its digest was made of."""
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


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _package_version() -> str:
    from upgd import __version__

    return __version__


def _torch_version() -> str:
    import torch  # here, because those who only read results can do without

    return str(torch.__version__)
