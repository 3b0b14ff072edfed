"""A reproduction as figures and a page: no number on it is typed by hand.

What a person has to say about it stands in ``NAME.notes.md`` beside the page, and is copied into it; see :mod:`.notes`.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from upgd import writing
from upgd.experiments.analysis import figures
from upgd.experiments.analysis.bands import band, of_seeds
from upgd.experiments.analysis.compare import Comparison, Row
from upgd.experiments.analysis.results import settings_text, short_names
from upgd.experiments.execution.progress import duration
from upgd.experiments.paper.catalogue import GRIDS, Arm, Panel
from upgd.experiments.paper.notes import filled
from upgd.experiments.paper.reproduce import Finding, Plan, Reproduction
from upgd.experiments.spec import defaults
from upgd.methods.colours import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "write_page"]

_PAGE = """\
# {title}

<!-- Written by `{command}`; change the program, or {name}.notes.md, not the page. -->

{about}

{notes}{scale} Curves are means over task windows, of which neighbours are joined where there are more than 80, with 95 %
confidence bands over runs. *To the best* is the mean difference over the seeds that both have, with the p of a paired t-test,
corrected by Holm's procedure for the tests of all pairs of methods in the table. Methods of which fewer runs diverged come
first; their means are over the runs that did not.

{panels}

## How

{how}
"""


def write_page(found: Reproduction, folder: Path, command: str) -> Path:
    """Write the page, and the figure of each panel as PNG, SVG and PDF.

    Args:
        found: what came out.
        folder: where to, made if it is not there.
        command: what was typed to make it.

    Returns:
        The page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study, name = found.plan.study, found.plan.study.name
    beside = folder / f"{name}.notes.md"
    notes = filled(beside.read_text(encoding="utf-8").strip(), found) + "\n\n" if beside.exists() else ""
    for key, figure in draw(found).items():
        figures.save(figure, folder / f"{name}-{key}")
    page = folder / f"{name}.md"
    content = _PAGE.format(
        title=study.title,
        name=name,
        command=command,
        about=study.about,
        notes=notes,
        scale=_scale(found.plan),
        panels="\n\n".join(_panel(found, panel) for panel in found.plan.panels),
        how="\n".join(f"- {line}" for line in _how(found, command)),
    )
    with writing.text(page) as file:
        file.write(content)
    return page


def draw(found: Reproduction) -> "dict[str, Figure]":
    """A figure for each panel that has something to show, by the panel's key."""
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
        figures.curves(
            comparison,
            comparison.entries,
            ax=figure.subplots(),
            title=panel.title,
            looks=[_look(finding.arm) for finding in own],
            limits=limits[comparison.problem],
        )
    return drawn


def _look(arm: Arm) -> figures.Look:
    """Within a panel only the order of the utility sets variants apart, or its scaling where UPS is searched."""
    dash = "dash" if ("order", (2,)) in arm.fixed or arm.name.endswith(", local") else "solid"
    return figures.Look(arm.name, arm.colour or colour(arm.method), dash)


def _limits(panels: Iterable[tuple[Comparison, Sequence[Finding]]]) -> dict[str, tuple[float, float] | None]:
    """The same vertical axis for all panels of a problem."""
    ranges: dict[str, list[float]] = {}
    for comparison, own in panels:
        heights = ranges.setdefault(comparison.problem, [])
        for entry in (finding.entry for finding in own if finding.entry):
            _, values = of_seeds(entry, comparison.metric, 80)
            if len(values):
                mean, _ = band(values)
                heights += [float(mean.min()), float(mean.max())]
    return {
        problem: (min(heights) * 0.9, max(heights) * 1.06 + 1e-9) if heights else None
        for problem, heights in ranges.items()
    }


def _panel(found: Reproduction, panel: Panel) -> str:
    """A panel's figure and table."""
    comparison, _ = found.panel(panel)
    if comparison is None:
        return f"## {panel.title}\n\nNot run yet."
    head = [
        "method",
        "setting",
        "mean ± s.e. (n)",
        "first quarter",
        "last quarter",
        "to the best (p, Holm)",
        "diverged",
    ]
    lines = [head, ["---", "---", *["---:"] * 5]]
    lines += [_row(name, row) for name, row in found.rows(panel)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    title = f"{comparison.problem}, network {comparison.network}, {comparison.steps:,} steps"
    figure = f"![{panel.title}: online {comparison.metric}]({found.plan.study.name}-{panel.key}.svg)"
    return f"## {panel.title}\n\n{figure}\n\nOnline {comparison.metric} over all steps; {title}:\n\n{table}"


def _row(name: str, row: Row) -> list[str]:
    alive = row.seeds - row.diverged
    mean = f"{_number(row.mean)} ± {row.error:.4f}" if alive > 1 else _number(row.mean)
    return [
        name,
        settings_text(row.entry.settings),
        f"{mean} ({alive})",
        _number(row.first_quarter),
        _number(row.last_quarter),
        _difference(row),
        f"{row.diverged} of {row.seeds}",
    ]


def _difference(row: Row) -> str:
    if row.difference is None:
        return "–"
    p = row.p_holm
    chance = "" if p is None else " (< 0.001)" if p < 0.001 else f" ({p:.3f})"
    return f"{row.difference:+.4f}{chance}".replace("-", "−")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _scale(plan: Plan) -> str:
    """How much was run, and how much the paper ran."""
    if plan.scale.network is not None:
        return f"Scale: {plan.scale.words}."
    lengths: dict[str, None] = {}
    for arm in plan.arms():
        theirs = defaults.defaults(arm.problem)
        ours, steps = len(plan.seeds(arm)), plan.place(arm).steps
        same = (ours, steps) == (theirs.seeds, theirs.steps)
        as_in = "as in the paper" if same else f"in the paper {theirs.seeds} of {theirs.steps:,}"
        lengths[f"{ours} runs of {steps:,} steps for each curve ({as_in})"] = None
    only = [settings_text({name: value}) for name, values in plan.only.items() for value in values]
    limited = f", limited to {', '.join(only)}" if only else ""
    return f"Scale: {'; '.join(lengths)}. Settings tried: {GRIDS[plan.grid]}{limited}."


def _how(found: Reproduction, command: str) -> list[str]:
    plan, records = found.plan, found.records
    tried = sum(finding.best.tried for finding in found.findings.values())
    lines = [
        f"Command: `{command}`",
        f"Search: {tried:,} settings, {plan.sweep_seeds} run{'s' * (plan.sweep_seeds != 1)} each; the best of each method by "
        f"the mean over all steps, those with fewer diverged runs first.{_shortlist(plan)} The runs in the tables have other "
        "seeds." + _shorter_search(plan),
        f"Computed on {', '.join(sorted({record.device for record in records})) or 'nothing yet'}: "
        f"{sum(r.key.steps for r in records):,} learner-steps in {duration(sum(record.seconds for record in records))}, the "
        "times of all processes added",
        f"Versions: {', '.join(sorted({f'upgd {r.package}, torch {r.torch}' for r in records}))}",
        *(f"Data: {line}" for line in _data(sorted({record.key.problem for record in records}))),
    ]
    at_edge = _at_edge(found)
    if at_edge:
        lines.append(f"At the edge of what was tried, so that a wider grid may find better: {at_edge}")
    if found.unsearched:
        lines.append(
            f"Not finished: {found.unsearched:,} learners of the search are missing; another setting may be better."
        )
    if found.missing:
        lines.append(f"Not finished: {found.missing:,} of the final runs are missing.")
    return lines


def _shortlist(plan: Plan) -> str:
    if not plan.shortlist:
        return ""
    seeds = f"{plan.shortlist_seeds} run{'s' * (plan.shortlist_seeds != 1)} each"
    return f" The best {plan.shortlist} were tried again on fresh seeds, {seeds}, which chose among them."


def _at_edge(found: Reproduction) -> str:
    """The curves whose chosen setting has a value at the edge: first those of all panels, then those of some."""
    curves: dict[str, list[str]] = {}
    for finding in found.findings.values():
        if finding.best.edges:
            panels = [_inside_a_sentence(panel.title) for panel in found.plan.panels if finding.arm in panel.arms]
            where = "" if len(panels) == len(found.plan.panels) else f"{' and '.join(panels)}: "
            curves.setdefault(where, []).append(f"{finding.arm.name} ({short_names(finding.best.edges)})")
    return "; ".join(where + ", ".join(curves[where]) for where in sorted(curves, key=bool))


def _inside_a_sentence(title: str) -> str:
    return title if title[:2].isupper() else title[0].lower() + title[1:]


def _shorter_search(plan: Plan) -> str:
    """How long the runs of the search were, if some were shorter than those in the tables; by problem if that differs."""
    problems: dict[tuple[int, int], dict[str, None]] = {}
    for arm in plan.arms():
        lengths = (plan.place(arm, searching=True).steps, plan.place(arm).steps)
        problems.setdefault(lengths, {})[arm.problem] = None
    if all(search == final for search, final in problems):
        return ""
    runs = [
        (f"{search:,} steps instead of {final:,}" if search < final else f"all {final:,} steps")
        + (f" on {' and '.join(own)}" if len(problems) > 1 else "")
        for (search, final), own in problems.items()
    ]
    return f" **Settings were chosen by runs of {'; of '.join(runs)}:** what is best early need not be best late."


def _data(problems: Sequence[str]) -> list[str]:
    """The data sets, with what identifies them."""
    from upgd.streams import make

    lines = {}
    for problem in problems:
        try:
            data = getattr(make(problem), "data", None)
        except (ValueError, OSError) as error:
            lines[problem] = f"{problem}: {error}"
            continue
        if data is not None:
            digest = hashlib.sha256(data.images.tobytes() + data.labels.tobytes()).hexdigest()
            lines[data.name] = f"{data.name}, {len(data.labels):,} images, SHA-256 of pixels and labels {digest}"
    return list(lines.values())
