"""Stores in Python: :func:`open` reads one, and :func:`record` adds the results of your own loop to one.

>>> import tempfile, upgd
>>> with tempfile.TemporaryDirectory() as folder:
...     store = f"{folder}/mine.db"
...     for seed in range(3):
...         _ = upgd.record(store, problem="my-stream", method="mine", seed=seed, loss=[2.0, 1.0, 0.5], settings={"lr": 0.1})
...     upgd.open(store)
<3 learners: my-stream, network own, 3 steps>
"""

import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upgd.experiments.analysis.compare import OWN_LOOP
from upgd.experiments.analysis.results import Results, check_seeds
from upgd.experiments.spec.engine import ENGINE
from upgd.store import Key, Record, Store

__all__ = ["open", "read", "record"]

#: Maximum number of entries of a curve that is averaged by default.
_MOST_WINDOWS = 1_000


def open(
    *stores: str | os.PathLike[str],
    problem: str | None = None,
    methods: str | Collection[str] | None = None,
    network: str | None = None,
    steps: int | None = None,
    seeds: Collection[int] | None = None,
) -> Results:
    """Read the results in a store.

    Everything is read at once, and no file stays open. Learners that finish later are not included.

    Args:
        stores: The file of results. Learners of several files are compared with one another, and each method is shown
            with the name of its file.
        problem, methods, network, steps, seeds: Read only matching results; None matches all.

    Example:
        >>> results = upgd.open("upgd.db")          # doctest: +SKIP
        >>> results.table()                         # doctest: +SKIP
        >>> results.frame().groupby("method")       # doctest: +SKIP
        >>> upgd.open("before.db", "after.db", problem="output-permuted-digits").plot()  # doctest: +SKIP
    """
    if not stores:
        raise TypeError("open() needs the name of a store, such as 'upgd.db'")
    check_seeds(seeds)
    wanted = [methods] if isinstance(methods, str) else methods
    return Results(read(*stores, problem=problem, methods=wanted, network=network, steps=steps, seeds=seeds)[0])


def read(*stores: str | os.PathLike[str], **which: Any) -> tuple[list[Record], list[str]]:
    """Return the matching records of one or several stores (see :meth:`Store.records`), and any damage of the files."""
    records: list[Record] = []
    damage: list[str] = []
    for path in stores:
        with Store.read(Path(path)) as opened:
            own, found = opened.records(**which), opened.damage
        several = len(stores) > 1
        records += [replace(record, source=os.fspath(path)) for record in own] if several else own
        damage += [f"{path}: {finding}" for finding in found] if several else found
    return records, damage


def record(
    store: str | os.PathLike[str],
    *,
    problem: str,
    method: str,
    seed: int,
    loss: ArrayLike,
    accuracy: ArrayLike | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: int | None = None,
    window: int | None = None,
    network: str = "own",
    options: Mapping[str, Any] | None = None,
    looks: Mapping[int, Mapping[str, Any]] | None = None,
    seconds: float = 0.0,
    device: str = "cpu",
) -> bool:
    """Add the result of one run of your own loop to a store, next to those of ``upgd run``.

    Runs with the same problem, options, network and number of steps are compared with one another. Use the names shown by
    ``upgd runs`` to compare your own method with the built-in ones.

    Args:
        store: The file of results, created if necessary.
        problem: The name of the stream.
        method: The name of the method.
        seed: The seed of the run; methods are compared seed by seed.
        loss, accuracy: One value per step, of predictions made before the update (accuracy: 1 if correct, otherwise 0); or,
            with ``steps`` and ``window``, one mean per window. Omit ``accuracy`` for regression. The run counts as diverged
            from the first loss that is not finite.
        settings: The hyperparameters: numbers, strings, or lists of them.
        steps: Number of steps of the run. Default: the length of ``loss``.
        window: Number of steps per entry of the stored curves. Default: the smallest that gives at most 1,000 entries.
        network: The name of the network. Default: "own".
        options: The options of the stream.
        looks: Diagnostics of the network by step, such as ``{1000: monitor.snapshot()}``.
        seconds: The duration of the run.
        device: The device of the run.

    Returns:
        Whether the run is new. A run that is already in the store is not changed.

    Example:
        >>> upgd.record(":memory:", problem="mine", method="sgd", seed=0, loss=[0.5, 0.25], settings={"lr": 0.1})
        True
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2⁶³ − 1, not {seed!r}")
    losses = _values("loss", loss)
    steps, window = _lengths(len(losses), steps, window)
    curves = {"loss": losses} if accuracy is None else {"loss": losses, "accuracy": _values("accuracy", accuracy)}
    key = Key(
        problem=problem,
        options=_options(problem, options or {}),
        network=network,
        method=method,
        settings={name: _plain(f"settings[{name!r}]", value) for name, value in (settings or {}).items()},
        seed=int(seed),
        steps=steps,
        engine=ENGINE,  # so that it is compared with results of this version
    )
    one = Record(
        key,
        window=window,
        **_until_divergence(curves, steps, window),
        device=device,
        backend=OWN_LOOP,
        seconds=seconds,
        diagnostics=_looks(looks),
    )
    with Store.write(os.fspath(store)) as opened:
        _check_alike(one, opened.records(problem=problem, network=network, steps=steps))
        return opened.add([one]) == 1


def _lengths(values: int, steps: int | None, window: int | None) -> tuple[int, int]:
    """Return the number of steps of a run with this number of values, and of each window."""
    steps = values if steps is None else steps
    if window is None:
        window = max(1, -(-steps // _MOST_WINDOWS)) if values == steps else -(-steps // values)
    if not (_is_whole(steps) and _is_whole(window)):
        raise ValueError(f"steps and window must be integers of at least 1, not {steps!r} and {window!r}")
    return int(steps), int(window)


def _options(problem: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as in the key of a result of ``upgd run``."""
    plain = {name: _plain(f"options[{name!r}]", value) for name, value in options.items()}
    if not plain:
        return plain  # without importing torch
    from upgd.experiments.spec.declare import different

    return different(problem, plain)


def _until_divergence(curves: Mapping[str, NDArray[np.float64]], steps: int, window: int) -> dict[str, Any]:
    """Return means over windows, NaN from the first loss that is not finite, and the step of that loss."""
    losses = curves["loss"]
    broken = np.flatnonzero(~np.isfinite(losses))
    if len(broken) == len(losses):
        raise ValueError("loss has no finite value, not even at the first step; check the recorded values")
    found: dict[str, Any] = {name: _windowed(name, values, steps, window) for name, values in curves.items()}
    if len(broken):
        diverged_at = int(broken[0]) * (1 if len(losses) == steps else window)
        for means in found.values():
            means[diverged_at // window :] = np.nan
        found["diverged_at"] = diverged_at
    return found


def _values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"{name} must be one number for each step, in a list or an array of one dimension, not {reprlib.repr(values)}"
        )
    return array


def _windowed(name: str, values: NDArray[np.float64], steps: int, window: int) -> NDArray[np.float64]:
    """Return means over windows."""
    starts = np.arange(0, steps, window)
    if len(values) == steps:
        lengths = np.minimum(starts + window, steps) - starts
        with np.errstate(invalid="ignore"):  # non-finite values stay so, and their window is cut off
            means: NDArray[np.float64] = np.add.reduceat(values, starts) / lengths
        return means
    if len(values) == len(starts):
        return values.copy()
    raise ValueError(
        f"{name} has {len(values):,} values; it must have one for each of {steps:,} steps, or one for each of the "
        f"{len(starts):,} windows of {window:,} steps"
    )


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and bool(number >= 1)


def _plain(name: str, value: Any) -> Any:
    """Convert to a number, a string or a list that JSON can represent."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value)):
        return value
    raise ValueError(f"{name} must be a finite number, a string, or a list of them, not {value!r}")


def _looks(looks: Mapping[int, Mapping[str, Any]] | None) -> dict[str, list[Any]] | None:
    """Convert diagnostics by step and name to lists by name, with one entry per step, None where there is no number."""
    if not looks:
        return None
    moments = sorted(looks)
    found: dict[str, list[Any]] = {"step": [int(step) for step in moments]}
    for name in dict.fromkeys(name for step in moments for name in looks[step]):
        arrays = {step: np.asarray(looks[step][name], np.float64) for step in moments if name in looks[step]}
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) > 1:
            raise ValueError(f"looks: {name!r} must have the same number of values at every step, not {sorted(shapes)}")
        absent = np.full(shapes.pop(), np.nan)
        found[name] = [_listed(arrays.get(step, absent)) for step in moments]
    return found


def _listed(array: NDArray[np.float64]) -> Any:
    """Convert to a number or a list; non-finite values become None, because JSON cannot represent them."""
    plain = array.astype(object)
    plain[~np.isfinite(array)] = None
    return plain.tolist()


def _check_alike(one: Record, others: Iterable[Record]) -> None:
    """Raise ValueError if a record cannot be compared or drawn together with the existing ones."""
    alike = [other for other in others if other.key.options == one.key.options and other.key.engine == one.key.engine]
    where = f"on {one.key.problem} ({one.key.steps:,} steps)"
    for other in alike:
        if (other.accuracy is None) != (one.accuracy is None):
            lacks, has = ("loss only", "accuracy") if one.accuracy is None else ("accuracy", "loss only")
            raise ValueError(
                f"this run has {lacks}, but those in the store {where} have {has}; record the same for all, or use "
                "another problem"
            )
        same = (other.key.method, dict(other.key.settings)) == (one.key.method, dict(one.key.settings))
        if same and other.window != one.window:
            raise ValueError(
                f"window={one.window} differs from that of the other seeds of {one.key.method} {where}; give "
                f"window={other.window}"
            )
