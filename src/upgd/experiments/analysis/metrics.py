"""Metrics of a learner, each as a series over its steps and as one number.

**Online** metrics are means over windows of predictions made before the update: ``accuracy`` and ``loss``.

**From the online curve:** ``forgetting``, ``A_k − A_{k+1}`` between consecutive task windows (for regression, the increase of
the loss). Its mean is the drop from the first window to the last, per task.

**From diagnostics** (``--look-every``): ``plasticity``, the mean sample plasticity; ``loss-of-plasticity``, its first value
minus its last; ``dormant-units``, the fraction of dormant units, and ``effective-rank`` of the outputs of hidden layers, both
means over layers; ``weight-norm``, the Euclidean norm of all parameters. :mod:`upgd.monitor` defines them.

A metric is the mean of its series over all steps; loss of plasticity is the last entry. Diverged learners have none.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.store import Record

__all__ = ["METRICS", "Definition", "Metric", "Series", "area", "check", "how_to_record", "quarter", "series", "usual"]

Metric = Literal[
    "accuracy",
    "loss",
    "plasticity",
    "loss-of-plasticity",
    "forgetting",
    "dormant-units",
    "effective-rank",
    "weight-norm",
]
Floats = NDArray[np.float64]
_Diagnostics = Mapping[str, list[Any]]  #: see :attr:`upgd.store.Record.diagnostics`

#: Number of snapshots: enough for a curve, at a few per cent of the run time.
_LOOKS_PER_RUN = 20
_LOOKS = "to record diagnostics, run the learners with --look-every {every}, into another store"


class Series(NamedTuple):
    """A metric over a learner's steps: entry ``i`` covers the ``lengths[i]`` steps that end after step ``ends[i]``."""

    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    values: Floats


@dataclass(frozen=True)
class Definition:
    """A metric.

    Attributes:
        noun: its name in axes and captions.
        higher: whether higher is better.
        bounds: its range.
        series: returns the series of a record; None if it was not recorded.
        remedy: how to record it; ``{every}`` stands for a number of steps.
        final: whether the metric is the last entry of the series rather than its mean.
    """

    noun: str
    higher: bool
    bounds: tuple[float, float]
    series: Callable[[Record], Series | None]
    remedy: str
    final: bool = False


def usual(record: Record) -> Metric:
    """Return the default metric of a learner's problem, by which settings are chosen."""
    return "loss" if record.accuracy is None else "accuracy"


def series(record: Record, metric: Metric) -> Series | None:
    """Return the metric over the learner's steps; None if the learner diverged or the metric was not recorded."""
    return None if record.diverged_at is not None else METRICS[metric].series(record)


def area(record: Record, metric: Metric) -> float:
    """Return the metric as one number; NaN if the learner diverged or the metric was not recorded."""
    found = series(record, metric)
    if found is None:
        return math.nan
    if METRICS[metric].final:
        return float(found.values[-1])
    return float(found.values @ found.lengths / found.lengths.sum())


def quarter(record: Record, metric: Metric, which: Literal["first", "last"]) -> float:
    """Return the mean of the series over the first or the last quarter of the steps.

    NaN if there is no data, or only one window, whose mean is that of all steps.
    """
    steps = record.key.steps
    begin, end = (0, steps / 4) if which == "first" else (steps * 3 / 4, steps)
    found = series(record, metric)
    if found is None or len(found.values) < 2:
        return math.nan
    overlap = np.clip(np.minimum(found.ends, end) - np.maximum(found.ends - found.lengths, begin), 0, None)
    counted = overlap > 0
    return float(np.average(found.values[counted], weights=overlap[counted])) if counted.any() else math.nan


def check(metric: Metric, records: list[Record], where: str) -> None:
    """Raise ValueError if no learner has the metric, with instructions for recording it."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}")
    alive = [record for record in records if record.diverged_at is None]
    if alive and all(METRICS[metric].series(record) is None for record in alive):
        raise ValueError(f"{metric} was not recorded for {where}; {how_to_record(metric, records[0].key.steps)}")


def how_to_record(metric: Metric, steps: int) -> str:
    """Return instructions for recording a metric of learners with this number of steps."""
    return METRICS[metric].remedy.format(every=max(1, steps // _LOOKS_PER_RUN))


def _online(curve: Literal["accuracy", "loss"]) -> Callable[[Record], Series | None]:
    def found(record: Record) -> Series | None:
        values = getattr(record, curve)
        return None if values is None else Series(record.ends, record.lengths, values.astype(np.float64))

    return found


def _forgetting(record: Record) -> Series | None:
    if len(record.loss) < 2:
        return None
    falls = -np.diff(record.accuracy.astype(np.float64)) if record.accuracy is not None else np.diff(record.loss)
    return Series(record.ends[1:], record.lengths[1:], falls.astype(np.float64))


def _looked(figures: Callable[[_Diagnostics], list[list[float]]]) -> Callable[[Record], Series | None]:
    """Return a function that averages diagnostics, such as those of all layers, at every snapshot."""

    def found(record: Record) -> Series | None:
        looks = record.diagnostics
        if not looks or not looks["step"] or not (listed := figures(looks)):
            return None
        values = np.array(listed, np.float64).mean(0)
        ends = np.array(looks["step"], np.int64)
        return None if np.isnan(values).any() else Series(ends, np.diff(ends, prepend=0), values)

    return found


def _named(name: str) -> Callable[[_Diagnostics], list[list[float]]]:
    """Return a function that returns the diagnostic of that name."""
    return lambda looks: [looks[name]] if name in looks else []


def _of_hidden_layers(figure: str) -> Callable[[_Diagnostics], list[list[float]]]:
    """Return a function that returns a diagnostic of the outputs of all hidden layers, identified by their dormant units."""

    def found(looks: _Diagnostics) -> list[list[float]]:
        layers = [name.partition("/")[2] for name in looks if name.startswith("dormant_share/")]
        return [looks[f"{figure}/{layer}"] for layer in layers if f"{figure}/{layer}" in looks]

    return found


def _lost(record: Record) -> Series | None:
    plasticity = _looked(_named("sample_plasticity"))(record)
    if plasticity is None or len(plasticity.values) < 2:
        return None
    return plasticity._replace(values=plasticity.values[0] - plasticity.values)


METRICS: dict[Metric, Definition] = {
    "accuracy": Definition(
        "online accuracy", True, (0, 1), _online("accuracy"), "regression has only a loss: remove --metric"
    ),
    "loss": Definition("online loss", False, (0, math.inf), _online("loss"), "every learner has one"),
    "plasticity": Definition("sample plasticity", True, (0, 1), _looked(_named("sample_plasticity")), _LOOKS),
    "loss-of-plasticity": Definition(
        "loss of plasticity", False, (-1, 1), _lost, f"it needs two snapshots: {_LOOKS}", final=True
    ),
    "forgetting": Definition(
        "forgetting", False, (-math.inf, math.inf), _forgetting, "it needs at least two task windows: run more steps"
    ),
    "dormant-units": Definition(
        "share of dormant units", False, (0, 1), _looked(_of_hidden_layers("dormant_share")), _LOOKS
    ),
    "effective-rank": Definition(
        "effective rank", True, (0, math.inf), _looked(_of_hidden_layers("effective_rank")), _LOOKS
    ),
    "weight-norm": Definition("weight norm", False, (0, math.inf), _looked(_named("weight_l2")), _LOOKS),
}
