"""The figure of the utility-quality study."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from upgd.experiments.analysis.figures import apart, check, readable
from upgd.experiments.paper._batched_utility import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from upgd.experiments.paper.utility_quality import UtilityQuality

#: Okabe and Ito's colour-blind-safe palette; grey is for the control.
_COLOURS = {
    "second order": "#0072B2",
    "first order": "#D55E00",
    "magnitude": "#009E73",
    "squared gradient": "#CC79A7",
    "random": "#767676",
}
#: Number of points per curve; each is a mean over consecutive steps.
_POINTS = 50
_LABEL_DISTANCE = 0.07


def draw(result: "UtilityQuality") -> "Figure":
    """Draw one panel for each (scope, activation)."""
    check()
    from matplotlib.figure import Figure

    activations, scopes = list(result.curves), ("global", "local")
    figure = Figure(figsize=(1.3 + 3.1 * len(activations), 5.6), layout="constrained")
    panels = figure.subplots(len(scopes), len(activations), sharex=True, sharey=True, squeeze=False)
    for row, scope in zip(panels, scopes, strict=True):
        for panel, activation in zip(row, activations, strict=True):
            ends = {m: _curve(panel, result.curves[activation][scope][m], _COLOURS[m]) for m in _COLOURS}
            if result.granularity == "feature":
                for measure, correlations in result.by_argsort[activation][scope].items():
                    _curve(panel, correlations, _COLOURS[measure], dotted=True)
            _furnish(panel)
        _label(row[-1], ends, result.steps)
        row[0].set_ylabel(f"{scope} rank correlation")
    for panel, activation in zip(panels[0], activations, strict=True):
        panel.set_title(TITLES[activation], fontsize=11, loc="left", fontweight="bold")
    for panel in panels[-1]:
        panel.set_xlabel("step")
    items = "weights and biases" if result.granularity == "weight" else "features"
    argsort = ";\ndotted: argsort used as ranks" if result.granularity == "feature" else ""
    figure.suptitle(
        f"How approximate utilities order {items}, compared with the true utility"
        f" (mean and standard deviation of {len(result.seeds)} runs{argsort})",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    return figure


def _curve(panel: "Axes", correlations: Tensor, colour: str, *, dotted: bool = False) -> float:
    """Draw one measure and return its last value."""
    steps = correlations.shape[-1]
    windows = correlations.split(max(1, -(-steps // _POINTS)), -1)  # type: ignore[no-untyped-call]
    lengths = torch.tensor([window.shape[-1] for window in windows])
    middles = lengths.cumsum(0) - lengths / 2
    of_seeds = torch.stack([window.nanmean(-1) for window in windows], -1)
    mean, spread = of_seeds.nanmean(0), of_seeds.std(0, correction=0)
    if not dotted:
        panel.fill_between(middles, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    panel.plot(middles, mean, color=colour, linewidth=1.6, linestyle=":" if dotted else "-")
    return float(mean[-1])


def _furnish(panel: "Axes") -> None:
    panel.set_ylim(-0.09, 1.04)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    panel.grid(axis="y", color="#eeeeee", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(length=3)


def _label(panel: "Axes", ends: Mapping[str, float], steps: int) -> None:
    """Write the names of the measures at the ends of their curves."""
    for measure, height in zip(ends, apart(list(ends.values()), _LABEL_DISTANCE), strict=True):
        panel.annotate(
            measure,
            (steps, height),
            xytext=(4, 0),
            textcoords="offset points",
            color=readable(_COLOURS[measure]),
            va="center",
            fontsize=9,
            annotation_clip=False,
        )
