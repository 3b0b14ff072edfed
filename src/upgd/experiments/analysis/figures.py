"""Figures of curves that are readable without a legend, in print, and for colour-blind readers."""

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from upgd import writing
from upgd.experiments.analysis.bands import interval, of_seeds
from upgd.experiments.analysis.compare import Comparison, Entry
from upgd.experiments.analysis.metrics import METRICS, Metric
from upgd.experiments.analysis.variants import best_of_variants, dashes, variant
from upgd.experiments.analysis.wording import settings_text
from upgd.methods import colours as of_methods

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Band", "Look", "curves", "panels", "save", "survival", "write"]

#: The band around a mean: its 95% confidence interval, one standard deviation of the seeds, their range, or none.
Band = Literal["ci", "sd", "range"] | None

_INK, FAINT = "#333333", "#e6e6e6"
#: Styles that replace those rcParams that have matplotlib's default values. Font sizes are for a font.size of 10.
_HOUSE: dict[str, Any] = {
    "figure.figsize": (7.2, 4.2),
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.9,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.labelcolor": "#555555",
    "axes.labelsize": 9.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "text.color": "#666666",
}
_POINTS = 80
#: Minimum distance between two labels, as a fraction of the panel's height.
_LABEL_DISTANCE = 0.062
#: The line from the end of a curve to its name.
_LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "linewidth": 0.8,
    "alpha": 0.6,
    "shrinkA": 1,
    "shrinkB": 1,
    "relpos": (0, 0.5),
}
#: Minimum number of seeds for a band; with two, it would cover everything.
_LEAST_FOR_A_BAND = 3
#: The width of a curve that belongs to another one, as a fraction of the width of that curve.
_ASIDE = 0.4
#: Line styles of variants, from plotly's names to matplotlib's.
STYLES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (4, 1.5)),
    "longdash": (0, (8, 2)),
    "dot": (0, (1.2, 1.2)),
    "dashdot": (0, (5, 1.5, 1.2, 1.5)),
}


class Look(NamedTuple):
    """The name and style of a curve.

    Attributes:
        name, colour: its name and colour.
        dash: a line style, one of :data:`STYLES`.
        aside: whether it belongs to another curve of the same colour. It is then thinner and has neither band nor name.
    """

    name: str
    colour: str
    dash: str = "solid"
    aside: bool = False


def check() -> None:
    """Raise ModuleNotFoundError if matplotlib is missing; call it before computing anything for a figure."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("figures need matplotlib: pip install 'upgd[report]'", name="matplotlib")


def curves(
    comparison: Comparison,
    entries: Sequence[Entry] | None = None,
    *,
    ax: "Axes | None" = None,
    title: str | None = None,
    looks: Sequence[Look] | None = None,
    remark: str = "",
    limits: tuple[float, float] | None = None,
    points: int = _POINTS,
    legend: bool | None = None,
    band: Band | bool = "ci",
) -> "Axes":
    """Draw online curves: the mean over seeds, with a band if there are at least three seeds.

    Sizes, colours, grid and spines follow matplotlib's rcParams wherever these differ from matplotlib's own defaults.

    Args:
        comparison: the learners of one problem.
        entries: the entries to draw. Default: every method and variant at its best setting, on fresh seeds if it has some.
        ax: the axes. Default: a new figure.
        title: the title. Default: the problem's name.
        looks: names and styles of the curves. Default: those of their methods.
        remark: added to the subtitle.
        limits: limits of the vertical axis. Default: those of the curves.
        points: maximum number of points per curve; each is then the mean of several windows.
        legend: True draws a legend, False nothing. Default: None, which writes every curve's name at its end.
        band: ``"ci"``, the 95% confidence interval of the mean; ``"sd"``, one standard deviation of the seeds to either
            side; ``"range"``, from the smallest to the largest; None or False, nothing.
    """
    check()
    band = _checked_band(band)
    style = _style()
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=style["figure.figsize"], layout="constrained")
    fresh = False
    if entries is None:
        entries, fresh = _best_entries(comparison)
    styles = looks or _looks(entries)
    drawn = [(look, *of_seeds(entry, comparison.metric, points)) for look, entry in zip(styles, entries, strict=True)]
    drawn = [(look, steps, values) for look, steps, values in drawn if len(values)]
    for look, steps, values in drawn:
        _draw(ax, look, steps, values, comparison.metric, band, style)
    _furnish(ax, style)
    ax.set_xlim(0, comparison.steps)
    if comparison.metric == "loss" and _spans_decades(values for *_, values in drawn):
        ax.set_yscale("log")
        ax.minorticks_off()
    if limits is not None:
        ax.set_ylim(limits)
    if legend:
        ax.legend()
    elif legend is None:
        _label(ax, [(look, values[:, -1].mean()) for look, _, values in drawn if not look.aside])
    seeds = max((len(values) for *_, values in drawn), default=0)
    _title(ax, title or comparison.problem, _subtitle(comparison, entries, seeds, band, fresh=fresh) + remark, style)
    return ax


def survival(
    runs: Iterable[tuple[Look, NDArray[Any], NDArray[Any]]], *, ax: "Axes", title: str, subtitle: str
) -> "Axes":
    """Draw the fraction of runs that have not diverged over time.

    Args:
        runs: for each curve its look, and the steps and fractions of its corners.
        ax: the axes.
        title: the title.
        subtitle: the line below it.
    """
    from matplotlib.ticker import PercentFormatter

    style, runs = _style(), list(runs)
    for look, steps, share in runs:
        ax.step(
            *(np.maximum(steps, 1), share),
            where="post",
            color=look.colour,
            linewidth=style["lines.linewidth"],
            linestyle=STYLES[look.dash],
        )
    ax.set_xscale("log")
    ax.minorticks_off()
    _furnish(ax, style)
    ax.set_xlim(1, max(steps[-1] for _, steps, _ in runs))
    lost = 1 - min(share[-1] for *_, share in runs)
    ax.set_ylim(max(0.0, 1 - 1.3 * lost), 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol="%"))
    _label(ax, [(look, share[-1]) for look, _, share in runs])
    _title(ax, title, subtitle, style)
    return ax


def _title(ax: "Axes", title: str, subtitle: str, style: Mapping[str, Any]) -> None:
    """Write the title and, below it, the subtitle, in lines no longer than the axes with their labels are wide.

    A longer line would be cut off, and matplotlib's layout would make the axes narrow to have room for it.
    """
    from matplotlib import rcParams

    share = rcParams["figure.subplot.right"] - rcParams["figure.subplot.left"]  # of the axes before the layout
    points = 72 * ax.bbox.width / ax.figure.dpi / share
    lines = textwrap.wrap(subtitle, max(20, int(points / (0.55 * _size(9.5)))))
    ax.set_title(
        title,
        loc=style["axes.titlelocation"],
        fontsize=style["axes.titlesize"],
        fontweight=style["axes.titleweight"],
        color=None if style["axes.titlecolor"] == "auto" else style["axes.titlecolor"],
        pad=10 + 12 * len(lines),
    )
    ax.text(0, 1.02, "\n".join(lines), transform=ax.transAxes, fontsize=_size(9.5), color=style["text.color"])


def _best_entries(comparison: Comparison) -> tuple[list[Entry], bool]:
    """Return every method and variant at its best setting, and whether all of them are shown on fresh seeds."""
    chosen = best_of_variants(comparison).values()
    fresh = all(one.fresh_seeds or not one.search_seeds for one in chosen) and any(one.fresh_seeds for one in chosen)
    return [one.shown for one in chosen], fresh


def _subtitle(comparison: Comparison, entries: Sequence[Entry], seeds: int, band: Band, *, fresh: bool) -> str:
    """Describe what the curves show: the metric, the band, and the seeds."""
    shown = ", " if seeds == 1 else ", mean of " if seeds < _LEAST_FOR_A_BAND else f", {_BAND_WORDS[band]} of "
    text = f"{comparison.noun}{shown}{seeds} {'fresh ' * fresh}seed{'s' * (seeds != 1)}"
    if any(record.diverged_at is not None for entry in entries for record in entry.records.values()):
        text += ", without those that diverged"
    return text


def panels(
    comparisons: Sequence[Comparison],
    *,
    title: str | None = None,
    legend: bool | None = None,
    band: Band | bool = "ci",
) -> "Figure":
    """Draw the curves of several comparisons in one figure, one below the other.

    Args:
        comparisons: the comparisons to draw.
        title: the title of the figure. Default: each panel has its problem's name.
        legend, band: see :func:`curves`.
    """
    check()
    from matplotlib.figure import Figure

    width, height = _style()["figure.figsize"]
    figure = Figure(figsize=(width, height * len(comparisons)), layout="constrained")
    axes = figure.subplots(len(comparisons), 1, squeeze=False)[:, 0]
    for ax, comparison in zip(axes, comparisons, strict=True):
        own = title if len(comparisons) == 1 else comparison.title
        curves(comparison, ax=ax, title=own, legend=legend, band=band)
    if title is not None and len(comparisons) > 1:
        figure.suptitle(title)
    return figure


def save(figure: "Figure | Axes", path: str | os.PathLike[str]) -> list[Path]:
    """Write a figure, or the figure of axes, as PNG, SVG and PDF; the same figure gives the same files.

    Args:
        figure: a figure, or the result of ``result.plot()``.
        path: the output path; a suffix ``.png``, ``.svg`` or ``.pdf`` is ignored, because all three are written.
    """
    from matplotlib.figure import Figure

    drawn = figure if isinstance(figure, Figure) else cast("Figure", figure.figure)
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in (".png", ".svg", ".pdf") else stem
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("svg", "png", "pdf")]
    for path in paths:
        write(drawn, path, path.suffix[1:])
    return paths


def write(figure: "Figure", path: Path, kind: str) -> None:
    """Write a figure in one format: png, svg or pdf."""
    import matplotlib

    dateless = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    dpi = matplotlib.rcParams["savefig.dpi"]
    with matplotlib.rc_context({"svg.hashsalt": "upgd"}), writing.output(path) as file:
        figure.savefig(file, format=kind, dpi=150 if dpi == "figure" else dpi, metadata=dateless[kind])


_BAND_WORDS: dict[Band, str] = {
    "ci": "mean and 95% band",
    "sd": "mean ± standard deviation",
    "range": "mean and range",
    None: "mean",
}


def _checked_band(band: Band | bool) -> Band:
    if isinstance(band, bool):
        return "ci" if band else None
    if band not in _BAND_WORDS:
        raise ValueError(f"band must be 'ci', 'sd', 'range' or None, not {band!r}")
    return band


def _style() -> dict[str, Any]:
    """Return the user's rcParams, with our style where they have matplotlib's default values."""
    from matplotlib import rcParams, rcParamsDefault

    sizes = ("xtick.labelsize", "ytick.labelsize", "axes.labelsize", "axes.titlesize")
    house = {name: _size(value) if name in sizes else value for name, value in _HOUSE.items()}
    given, usual = cast("Mapping[str, Any]", rcParams), cast("Mapping[str, Any]", rcParamsDefault)
    own = {name for name in house if given[name] != usual[name]}
    style = {name: given[name] if name in own else value for name, value in house.items()}
    if "text.color" in own and "axes.titlecolor" not in own:
        style["axes.titlecolor"] = style["text.color"]  # as matplotlib does
    if own & {"grid.color", "grid.linewidth"}:
        style["axes.grid"] = given["axes.grid"]  # our grid is faint; the user's need not be
    return style


def _size(points: float) -> float:
    """Return a font size that scales with the user's."""
    from matplotlib import rcParams, rcParamsDefault

    return points * float(rcParams["font.size"]) / float(rcParamsDefault["font.size"])


def _reach(values: NDArray[Any], metric: Metric, band: Band) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the mean and both ends of the band."""
    mean = values.mean(0)
    if band == "range":
        return mean, values.min(0), values.max(0)
    if band == "sd":
        spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
        least, most = METRICS[metric].bounds
        return mean, np.maximum(mean - spread, least), np.minimum(mean + spread, most)
    return interval(values, metric)


def _draw(
    ax: "Axes",
    look: Look,
    steps: NDArray[Any],
    values: NDArray[Any],
    metric: Metric,
    band: Band,
    style: Mapping[str, Any],
) -> None:
    mean, low, high = _reach(values, metric, band)
    if band is not None and len(values) >= _LEAST_FOR_A_BAND and not look.aside:
        ax.fill_between(steps, low, high, color=look.colour, alpha=0.16, linewidth=0)
    marker = "o" if len(steps) == 1 else None
    ax.plot(
        *(steps, mean),
        color=look.colour,
        linewidth=style["lines.linewidth"] * (_ASIDE if look.aside else 1),
        linestyle=STYLES[look.dash],
        solid_capstyle=style["lines.solid_capstyle"],
        marker=marker,
        label=look.name,
    )


def _furnish(ax: "Axes", style: Mapping[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter

    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(style[f"axes.spines.{side}"])
    for spine in ax.spines.values():
        spine.set_color(style["axes.edgecolor"])
    if style["axes.grid"]:
        ax.grid(axis=style["axes.grid.axis"], color=style["grid.color"], linewidth=style["grid.linewidth"])
    ax.set_axisbelow(style["axes.axisbelow"])
    for axis in ("x", "y"):
        ax.tick_params(
            axis=axis,
            colors=style[f"{axis}tick.color"],
            length=style[f"{axis}tick.major.size"],
            labelsize=style[f"{axis}tick.labelsize"],
        )
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: _steps(step)))
    ax.set_xlabel("step", color=style["axes.labelcolor"], fontsize=style["axes.labelsize"])


def _spans_decades(values: Iterable[NDArray[Any]]) -> bool:
    """Return whether the curves need a logarithmic axis."""
    means = np.concatenate([np.zeros(0), *(own.mean(0) for own in values)])
    return bool(len(means) and 0 < 30 * means.min() < means.max())


def _steps(step: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if step >= size:
            return f"{step / size:g} {unit}"
    return f"{step:g}"


def _label(ax: "Axes", ends: Sequence[tuple[Look, float]]) -> None:
    """Write every curve's name at its end, spread apart if ends are close."""
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
            color=readable(look.colour, ax.get_facecolor()),
            fontsize=_size(10),
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={"color": look.colour, "linestyle": STYLES[look.dash], **_LEADER},
        )


def readable(colour: str, background: Any = "white") -> str:
    """Darken or lighten a colour so that text is readable on the background (a contrast of 4.5 to 1, as in WCAG)."""
    from matplotlib.colors import to_hex, to_rgb, to_rgba

    rgb, behind = np.array(to_rgb(colour)), np.array(to_rgba(background))
    ground = luminance(behind[:3] * behind[3] + 1 - behind[3]) + 0.05  # transparent backgrounds are on white
    end = np.zeros(3) if ground >= 0.05 * 4.5 else np.ones(3)
    for _ in range(200):
        low, high = sorted((luminance(rgb) + 0.05, ground))
        if high / low >= 4.5:
            break
        rgb = end + (rgb - end) * 0.97
    return to_hex(rgb.tolist())


def luminance(rgb: NDArray[np.float64]) -> float:
    """Return the relative luminance of a colour, from 0 to 1, as defined by WCAG."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def apart(heights: Sequence[float], distance: float) -> list[float]:
    """Return heights close to the given ones, in the same order, with a minimum distance: touching groups are spread out.

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
    """Return the centre of a group: the mean of its heights, or as close to it as keeps the group inside."""
    half = min(0.5, (len(heights) - 1) / 2 * distance)
    return min(max(sum(heights) / len(heights), half), 1 - half)


def _touch(groups: Sequence[Sequence[int]], centres: Sequence[float], distance: float) -> bool:
    reach = (len(groups[0]) + len(groups[1])) / 2 * distance
    return centres[1] - centres[0] < reach


def _looks(entries: Sequence[Entry]) -> list[Look]:
    from matplotlib import rcParams, rcParamsDefault

    drawn = dashes([variant(entry) for entry in entries])
    colours = of_methods.colours(entry.method for entry in entries)
    if rcParams["axes.prop_cycle"] != rcParamsDefault["axes.prop_cycle"]:
        own = rcParams["axes.prop_cycle"].by_key().get("color")
        colours = dict(zip(colours, cycle(own), strict=False)) if own else colours
    return [Look(_name(entry, entries), colours[entry.method], drawn[variant(entry)]) for entry in entries]


def _name(entry: Entry, others: Sequence[Entry]) -> str:
    """Return the variant's name; if others have the same name, with the settings that differ."""
    own = variant(entry)
    same = [other for other in others if variant(other) == own]
    differing = [key for key in entry.settings if any(_differs(entry, other, key) for other in same)]
    return own.label + (f" ({settings_text({key: entry.settings[key] for key in differing})})" if differing else "")


def _differs(entry: Entry, other: Entry, name: str) -> bool:
    return bool(entry.settings[name] != other.settings.get(name))
