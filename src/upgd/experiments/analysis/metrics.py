"""What a learner is judged by, each as a series over its life and as one number.

**Online** metrics are means over windows of predictions made before the update: ``accuracy`` and ``loss``.

**From the online curve:** ``forgetting``, ``A_k − A_{k+1}`` from one task window to the next (in regression, how much the
loss rises). Its mean is the drop from the first window to the last, per task.

**From looks inside the learner** (``--look-every``): ``plasticity``, the mean sample plasticity; ``loss-of-plasticity``, the
first of these minus the last; ``dormant-units``, the share of dormant units, and ``effective-rank`` of what hidden layers put
out, both means over layers; ``weight-norm``, the Euclidean norm of all parameters. :mod:`upgd.monitor` defines them.

A metric is the mean of its series over all steps; loss of plasticity is the last entry. A learner that diverged has none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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

#: How often to look inside a learner: enough for a curve, and a few per cent of the time.
_LOOKS_PER_RUN = 20
_LOOKS = "look inside the learners: run them with --look-every {every}, into another store"


class Series(NamedTuple):
    """A metric over a learner's life: entry ``i`` is about the ``lengths[i]`` steps that end after step ``ends[i]``."""

    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    values: Floats


@dataclass(frozen=True)
class Definition:
    """A metric.

    Attributes:
        noun: what axes and captions call it.
        higher: whether more is better.
        bounds: between which values it lies.
        series: the series of a record; None if it was not recorded.
        remedy: how to record it; ``{every}`` stands for a number of steps.
        final: whether the metric is the last entry of the series, and not its mean.
    """

    noun: str
    higher: bool
    bounds: tuple[float, float]
    series: Callable[[Record], Series | None]
    remedy: str
    final: bool = False


def usual(record: Record) -> Metric:
    """What a learner of this problem is judged by unless told otherwise, and by what its settings are chosen."""
    return "loss" if record.accuracy is None else "accuracy"


def series(record: Record, metric: Metric) -> Series | None:
    """The metric over the learner's life; None if it diverged or the metric was not recorded."""
    return None if record.diverged_at is not None else METRICS[metric].series(record)


def area(record: Record, metric: Metric) -> float:
    """The metric as one number; NaN for a learner that diverged, and where the metric was not recorded."""
    found = series(record, metric)
    if found is None:
        return math.nan
    if METRICS[metric].final:
        return float(found.values[-1])
    return float(found.values @ found.lengths / found.lengths.sum())


def quarter(record: Record, metric: Metric, which: Literal["first", "last"]) -> float:
    """The mean of the series over the first or the last quarter of the steps; NaN where it has nothing."""
    steps = record.key.steps
    begin, end = (0, steps / 4) if which == "first" else (steps * 3 / 4, steps)
    found = series(record, metric)
    if found is None:
        return math.nan
    overlap = np.clip(np.minimum(found.ends, end) - np.maximum(found.ends - found.lengths, begin), 0, None)
    counted = overlap > 0
    return float(np.average(found.values[counted], weights=overlap[counted])) if counted.any() else math.nan


def check(metric: Metric, records: list[Record], where: str) -> None:
    """Say how to record a metric that no learner has."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}")
    alive = [record for record in records if record.diverged_at is None]
    if alive and all(METRICS[metric].series(record) is None for record in alive):
        raise ValueError(f"there is no {metric} of {where}; {how_to_record(metric, records[0].key.steps)}")


def how_to_record(metric: Metric, steps: int) -> str:
    """What to do to get a metric of learners that take so many steps."""
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


def _looked(figures: Callable[[Record], list[list[float]]]) -> Callable[[Record], Series | None]:
    """Means of figures, such as those of all layers, at every look."""

    def found(record: Record) -> Series | None:
        listed = figures(record) if record.diagnostics and record.diagnostics["step"] else []
        if not listed:
            return None
        assert record.diagnostics is not None
        values = np.array(listed, np.float64).mean(0)
        ends = np.array(record.diagnostics["step"], np.int64)
        return None if np.isnan(values).any() else Series(ends, np.diff(ends, prepend=0), values)

    return found


def _named(name: str) -> Callable[[Record], list[list[float]]]:
    """The figure of that name."""

    def found(record: Record) -> list[list[float]]:
        looks = record.diagnostics or {}
        return [looks[name]] if name in looks else []

    return found


def _of_hidden_layers(figure: str) -> Callable[[Record], list[list[float]]]:
    """A figure of what hidden layers put out: only these have dormant units."""

    def found(record: Record) -> list[list[float]]:
        looks = record.diagnostics or {}
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
        "online accuracy", True, (0, 1), _online("accuracy"), "a regression has a loss: leave --metric out"
    ),
    "loss": Definition("online loss", False, (0, math.inf), _online("loss"), "every learner has one"),
    "plasticity": Definition("sample plasticity", True, (0, 1), _looked(_named("sample_plasticity")), _LOOKS),
    "loss-of-plasticity": Definition(
        "loss of plasticity", False, (-1, 1), _lost, f"it takes two looks: {_LOOKS}", final=True
    ),
    "forgetting": Definition(
        "forgetting", False, (-math.inf, math.inf), _forgetting, "it takes two task windows at least: run more steps"
    ),
    "dormant-units": Definition(
        "share of dormant units", False, (0, 1), _looked(_of_hidden_layers("dormant_share")), _LOOKS
    ),
    "effective-rank": Definition(
        "effective rank", True, (0, math.inf), _looked(_of_hidden_layers("effective_rank")), _LOOKS
    ),
    "weight-norm": Definition("weight norm", False, (0, math.inf), _looked(_named("weight_l2")), _LOOKS),
}
