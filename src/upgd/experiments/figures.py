"""Curves that can be read without a legend, in print, and by the colour-blind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from upgd.experiments.compare import Comparison, Entry, best

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "LABELS", "curves"]

#: A colour for each method, everywhere the same; after Okabe & Ito and Tol, which colour-blind people can tell apart.
COLOURS = {
    "upgd": "#0072B2",
    "upgd-nonprotecting": "#56B4E9",
    "ups": "#332288",
    "sgd": "#555555",
    "sgdw": "#D55E00",
    "adamw": "#009E73",
    "pgd": "#CC79A7",
    "anti-pgd": "#882255",
    "shrink-and-perturb": "#E69F00",
}
LABELS = {
    "upgd": "UPGD",
    "upgd-nonprotecting": "UPGD, non-protecting",
    "ups": "UPS",
    "sgd": "SGD",
    "sgdw": "SGDW",
    "adamw": "AdamW",
    "pgd": "PGD",
    "anti-pgd": "Anti-PGD",
    "shrink-and-perturb": "Shrink & Perturb",
}
_INK, _FAINT = "#333333", "#e6e6e6"
#: A curve has at most this many points; each is then the mean of several windows.
_POINTS = 80
#: How far apart two labels are at least, as a share of the height of the panel.
_LABEL_DISTANCE = 0.062


def curves(
    comparison: Comparison,
    entries: Sequence[Entry] | None = None,
    *,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """Draw online curves: the mean over seeds, with a band of ± 2 standard errors.

    Args:
        comparison: the learners of one problem.
        entries: which of them; by default every method at its best setting.
        ax: where; by default a new figure.
        title: by default the problem's name.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    if entries is None:
        entries = [best(comparison, method).entry for method in comparison.methods]
    drawn = [(entry, *_curve(entry, comparison.metric)) for entry in entries]
    drawn = [(entry, steps, values) for entry, steps, values in drawn if len(values)]
    for entry, steps, values in drawn:
        _draw(ax, COLOURS.get(entry.method, _INK), steps, values)
    _furnish(ax, comparison, [values for *_, values in drawn])
    _label(
        ax,
        [(_name(entry, entries), COLOURS.get(entry.method, _INK), values[:, -1].mean()) for entry, _, values in drawn],
    )
    ax.set_title(title or comparison.problem, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    seeds = max((len(values) for *_, values in drawn), default=0)
    noun = "accuracy" if comparison.metric == "accuracy" else "squared error"
    band = ", mean ± 2 standard errors of " if seeds > 1 else ", "
    subtitle = f"online {noun}{band}{seeds} seed{'s' * (seeds != 1)}"
    ax.text(0, 1.02, subtitle, transform=ax.transAxes, fontsize=9.5, color="#666666")
    return ax


def _curve(entry: Entry, metric: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where windows end, and the learners' means: ``(points,)`` and ``(learners, points)``; without those that diverged."""
    alive = [record for record in entry.records.values() if record.diverged_at is None]
    if not alive:
        return np.empty(0), np.empty((0, 0))
    values = np.array([record.accuracy if metric == "accuracy" else record.loss for record in alive], np.float64)
    ends, lengths = alive[0].ends, alive[0].lengths
    pieces = np.array_split(np.arange(len(ends)), min(len(ends), _POINTS))
    joined = [np.average(values[:, piece], axis=1, weights=lengths[piece]) for piece in pieces]
    return np.array([ends[piece[-1]] for piece in pieces]), np.stack(joined, 1)


def _draw(ax: "Axes", colour: str, steps: NDArray[Any], values: NDArray[Any]) -> None:
    mean = values.mean(0)
    if len(values) > 1:
        error = 2 * values.std(0, ddof=1) / np.sqrt(len(values))
        ax.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.16, linewidth=0)
    ax.plot(steps, mean, color=colour, linewidth=2, solid_capstyle="round", marker="o" if len(steps) == 1 else None)


def _furnish(ax: "Axes", comparison: Comparison, values: Iterable[NDArray[Any]]) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#999999")
    ax.grid(axis="y", color=_FAINT, linewidth=0.9)
    ax.set_axisbelow(True)
    ax.tick_params(colors="#555555", length=0, labelsize=9.5)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: _steps(step)))
    ax.set_xlabel("step", color="#555555", fontsize=9.5)
    ax.set_xlim(0, comparison.steps)
    if comparison.metric == "loss" and _spans_decades(values):
        ax.set_yscale("log")
        ax.minorticks_off()


def _spans_decades(values: Iterable[NDArray[Any]]) -> bool:
    means = [v.mean(0) for v in values]
    return (
        bool(means)
        and min(m.min() for m in means) > 0
        and max(m.max() for m in means) > 30 * min(m.min() for m in means)
    )


def _steps(step: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if step >= size:
            return f"{step / size:g} {unit}"
    return f"{step:g}"


def _label(ax: "Axes", ends: Sequence[tuple[str, str, float]]) -> None:
    """Write every curve's name at its end, moved apart where ends are close."""
    if not ends:
        return
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [float(to_axes.transform((0, height))[1]) for *_, height in ends]
    for (name, colour, _), where, end in zip(ends, _apart(heights), heights, strict=True):
        ax.annotate(
            name,
            xy=(1, end),
            xytext=(1.025, where),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "alpha": 0.6, "shrinkA": 1, "shrinkB": 1},
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights near the given ones, in the same order, no two too close: groups that touch are spread around their mean."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    centres: list[float] = []
    for i in order:
        groups.append([i])
        centres.append(heights[i])
        while len(groups) > 1 and _touch(groups[-2:], centres[-2:]):
            joined = groups.pop(-2) + groups.pop(-1)
            del centres[-2:]
            groups.append(joined)
            centres.append(sum(heights[j] for j in joined) / len(joined))
    placed = dict.fromkeys(range(len(heights)), 0.0)
    for group, centre in zip(groups, centres, strict=True):
        for rank, i in enumerate(group):
            placed[i] = centre + (rank - (len(group) - 1) / 2) * _LABEL_DISTANCE
    return [placed[i] for i in range(len(heights))]


def _touch(groups: Sequence[Sequence[int]], centres: Sequence[float]) -> bool:
    reach = (len(groups[0]) + len(groups[1])) / 2 * _LABEL_DISTANCE
    return centres[1] - centres[0] < reach


def _name(entry: Entry, others: Sequence[Entry]) -> str:
    """The method's name; and where others have the same, what sets this one apart."""
    name = LABELS.get(entry.method, entry.method)
    same = [other for other in others if other.method == entry.method]
    differing = [key for key in entry.settings if any(_differs(entry, other, key) for other in same)]
    return name + (f" ({_differing_text(entry.settings, differing)})" if differing else "")


def _differs(entry: Entry, other: Entry, name: str) -> bool:
    return bool(entry.settings[name] != other.settings.get(name))


def _differing_text(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    from upgd.experiments.results import settings_text

    return settings_text({name: settings[name] for name in names})
