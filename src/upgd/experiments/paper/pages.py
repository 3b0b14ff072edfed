"""Write a reproduction as figures and a page; all numbers on it are generated.

Hand-written comments come from ``NAME.notes.md`` in the same folder and are copied into the page; see :mod:`.notes`.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from upgd import writing
from upgd.experiments.analysis import figures
from upgd.experiments.analysis.compare import Row, edges
from upgd.experiments.analysis.layout import number_text
from upgd.experiments.analysis.student import quantile
from upgd.experiments.analysis.wording import enumerated, out_of, plural, settings_text, short_names
from upgd.experiments.execution.progress import duration
from upgd.experiments.paper.catalogue import GRIDS, Arm, Panel
from upgd.experiments.paper.drawing import draw, draw_survival
from upgd.experiments.paper.notes import filled
from upgd.experiments.paper.plans import Plan
from upgd.experiments.paper.reproduce import PAPERS, Finding, Reproduction
from upgd.experiments.paper.statistics import LEVEL, SCREENED, Against, against_all, survivors
from upgd.experiments.spec import defaults
from upgd.store import Record

__all__ = ["write_page"]

_PAGE = """\
# {title}

<!-- Written by `{command}`. Edit the program or {name}.notes.md, not this page. -->

{about}

{computed}{scale}

{notes}{panels}

## How to read the figures and tables

- Curves are means over task windows (neighbouring windows are averaged if there are more than 80), with 95% confidence bands
  over runs.
- Tables show means ± 95% confidence intervals over runs. Methods are sorted by the number of diverged runs, then by the mean,
  which excludes diverged runs.
- A value with an asterisk is or contains the smallest or largest number tried; values outside the grid may be better.
- Differences are paired by seed, row minus column, with 95% confidence intervals. Those in bold are significant at the 5%
  level in a paired t-test with Holm's correction for all pairs of rows.
- {level}

## How this was computed

{how}
"""


#: Explains a word of the notes, which come before the tables.
_LEVEL = (
    "Methods are called *level* if [these runs cannot tell which one is better](#how-to-read-the-figures-and-tables)."
)
#: Explains the marks of a table of differences.
_LEGEND = "bold: significant; =: level; [how to read them](#how-to-read-the-figures-and-tables)"


def write_page(found: Reproduction, folder: Path, command: str) -> Path:
    """Write the page, and its figures as PNG, SVG and PDF.

    Args:
        found: the results of the reproduction.
        folder: the output folder, created if necessary.
        command: the command that writes the page.

    Returns:
        The page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    study, name = found.plan.study, found.plan.study.name
    beside = folder / f"{name}.notes.md"
    text = filled(beside.read_text(encoding="utf-8").strip(), found) if beside.exists() else ""
    notes = f"{text}\n\n" if text else ""
    for key, figure in {**draw(found), **draw_survival(found)}.items():
        figures.save(figure, folder / f"{name}-{key}")
    page = folder / f"{name}.md"
    content = _PAGE.format(
        title=study.title,
        name=name,
        command=command,
        about=study.about,
        computed=_computed(found),
        level=f"{LEVEL} {SCREENED}" if found.plan.screening() else LEVEL,
        notes=notes,
        scale=_scale(found.plan) + f" {_LEVEL}" * bool(re.search(r"\blevel\b", text)),
        panels="\n\n".join(_panel(found, panel) for panel in found.plan.panels),
        how="\n".join(f"- {line}" for line in _how(found, command)),
    )
    with writing.text(page) as file:
        file.write(content)
    return page


def _panel(found: Reproduction, panel: Panel) -> str:
    """Return a panel's figure, its table, the comparisons of all pairs of methods, and its divergences."""
    comparison, findings = found.panel(panel)
    if comparison is None:
        return f"## {panel.title}\n\n{_search_alone(found, panel)}"
    head = ["method", "setting", "tried", "mean ± 95% (n)", "first quarter", "last quarter", "diverged"]
    rows, tried = found.rows(panel), _tried(found, panel)
    at_edge = {id(one.entry): _edges(found, one) for own in findings for one in (own, own.papers) if one is not None}
    lines = [_row(number, name, row, tried[name], at_edge[id(row.entry)]) for number, (name, row) in enumerate(rows, 1)]
    table = _table([head, ["---", "---", *["---:"] * 5], *lines])
    options = "".join(f", {name} {value}" for name, value in found.plan.study.options.items())
    title = f"{comparison.problem}{options}, network {comparison.network}, {comparison.steps:,} steps"
    figure = f"![{panel.title}: online {comparison.metric}]({found.plan.study.name}-{panel.key}.svg)"
    parts = [
        f"## {panel.title}",
        figure,
        f"Online {comparison.metric} over all steps; {title}:",
        table,
        *_without_final_runs(found, panel),
        *_differences(found, panel),
        _who_diverged(found, panel),
    ]
    return "\n\n".join(parts)


def _search_alone(found: Reproduction, panel: Panel) -> str:
    """Return the best settings so far of a panel without final runs."""
    arms = [arm for arm in found.plan.arms() if arm in panel.arms]
    searched = [found.findings[arm] for arm in arms if arm in found.findings]
    own = [finding for finding in searched if finding.arm in found.plan.own(panel)]
    if not own:
        return "Not computed."
    wanted = {arm: len(found.plan.settings(arm)) for arm in arms}
    there = {finding.arm: finding.tried for finding in searched}
    missing = [f"{arm.name} {there.get(arm, 0):,} of {wanted[arm]:,}" for arm in arms if there.get(arm) != wanted[arm]]
    state = f"unfinished (settings of {', '.join(missing)})" if missing else "finished"
    comparison = own[0].comparison  # of the search
    runs = "one run" if found.plan.sweep_seeds == 1 else f"{found.plan.sweep_seeds} runs"
    rows = [
        [
            finding.arm.name,
            settings_text(finding.best.entry.settings, _edges(found, finding)).replace("*", "\\*"),
            out_of(finding.tried, wanted[finding.arm]),
            _number(finding.best.score),
        ]
        for finding in searched
    ]
    return "\n\n".join(
        [
            f"The search is {state}, and the final runs are not computed. Best settings so far, by online "
            f"{comparison.metric} over all steps, {runs} each; {comparison.title}:",
            _table([["method", "setting", "tried", comparison.metric], ["---", "---", "---:", "---:"], *rows]),
            "These scores are biased in favour of methods with many settings; they are not results.",
        ]
    )


def _without_final_runs(found: Reproduction, panel: Panel) -> list[str]:
    """Return a sentence about the curves that have been searched completely but have no final runs, if any."""
    findings = (found.findings.get(arm) for arm in panel.arms)
    waiting = [
        f"{one.arm.name} (best of {one.tried:,} settings in the search: {settings_text(one.best.entry.settings)})"
        for one in findings
        if one is not None and one.entry is None and found.searched(one.arm)
    ]
    return [f"Not in the table, because their final runs are not computed: {'; '.join(waiting)}."] if waiting else []


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(number: int, name: str, row: Row, tried: str, at_edge: Collection[str] = ()) -> list[str]:
    alive = row.seeds - row.diverged
    mean = f"{_number(row.mean)} ± {quantile(alive - 1) * row.error:.4f}" if alive > 1 else _number(row.mean)
    return [
        f"{number}. {name}",
        settings_text(row.entry.settings, at_edge).replace("*", "\\*"),
        tried,
        f"{mean} ({alive})",
        _number(row.first_quarter),
        _number(row.last_quarter),
        f"{row.diverged} of {row.seeds}",
    ]


def _tried(found: Reproduction, panel: Panel) -> dict[str, str]:
    """Return the number of settings that each row was chosen from, by name, and out of how many if some are missing."""
    tried = {}
    for arm in panel.arms:
        if (finding := found.findings.get(arm)) is None:
            continue
        tried[arm.name] = out_of(finding.tried, len(found.plan.settings(arm)))
        if finding.papers is not None:
            tried[f"{arm.name}{PAPERS}"] = out_of(finding.papers.tried, len(found.plan.papers(arm)))
    return tried


def _differences(found: Reproduction, panel: Panel) -> list[str]:
    """Return tables of the differences between each method and those below it: of the best settings of all and, if a larger
    grid was searched, of those in the paper's grid."""
    numbers = {name: number for number, (name, _) in enumerate(found.rows(panel), 1)}
    best = [name for name in numbers if not name.endswith(PAPERS)]
    papers = [name for name in numbers if name.endswith(PAPERS) or name + PAPERS not in numbers]
    cells = {(one.first, one.second): _cell(one) for one in against_all(found, panel)}
    between = {"the best of all settings": best, "the best settings in the paper's grid": papers}
    named = {"": best} if best == papers else {f" between {which}": names for which, names in between.items()}
    return [
        f"Differences{which} ({_LEGEND}):\n\n{_matrix(numbers, names, cells)}"
        for which, names in named.items()
        if len(names) > 1
    ]


def _matrix(numbers: Mapping[str, int], names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> str:
    """Return a table of the differences between some rows of a panel's table, which are numbered as there."""
    head = ["row − column", *(str(numbers[name]) for name in names[1:])]
    lines = [
        [f"{numbers[name]}. {name}", *(cells.get((name, other), "") for other in names[1:])] for name in names[:-1]
    ]
    return _table([head, ["---", *["---:"] * (len(names) - 1)], *lines])


def _cell(one: Against) -> str:
    pair = one.pair
    if pair.difference is None:
        return "–"
    reach = "" if pair.reach is None else f" ± {pair.reach:.4f}"
    text = f"{number_text(pair.difference, '+.4f')}{reach}"
    significant = pair.p_holm is not None and pair.p_holm < 0.05
    p = "" if significant or pair.p_holm is None else f" (p {pair.p_holm:.2f})"
    return f"{f'**{text}**' if significant else text}{p}{' =' * one.level}"


def _who_diverged(found: Reproduction, panel: Panel) -> str:
    """Return the number of diverged runs of the search, with a figure of when they diverged."""
    counts = {arm.name: survivors(found, arm) for arm in panel.arms if arm in found.findings}
    total, lost = sum(map(len, counts.values())), sum(int((own >= 0).sum()) for own in counts.values())
    if not lost:
        return f"None of the {total:,} runs of the search diverged."
    each = ", ".join(f"{name} {(own >= 0).sum():,} of {len(own):,}" for name, own in counts.items() if (own >= 0).any())
    figure = f"![{panel.title}: runs that have not diverged]({found.plan.study.name}-{panel.key}-survival.svg)"
    return f"{lost:,} of {total:,} runs of the search diverged ({each}):\n\n{figure}"


def _computed(found: Reproduction) -> str:
    """Return how much of each panel has been computed, in a sentence or a list, and which panels have not been computed."""
    parts: dict[str, str] = {}
    absent = []
    for panel in found.plan.panels:
        arms = [arm for arm in panel.arms if arm in found.plan.arms()]
        wanted = {arm: len(found.plan.settings(arm)) for arm in arms}
        there = {arm: found.findings[arm].tried if arm in found.findings else 0 for arm in arms}
        final = {arm: found.final_runs(arm) for arm in arms}
        if not any(there[arm] for arm in found.plan.own(panel)):
            absent.append(_inside_a_sentence(panel.title))
            continue
        missing = [f"{arm.name}: {there[arm]:,} of {wanted[arm]:,}" for arm in arms if there[arm] < wanted[arm]]
        ended = f"{out_of(sum(n for n, _ in final.values()), sum(n for _, n in final.values()))} final runs"
        parts[_inside_a_sentence(panel.title)] = (
            f"{out_of(sum(there.values()), sum(wanted.values()))} settings, {ended}"
            + (f" (settings of {'; '.join(missing)})" if missing else "")
        )
    lines = [f"{title}: {part}" for title, part in parts.items()]
    if len(lines) > 1 and not absent and len(set(parts.values())) == 1:
        text = f"Computed, for each panel: {next(iter(parts.values()))}. "
    elif len(lines) > 1:
        text = "Computed:\n\n" + "".join(f"- {line}\n" for line in lines) + "\n"
    else:
        text = "".join(f"Computed: {line}. " for line in lines)
    return text + (f"Not computed: {'; '.join(absent)}. " if absent else "")


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"


def _scale(plan: Plan) -> str:
    """Return a sentence that compares the scale with that of the paper."""
    if plan.scale.network is not None:
        return f"Scale: {plan.scale.words}."
    problems: dict[str, dict[str, None]] = {}
    for arm in plan.arms():
        theirs = defaults.defaults(arm.problem)
        ours, steps = len(plan.seeds(arm)), plan.place(arm).steps
        same = (ours, steps) == (theirs.seeds, theirs.steps)
        as_in = "as in the paper" if same else f"in the paper {theirs.seeds} of {theirs.steps:,}"
        problems.setdefault(f"{ours} runs of {steps:,} steps for each curve{{}} ({as_in})", {})[arm.problem] = None
    lengths = [length.format(f" on {enumerated(own)}" if len(problems) > 1 else "") for length, own in problems.items()]
    only = [settings_text({name: value}) for name, values in plan.only.items() for value in values]
    limited = f", limited to {', '.join(only)}" if only else ""
    limited += f", only {', '.join(plan.methods)}" if plan.methods else ""
    return f"Scale: {'; '.join(lengths)}. Settings tried: {GRIDS[plan.grid]}{limited}."


def _how(found: Reproduction, command: str) -> list[str]:
    plan, records = found.plan, found.records
    tried = sum(finding.tried for finding in found.findings.values())
    lines = [
        f"Command: `{command}`",
        f"Search: {tried:,} settings, {plan.sweep_seeds} run{'s' * (plan.sweep_seeds != 1)} each. The best setting of each "
        "method has the fewest diverged runs and, among those, the best mean over all steps."
        f"{_screening(plan)}{_shortlist(plan)} The runs in the tables use other seeds." + _shorter_search(plan),
        f"Computed on {_devices(records)}",
        f"Versions: {'; '.join(sorted({f'upgd {r.package}, torch {r.torch}' for r in records}))}",
        *(f"Data: {line}" for line in _data(sorted({record.key.problem for record in records}))),
    ]
    at_edge = _at_edge(found)
    if at_edge:
        lines.append(f"At the edge of the grid, so a wider grid may be better: {at_edge}")
    if found.unscreened:
        lines.append(
            f"Not finished: {found.unscreened:,} learners of the screening are missing; the search of the settings that they "
            "belong to has not begun."
        )
    if found.unsearched:
        lines.append(
            f"Not finished: {found.unsearched:,} learners of the search are missing; another setting may be better."
        )
    if found.unlisted:
        runs = plural(found.unlisted, "run")
        lines.append(f"Not finished: the shortlist on fresh seeds lacks {runs}; another setting may be chosen.")
    if found.missing:
        lines.append(f"Not finished: {found.missing:,} of the final runs are missing.")
    return lines


def _devices(records: Iterable[Record]) -> str:
    """Return how much was computed on which device, starting with the one that did most of the work."""
    by_device: dict[str, list[Record]] = {}
    for record in records:
        by_device.setdefault("CPU" if record.device == "cpu" else record.device, []).append(record)
    if not by_device:
        return "nothing yet"
    steps = {device: sum(record.steps_taken for record in own) for device, own in by_device.items()}
    parts = [
        f"{device}: {plural(len(by_device[device]), 'run')}, {steps[device]:,} learner-steps in "
        f"{duration(sum(record.seconds for record in by_device[device]))}"
        for device in sorted(steps, key=lambda device: -steps[device])
    ]
    return f"{'; on '.join(parts)}, summed over all processes"


def _screening(plan: Plan) -> str:
    """Return a sentence about the settings of curves whose screening is complete, if any."""
    screened: dict[int, list[Arm]] = {}
    for arm in plan.arms():
        if arm in plan.kept:
            screened.setdefault(plan.screen[arm.problem], []).append(arm)
    if not screened:
        return ""
    runs = [
        f"{steps:,} steps"
        + (f" on {enumerated(dict.fromkeys(arm.problem for arm in own))}" if len(screened) > 1 else "")
        for steps, own in screened.items()
    ]
    arms = [arm for own in screened.values() for arm in own]
    dropped, every = sum(map(plan.dropped, arms)), sum(len(plan.screened(arm)) for arm in arms)
    least = f" (at least {plan.shortlist})" if plan.shortlist > 1 else ""
    return (
        f" {every:,} of the settings, all outside the paper's grid, were screened in runs of {enumerated(runs)}: the best "
        f"{100 * plan.keep:.4g}% of each curve{least} then ran at full length, and the other {dropped:,} did not."
    )


def _shortlist(plan: Plan) -> str:
    if not plan.shortlist:
        return ""
    seeds = f"{plan.shortlist_seeds} run{'s' * (plan.shortlist_seeds != 1)} each"
    inside = f" and the best {plan.shortlist} in the paper's grid" if plan.grid == "extended" else ""
    return f" The best {plan.shortlist}{inside} were run again on fresh seeds, {seeds}, to choose among them."


def _at_edge(found: Reproduction) -> str:
    """Return the curves whose chosen setting is at the edge of the grid: first those of all panels, then those of some."""
    curves: dict[str, list[str]] = {}
    for finding in found.findings.values():
        if at_edge := _edges(found, finding):
            panels = [_inside_a_sentence(panel.title) for panel in found.plan.panels if finding.arm in panel.arms]
            where = "" if len(panels) == len(found.plan.panels) else f"{' and '.join(panels)}: "
            curves.setdefault(where, []).append(f"{finding.arm.name} ({short_names(at_edge)})")
    return "; ".join(where + ", ".join(curves[where]) for where in sorted(curves, key=bool))


def _edges(found: Reproduction, finding: Finding) -> tuple[str, ...]:
    """Return the hyperparameters at the edge of the grid; none before the whole grid has been tried, because the edge of the
    values tried so far says nothing about the grid. Values that were only screened are part of it."""
    return edges(finding.settings, found.plan.settings(finding.arm)) if found.searched(finding.arm) else ()


def _inside_a_sentence(title: str) -> str:
    return title if title[:2].isupper() else title[0].lower() + title[1:]


def _shorter_search(plan: Plan) -> str:
    """Return a sentence about the length of the search runs, if some were shorter than those in the tables."""
    problems: dict[tuple[int, int], dict[str, None]] = {}
    for arm in plan.arms():
        lengths = (plan.place(arm, searching=True).steps, plan.place(arm).steps)
        problems.setdefault(lengths, {})[arm.problem] = None
    if all(search == final for search, final in problems):
        return ""
    runs = [
        (f"{search:,} steps instead of {final:,}" if search < final else f"all {final:,} steps")
        + (f" on {enumerated(own)}" if len(problems) > 1 else "")
        for (search, final), own in problems.items()
    ]
    return (
        f" **Settings were chosen by runs of {'; of '.join(runs)}:** the best setting early need not be the best late."
    )


def _data(problems: Sequence[str]) -> list[str]:
    """Return the data sets with their checksums."""
    from upgd.streams import make

    lines = {}
    for problem in problems:
        try:
            data = getattr(make(problem), "data", None)
        except (ValueError, OSError):
            lines[problem] = f"{problem}: not available on the machine that wrote this page"
            continue
        if data is not None:
            digest = hashlib.sha256(data.images.tobytes() + data.labels.tobytes()).hexdigest()
            lines[data.name] = f"{data.name}, {len(data.labels):,} images, SHA-256 of pixels and labels {digest}"
    return list(lines.values())
