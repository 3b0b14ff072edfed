"""Stores from Python: read one with :func:`open`, put the results of your own loop into one with :func:`record`.

>>> import tempfile, upgd
>>> with tempfile.TemporaryDirectory() as folder:
...     store = f"{folder}/mine.db"
...     for seed in range(3):
...         _ = upgd.record(store, problem="my-stream", method="mine", seed=seed, loss=[2.0, 1.0, 0.5], settings={"lr": 0.1})
...     upgd.open(store)
<3 learners: my-stream, network own, 3 steps>
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upgd.experiments.analysis.compare import OWN_LOOP
from upgd.experiments.analysis.results import Results
from upgd.experiments.spec.engine import ENGINE
from upgd.store import Key, Record, Store

__all__ = ["open", "read", "record"]

#: A curve that is averaged by default has at most so many entries.
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

    Everything is read at once, and nothing stays open. Learners that are finished later are not in what is returned.

    Args:
        stores: the file of results. Of several files, learners are compared with one another, and each method is shown
            with the name of its file.
        problem, methods, network, steps, seeds: only the results that match; None matches everything.

    Example:
        >>> results = upgd.open("upgd.db")          # doctest: +SKIP
        >>> results.table()                         # doctest: +SKIP
        >>> results.frame().groupby("method")       # doctest: +SKIP
        >>> upgd.open("before.db", "after.db", problem="output-permuted-digits").plot()  # doctest: +SKIP
    """
    if not stores:
        raise TypeError("open() needs the name of a store, such as 'upgd.db'")
    wanted = [methods] if isinstance(methods, str) else methods
    return Results(read(*stores, problem=problem, methods=wanted, network=network, steps=steps, seeds=seeds)[0])


def read(*stores: str | os.PathLike[str], **which: Any) -> tuple[list[Record], list[str]]:
    """The records of one or several stores that match (see :meth:`Store.records`), and what is damaged in the files."""
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
    """Put the result of one run of your own loop into a store, beside those of ``upgd run``.

    Runs with the same problem, options, network and number of steps are compared with one another. So a method of your own
    is compared with ours if you give the names that ``upgd runs`` shows.

    Args:
        store: the file of results, made if it is not there.
        problem: the name of the stream.
        method: the name of the method.
        seed: the run's seed; methods are compared seed by seed.
        loss, accuracy: one value for each step, of predictions made before the update (1 or 0 for a right or wrong one);
            or, together with ``steps`` and ``window``, one mean for each window. Leave ``accuracy`` out in regression. From
            the first loss on that is not finite, the run counts as diverged.
        settings: the hyperparameters: numbers, text, or lists of them.
        steps: how many steps the run took; by default as many as ``loss`` has values.
        window: how many steps each entry of the stored curves stands for; by default as few as give at most 1,000 entries.
        network: the name of the network.
        options: the options of the stream.
        looks: what was seen inside the network, by step: such as ``{1000: monitor.snapshot()}``.
        seconds: how long it took.
        device: where it ran.

    Returns:
        Whether it is new. A run that the store has already is left as it is.

    Example:
        >>> upgd.record(":memory:", problem="mine", method="sgd", seed=0, loss=[0.5, 0.25], settings={"lr": 0.1})
        True
    """

    losses = _values("loss", loss)
    if not np.isfinite(losses).any():
        raise ValueError("loss has no finite value, not even for the first step; check what is recorded")
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2⁶³ − 1, not {seed!r}")
    steps = len(losses) if steps is None else steps
    if window is None:
        window = max(1, -(-steps // _MOST_WINDOWS)) if len(losses) == steps else -(-steps // len(losses))
    if not (_is_whole(steps) and _is_whole(window)):
        raise ValueError(f"steps and window must be integers of at least 1, not {steps!r} and {window!r}")
    settings = {name: _plain(f"settings[{name!r}]", value) for name, value in (settings or {}).items()}
    options = {name: _plain(f"options[{name!r}]", value) for name, value in (options or {}).items()}
    curve = _windowed("loss", losses, steps, window)
    broken = np.flatnonzero(~np.isfinite(losses))
    diverged_at = None
    if len(broken):
        diverged_at = int(broken[0]) * (1 if len(losses) == steps else window)
        curve[diverged_at // window :] = np.nan
    accuracies = None
    if accuracy is not None:
        accuracies = _windowed("accuracy", _values("accuracy", accuracy), steps, window)
        if diverged_at is not None:
            accuracies[diverged_at // window :] = np.nan
    key = Key(
        problem=problem,
        options=options,
        network=network,
        method=method,
        settings=settings,
        seed=int(seed),
        steps=int(steps),
        engine=ENGINE,  # or it would not be compared with what this version runs
    )
    one = Record(
        key,
        window=int(window),
        loss=curve,
        accuracy=accuracies,
        diverged_at=diverged_at,
        device=device,
        backend=OWN_LOOP,
        seconds=seconds,
        diagnostics=_looks(looks),
    )
    with Store.write(os.fspath(store)) as opened:
        _check_alike(one, opened.records(problem=problem, network=network, steps=int(steps)))
        return opened.add([one]) == 1


def _values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be one number for each step, in a list or an array of one dimension")
    return array


def _windowed(name: str, values: NDArray[np.float64], steps: int, window: int) -> NDArray[np.float64]:
    """Means over windows."""
    starts = np.arange(0, steps, window)
    if len(values) == steps:
        lengths = np.minimum(starts + window, steps) - starts
        with np.errstate(invalid="ignore"):  # what is not finite stays so, and its window is cut off
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
    """A number, a text or a list as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, part) for part in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value)):
        return value
    raise ValueError(f"{name} must be a finite number, text, or a list of them, not {value!r}")


def _looks(looks: Mapping[int, Mapping[str, Any]] | None) -> dict[str, list[Any]] | None:
    """Figures by step and name, to figures by name: a list with an entry for each step, None where there is no number."""
    if not looks:
        return None
    moments = sorted(looks)
    found: dict[str, list[Any]] = {"step": [int(step) for step in moments]}
    for name in dict.fromkeys(name for step in moments for name in looks[step]):
        arrays = {step: np.asarray(looks[step][name], np.float64) for step in moments if name in looks[step]}
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) > 1:
            raise ValueError(f"looks: {name!r} must have as many numbers at every step, not {sorted(shapes)}")
        absent = np.full(shapes.pop(), np.nan)
        found[name] = [_listed(arrays.get(step, absent)) for step in moments]
    return found


def _listed(array: NDArray[np.float64]) -> Any:
    """A number or a list of them; None where it is not finite, for which JSON has no word."""
    plain = array.astype(object)
    plain[~np.isfinite(array)] = None
    return plain.tolist()


def _check_alike(one: Record, others: Iterable[Record]) -> None:
    """Refuse what could not be drawn or compared together with what is there."""
    alike = [other for other in others if other.key.options == one.key.options and other.key.engine == one.key.engine]
    where = f"on {one.key.problem} ({one.key.steps:,} steps)"
    for other in alike:
        if (other.accuracy is None) != (one.accuracy is None):
            lacks, has = ("loss only", "accuracy") if one.accuracy is None else ("accuracy", "loss only")
            raise ValueError(
                f"this run has {lacks}, and those that the store has {where} have {has}; give all of them the same, or "
                "another problem"
            )
        same = (other.key.method, dict(other.key.settings)) == (one.key.method, dict(one.key.settings))
        if same and other.window != one.window:
            raise ValueError(
                f"window={one.window} differs from that of the other seeds of {one.key.method} {where}; give "
                f"window={other.window}"
            )
