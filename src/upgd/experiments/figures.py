"""Curves that can be read without a legend, in print, and by the colour-blind."""

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from upgd import writing
from upgd.experiments.bands import interval, of_seeds
from upgd.experiments.compare import Comparison, Entry, Metric
from upgd.experiments.variants import LABELS, best_of_variants, variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "LABELS", "Look", "curves", "save"]

#: A colour for each method, everywhere the same; after Okabe & Ito and Tol, which colour-blind people can tell apart.
COLOURS = {
    "upgd": "#0072B2",
    "upgd-nonprotecting": "#56B4E9",
    "ups": "#332288",
    "ups-even": "#777777",
    "sgd": "#555555",
    "sgdw": "#D55E00",
    "adamw": "#009E73",
    "pgd": "#CC79A7",
    "anti-pgd": "#882255",
    "shrink-and-perturb": "#E69F00",
}
_INK, FAINT = "#333333", "#e6e6e6"
_POINTS = 80
#: How far apart two labels are at least, as a share of the height of the panel.
_LABEL_DISTANCE = 0.062
#: From a curve's end to the left of its name.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "linewidth": 0.8,
    "alpha": 0.6,
    "shrinkA": 1,
    "shrinkB": 1,
    "relpos": (0, 0.5),
}
#: Two seeds say next to nothing about the spread; their band would cover everything.
_LEAST_FOR_A_BAND = 3
#: How variants of a method are drawn, from plotly's words to matplotlib's.
_STYLES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (4, 1.5)),
    "longdash": (0, (8, 2)),
    "dot": (0, (1.2, 1.2)),
    "dashdot": (0, (5, 1.5, 1.2, 1.5)),
}


class Look(NamedTuple):
    """What a curve is called and looks like."""

    name: str
    colour: str
    dash: str = "solid"


def check() -> None:
    """Say what is missing for figures: to be called before anybody computes for one."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("figures need matplotlib: pip install 'upgd[report]'", name="matplotlib")


def curves(
    comparison: Comparison,
    entries: Sequence[Entry] | None = None,
    *,
    ax: "Axes | None" = None,
    title: str | None = None,
    looks: Sequence[Look] | None = None,
    limits: tuple[float, float] | None = None,
    points: int = _POINTS,
) -> "Axes":
    """Draw online curves: the mean over seeds, with its 95 % confidence band.

    Args:
        comparison: the learners of one problem.
        entries: which of them; by default every method and variant at its best setting, on fresh seeds where it has some.
        ax: where; by default a new figure.
        title: by default the problem's name.
        looks: what the entries' curves are called and look like; by default as their methods.
        limits: of the vertical axis; by default what the curves need.
        points: a curve has at most so many; each is then the mean of several windows.
    """
    check()
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    if entries is None:
        entries = [one.shown for one in best_of_variants(comparison).values()]
    styles = looks or [_look(entry, entries) for entry in entries]
    drawn = [(look, *of_seeds(entry, comparison.metric, points)) for look, entry in zip(styles, entries, strict=True)]
    drawn = [(look, steps, values) for look, steps, values in drawn if len(values)]
    for look, steps, values in drawn:
        _draw(ax, look, steps, values, comparison.metric)
    _furnish(ax, comparison, [values for *_, values in drawn])
    if limits is not None:
        ax.set_ylim(limits)
    _label(ax, [(look, values[:, -1].mean()) for look, _, values in drawn])
    ax.set_title(title or comparison.problem, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=22)
    seeds = max((len(values) for *_, values in drawn), default=0)
    noun = "accuracy" if comparison.metric == "accuracy" else "squared error"
    shown = ", " if seeds == 1 else ", mean of " if seeds < _LEAST_FOR_A_BAND else ", mean and 95 % band of "
    subtitle = f"online {noun}{shown}{seeds} seed{'s' * (seeds != 1)}"
    if any(record.diverged_at is not None for entry in entries for record in entry.records.values()):
        subtitle += ", without those that diverged"
    ax.text(0, 1.02, subtitle, transform=ax.transAxes, fontsize=9.5, color="#666666")
    return ax


def save(figure: "Figure | Axes", path: str | os.PathLike[str]) -> list[Path]:
    """Write a figure, or the one that axes are in, as PNG, SVG and PDF; the same figure gives the same files.

    Args:
        figure: what ``result.plot()`` gives, or a figure.
        path: where; an ending ``.png``, ``.svg`` or ``.pdf`` may be left out, all three are written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn = figure if isinstance(figure, Figure) else cast("Figure", figure.figure)
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in (".png", ".svg", ".pdf") else stem
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg", "pdf")]
    dateless = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "upgd"}):
        for path in paths:
            ending = path.suffix[1:]
            with writing.output(path) as file:
                drawn.savefig(file, format=ending, dpi=150, metadata=dateless[ending])
    return paths


def _draw(ax: "Axes", look: Look, steps: NDArray[Any], values: NDArray[Any], metric: Metric) -> None:
    mean, low, high = interval(values, metric)
    if len(values) >= _LEAST_FOR_A_BAND:
        ax.fill_between(steps, low, high, color=look.colour, alpha=0.16, linewidth=0)
    marker = "o" if len(steps) == 1 else None
    ax.plot(
        *(steps, mean),
        color=look.colour,
        linewidth=2,
        linestyle=_STYLES[look.dash],
        solid_capstyle="round",
        marker=marker,
    )


def _furnish(ax: "Axes", comparison: Comparison, values: Iterable[NDArray[Any]]) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#999999")
    ax.grid(axis="y", color=FAINT, linewidth=0.9)
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


def _label(ax: "Axes", ends: Sequence[tuple[Look, float]]) -> None:
    """Write every curve's name at its end, moved apart where ends are close."""
    if not ends:
        return
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [float(to_axes.transform((0, height))[1]) for *_, height in ends]
    for (look, _), where, end in zip(ends, apart(heights, _LABEL_DISTANCE), heights, strict=True):
        ax.annotate(
            look.name,
            xy=(1, end),
            xytext=(1.025, where),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=readable(look.colour),
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={"color": look.colour, "linestyle": _STYLES[look.dash], **_LEADER},
        )


def readable(colour: str) -> str:
    """The colour, as much darker as text on white needs (a contrast of 4.5 to 1, as WCAG has it)."""
    from matplotlib.colors import to_hex, to_rgb

    rgb = np.array(to_rgb(colour))
    while 1.05 / (luminance(rgb) + 0.05) < 4.5:
        rgb *= 0.97
    return to_hex(rgb.tolist())


def luminance(rgb: NDArray[np.float64]) -> float:
    """How bright a colour is, from 0 to 1, as WCAG has it."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def apart(heights: Sequence[float], distance: float) -> list[float]:
    """Heights near the given ones, in the same order, no two too close: groups that touch are spread around their mean.

    As long as there is room, all of them are between 0 and 1.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    centres: list[float] = []
    for i in order:
        groups.append([i])
        centres.append(_centre([heights[i]], distance))
        while len(groups) > 1 and _touch(groups[-2:], centres[-2:], distance):
            joined = groups.pop(-2) + groups.pop(-1)
            del centres[-2:]
            groups.append(joined)
            centres.append(_centre([heights[j] for j in joined], distance))
    placed = dict.fromkeys(range(len(heights)), 0.0)
    for group, centre in zip(groups, centres, strict=True):
        for rank, i in enumerate(group):
            placed[i] = centre + (rank - (len(group) - 1) / 2) * distance
    return [placed[i] for i in range(len(heights))]


def _centre(heights: Sequence[float], distance: float) -> float:
    """Where a group's middle is: at the mean of its heights, or as near to that as keeps the group inside."""
    half = min(0.5, (len(heights) - 1) / 2 * distance)
    return min(max(sum(heights) / len(heights), half), 1 - half)


def _touch(groups: Sequence[Sequence[int]], centres: Sequence[float], distance: float) -> bool:
    reach = (len(groups[0]) + len(groups[1])) / 2 * distance
    return centres[1] - centres[0] < reach


def _look(entry: Entry, others: Sequence[Entry]) -> Look:
    dash = variant(entry).dash if entry.method in LABELS else "solid"
    return Look(_name(entry, others), COLOURS.get(entry.method, _INK), dash)


def _name(entry: Entry, others: Sequence[Entry]) -> str:
    """The variant's name; and where others have the same, what sets this one apart."""
    own = variant(entry)
    same = [other for other in others if variant(other) == own]
    differing = [key for key in entry.settings if any(_differs(entry, other, key) for other in same)]
    return own.label + (f" ({_differing_text(entry.settings, differing)})" if differing else "")


def _differs(entry: Entry, other: Entry, name: str) -> bool:
    return bool(entry.settings[name] != other.settings.get(name))


def _differing_text(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    from upgd.experiments.results import settings_text

    return settings_text({name: settings[name] for name in names})
