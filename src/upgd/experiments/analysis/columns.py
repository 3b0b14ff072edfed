"""Learners, their curves and their diagnostics as columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from upgd.experiments.analysis.metrics import METRICS, Metric, area, quarter
from upgd.experiments.analysis.wording import plugins_text
from upgd.experiments.spec.settings import ordered
from upgd.store import Record

__all__ = ["columns_of", "framed", "moments_of", "summary_of", "windows_of"]

#: Metrics that are columns of a frame if they were recorded.
_DERIVED = tuple(metric for metric in METRICS if metric not in ("loss", "accuracy"))


def _column(metric: Metric) -> str:
    return metric.replace("-", "_")


#: Names of columns other than those of settings.
_COLUMNS = {
    *map(_column, _DERIVED),
    *("source", "problem", "network", "steps", "method", "seed", "step", "loss", "accuracy", "diverged_at", "device"),
    *("backend", "seconds", "finished"),
    *(f"{metric}_{which}_quarter" for metric in ("loss", "accuracy") for which in ("first", "last")),
}


def summary_of(record: Record) -> dict[str, Any]:
    """Return the row of a learner."""
    quarters = {
        f"{metric}_{which}_quarter": quarter(record, metric, which)
        for metric in ("loss", "accuracy")
        for which in ("first", "last")
        if metric == "loss" or record.accuracy is not None
    }
    accuracy = math.nan if record.accuracy is None else area(record, "accuracy")
    return {
        **_identity(record),
        "loss": area(record, "loss"),
        "accuracy": accuracy,
        **quarters,
        **{_column(metric): area(record, metric) for metric in _DERIVED if METRICS[metric].series(record) is not None},
        "diverged_at": record.diverged_at,
        "device": record.device,
        "backend": record.backend,
        "seconds": record.seconds,
        "finished": record.finished,
        **({"plugins": plugins_text(record.plugins)} if record.plugins else {}),
    }


def windows_of(record: Record) -> list[dict[str, Any]]:
    """Return one row per window of a learner's curves."""
    identity = _identity(record)
    accuracies = [None] * len(record.loss) if record.accuracy is None else record.accuracy.tolist()
    return [
        {**identity, "step": step, "loss": loss, "accuracy": accuracy}
        for step, loss, accuracy in zip(record.ends.tolist(), record.loss.tolist(), accuracies, strict=True)
    ]


def moments_of(record: Record) -> list[dict[str, Any]]:
    """Return one row per diagnostics snapshot of a learner."""
    found = record.diagnostics or {"step": []}
    identity = _identity(record)
    rows: list[dict[str, Any]] = []
    for i, step in enumerate(found["step"]):
        row = {**identity, "step": step}
        for name in (name for name in found if name != "step"):
            row |= _spread(name, found[name][i])
        rows.append(row)
    return rows


def _spread(name: str, figure: Any) -> dict[str, Any]:
    if not isinstance(figure, list):
        return {name: figure}
    return {key: value for i, part in enumerate(figure) for key, value in _spread(f"{name}[{i}]", part).items()}


def _identity(record: Record) -> dict[str, Any]:
    key = record.key
    options = {f"option_{name}": value for name, value in key.options.items()}
    settings = {name: key.settings[name] for name in ordered(key.settings)}
    if isinstance(betas := settings.get("betas"), list | tuple) and len(betas) == 2:
        del settings["betas"]
        settings["beta1"], settings["beta2"] = betas
    # A setting of a custom method may have the name of a column.
    settings = {f"setting_{name}" if name in _COLUMNS else name: value for name, value in settings.items()}
    return {
        **({"source": record.source} if record.source else {}),
        **{"problem": key.problem, "network": key.network, "steps": key.steps, **options},
        **{"method": key.method, **settings, "seed": key.seed},
    }


def columns_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns; None where a row lacks a column."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


def framed(columns: dict[str, list[Any]]) -> Any:
    """Return columns as a pandas DataFrame if pandas is installed, otherwise unchanged."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        return columns
    return pd.DataFrame(columns)
