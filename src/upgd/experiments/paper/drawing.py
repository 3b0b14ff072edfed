"""The figures of a reproduction: curves, and the fraction of runs that have not diverged."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from upgd.experiments.analysis import figures
from upgd.experiments.analysis.bands import band, of_seeds
from upgd.experiments.analysis.compare import Comparison, Entry
from upgd.experiments.analysis.metrics import METRICS
from upgd.experiments.paper.catalogue import Arm
from upgd.experiments.paper.reproduce import PAPERS, Finding, Reproduction
from upgd.experiments.paper.statistics import survival, survivors
from upgd.methods.colours import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_survival"]


def draw(found: Reproduction) -> "dict[str, Figure]":
    """Return a figure for each panel with results, by the panel's key."""
    figures.check()
    from matplotlib.figure import Figure

    drawn = {}
    shown = [(panel, *found.panel(panel)) for panel in found.plan.panels]
    limits = _limits([(comparison, own) for _, comparison, own in shown if comparison is not None])
    for panel, comparison, own in shown:
        if comparison is None:
            continue
        drawn[panel.key] = figure = Figure(figsize=(8, 4.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        entries, looks = zip(*_curves(own), strict=True)
        figures.curves(
            comparison,
            entries,
            ax=figure.subplots(),
            title=panel.title,
            looks=looks,
            remark="; thin lines: best setting in the paper's grid" if any(look.aside for look in looks) else "",
            limits=limits[comparison.problem],
        )
    return drawn


def draw_survival(found: Reproduction) -> "dict[str, Figure]":
    """Return a figure of the fraction of runs that have not diverged over time, for panels with diverged runs, by key."""
    figures.check()
    from matplotlib.figure import Figure

    drawn = {}
    for panel in found.plan.panels:
        runs = {arm: survivors(found, arm) for arm in panel.arms if arm in found.findings}
        if found.panel(panel)[0] is None or not any((own >= 0).any() for own in runs.values()):
            continue
        drawn[f"{panel.key}-survival"] = figure = Figure(figsize=(8, 3.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        figures.survival(
            [
                (
                    _look(arm)._replace(name=f"{arm.name} ({len(own):,} run{'s' * (len(own) != 1)})"),
                    *survival(own, found.plan.place(arm, searching=True).steps),
                )
                for arm, own in runs.items()
            ],
            ax=figure.subplots(),
            title=panel.title,
            subtitle="runs of the search that have not diverged",
        )
    return drawn


def _curves(findings: Iterable[Finding]) -> Iterator[tuple[Entry, figures.Look]]:
    """Iterate over the curves of a panel: the best setting of each method and, if it differs, that in the paper's grid."""
    for finding in findings:
        look = _look(finding.arm)
        for one, own in ((finding, look), (finding.papers, look._replace(name=look.name + PAPERS, aside=True))):
            if one is not None and one.entry is not None:
                yield one.entry, own


def _look(arm: Arm) -> figures.Look:
    """Return the look of a curve; within a panel, variants differ only in the order of the utility, or in scaling for UPS."""
    second, local = ("order", (2,)) in arm.fixed, arm.label.endswith(", local")
    dash = "dashdot" if second and local else "dot" if second and arm.label else "dash" if second or local else "solid"
    return figures.Look(arm.name, arm.colour or colour(arm.method), dash)


def _limits(panels: Iterable[tuple[Comparison, Sequence[Finding]]]) -> dict[str, tuple[float, float] | None]:
    """Return the limits of the vertical axis, the same for all panels of a problem."""
    ranges: dict[str, list[float]] = {}
    tops: dict[str, float] = {}
    for comparison, own in panels:
        heights = ranges.setdefault(comparison.problem, [])
        tops[comparison.problem] = METRICS[comparison.metric].bounds[1]
        for entry, _ in _curves(own):
            _, values = of_seeds(entry, comparison.metric, 80)
            if len(values):
                mean, _ = band(values)
                heights += [float(mean.min()), float(mean.max())]
    return {
        problem: (min(heights) * 0.9, min(max(heights) * 1.06 + 1e-9, tops[problem])) if heights else None
        for problem, heights in ranges.items()
    }
