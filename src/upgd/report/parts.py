"""HTML fragments of the page. All text is escaped with :func:`html.escape`."""

import math
from collections.abc import Sequence
from datetime import datetime
from html import escape

from upgd.experiments.analysis.compare import Row
from upgd.experiments.analysis.layout import number_format, number_text, p_text
from upgd.experiments.analysis.metrics import METRICS
from upgd.experiments.analysis.variants import Variant
from upgd.experiments.analysis.wording import AT_EDGE, note_html, plural, settings_text
from upgd.experiments.execution.progress import count, duration
from upgd.report.content import ScoredSetting, Section
from upgd.store import Record

__all__ = ["overview", "section"]


def overview(records: Sequence[Record], found: Sequence[Section], title: str) -> str:
    """Return the top of the page: a summary in a few numbers."""
    settings = sum(len(one.settings) for one in found)
    diverged = sum(record.diverged_at is not None for record in records)
    seconds = sum(record.seconds for record in records)
    tiles = [
        ("learners", f"{len(records):,}"),
        ("settings", f"{settings:,}"),
        ("learner-steps", count(sum(record.steps_taken for record in records))),
        ("computing time", duration(seconds) if seconds else "–"),
        ("diverged", f"{diverged:,}"),
    ]
    numbers = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return (
        f'<p class="brand">upgd</p><h1>{escape(title)}</h1><p class="lead">{escape(_lead(records))}</p>'
        f'<p id="news" class="note" role="status" aria-live="polite"></p><dl class="tiles">{numbers}</dl>'
    )


def section(one: Section, anchor: str, store: str) -> str:
    """Return the section about one comparison."""
    comparison = one.comparison
    parts = [
        f'<h2 id="{anchor}-title">{escape(comparison.problem)}</h2>',
        f'<p class="subtitle">{escape(_subtitle(one))}</p>',
        f'<p class="verdict">{escape(one.verdict())}</p>',
        _curves(one, anchor),
        _table(one),
        _sensitivity(one, anchor),
        _divergences(one),
        _inside(one, anchor),
        _commands(one, store),
    ]
    return f'<section id="{anchor}" aria-labelledby="{anchor}-title">{"".join(parts)}</section>'


def _lead(records: Sequence[Record]) -> str:
    if not records:
        return "No learner has finished yet."
    methods = plural(len({record.key.method for record in records}), "method")
    problems = plural(len({record.key.problem for record in records}), "problem")
    devices = " and ".join(sorted({record.device for record in records}))
    first, last = min(r.finished for r in records), max(r.finished for r in records)
    when = _day(first) if _day(first) == _day(last) else f"{_day(first)} to {_day(last)}"
    return (
        f"{methods} on {problems}, run on {devices}, {when}. Every sample is evaluated before it is used for learning."
    )


def _subtitle(one: Section) -> str:
    comparison = one.comparison
    options = "".join(f"{name} {value}, " for name, value in comparison.options.items())
    return (
        f"{options}network {comparison.network}, {plural(comparison.steps, 'step')}; {plural(len(one.settings), 'setting')}, "
        f"{plural(len(one.records), 'learner')}"
    )


def _curves(one: Section, anchor: str) -> str:
    comparison = one.comparison
    noun = comparison.noun
    ends = ", ".join(f"{v.label} {_number(row.mean, '.4g')}" for v, row in zip(one.ranked, one.rows, strict=True))
    label = f"Chart: {noun} against step. Means over all steps: {ends}. The following table contains the numbers."
    return (
        f"<figure><figcaption>{noun.capitalize()} of each method at its best setting: mean over seeds and task windows, with "
        f'a 95% band for three or more seeds</figcaption><div class="switches" data-chart="switches" role="group" '
        f'aria-label="Show or hide methods"></div><div class="choices"></div><div class="chart" data-chart="curves" '
        f'data-of="{anchor}" role="img" '
        f'aria-label="{escape(label)}"></div></figure>'
    )


def _table(one: Section) -> str:
    diverged = any(row.diverged for row in one.rows)
    head = ["method", "setting", "mean ± s.e.", "first quarter", "last quarter", "vs. best", "p (Holm)", "seeds"]
    spec = number_format(value for row in one.rows for value in (row.mean, row.first_quarter, row.last_quarter))
    edges = [one.best[variant].edges for variant in one.ranked]
    lines = [
        _row(variant.label, row, at_edge, spec, diverged)
        for variant, row, at_edge in zip(one.ranked, one.rows, edges, strict=True)
    ]
    caption = (
        f"{_shown(one)}, mean over all steps; differences tested over common seeds (paired t-test), p-values corrected "
        "for all pairs of methods (Holm)"
    )
    swatches = [_swatch(one, variant) for variant in one.ranked]
    table = _tabular(caption, [*head, *(["diverged"] * diverged)], lines, words=2, marks=swatches)
    notes = [f"{AT_EDGE}."] * any(edges) + [one.caveat] * bool(one.caveat)
    return table + "".join(f'<p class="note">{note_html(note)}</p>' for note in notes)


def _shown(one: Section) -> str:
    metric = one.comparison.metric
    return f"Online {metric}" if metric in ("accuracy", "loss") else metric.replace("-", " ").capitalize()


def _swatch(one: Section, variant: Variant) -> str:
    """Return a sample of the variant's line."""
    light, dark = one.colours[variant]
    return f'<span class="swatch {one.dashes[variant]}" style="--light: {light}; --dark: {dark}" aria-hidden="true"></span>'


def _row(label: str, row: Row, edges: Sequence[str], spec: str, diverged: bool) -> list[str]:
    error = "" if math.isnan(row.error) else f" ± {row.error:{spec}}"
    return [
        label,
        settings_text(row.entry.settings, edges),
        f"{_number(row.mean, spec)}{error}",
        _number(row.first_quarter, spec),
        _number(row.last_quarter, spec),
        number_text(row.difference, f"+{spec}"),
        p_text(row.p_holm),
        f"{row.seeds} {row.evaluation}" if row.evaluation else str(row.seeds),
        *([str(row.diverged)] * diverged),
    ]


def _sensitivity(one: Section, anchor: str) -> str:
    if len(one.settings) == len(one.best):
        return ""
    sign = -1 if METRICS[one.comparison.metric].higher else 1
    ordered = sorted(one.settings, key=lambda s: (s.diverged / s.seeds, math.isnan(s.score), sign * s.score))
    spec = number_format(setting.score for setting in ordered)
    lines = [_setting(setting, spec) for setting in ordered]
    table = _tabular("All settings, best first", ["method", "setting", "mean", "seeds", "diverged"], lines, words=2)
    return (
        "<h3>Hyperparameter sensitivity</h3>"
        '<p class="note">Each point is the best result of a method with this value, over all values of its other '
        "hyperparameters (cross: some learners diverged). Faint points are individual settings. All charts share one "
        "scale, so a steeper line means higher sensitivity.</p>"
        '<div class="switches" data-chart="switches" data-only="searched" role="group" '
        'aria-label="Show or hide methods"></div>'
        f'<div class="multiples" data-chart="sensitivity" data-of="{anchor}"></div>'
        f'<figure class="pairs" data-chart="pairs" data-of="{anchor}" hidden><figcaption>Pairs of hyperparameters: '
        'the best result over all others</figcaption><div class="choices"></div><div class="heat scroll" tabindex="0" '
        'role="region" aria-label="Heat map of two hyperparameters"></div></figure>'
        f"<details><summary>All {len(ordered):,} settings</summary>{table}</details>"
    )


def _setting(setting: ScoredSetting, spec: str) -> list[str]:
    return [
        setting.variant.label + (" ★" if setting.best else ""),
        settings_text(setting.settings),
        _number(setting.score, spec),
        str(setting.seeds),
        str(setting.diverged or "–"),
    ]


def _divergences(one: Section) -> str:
    diverged = one.diverged
    if not diverged:
        return '<h3>Divergences</h3><p class="note">No learner diverged.</p>'
    learners = sum(setting.diverged for setting in diverged)
    lines = [
        [s.variant.label, settings_text(s.settings), f"{s.diverged} of {s.seeds}", f"{s.diverged_at:,}"]
        for s in sorted(diverged, key=lambda s: s.diverged_at or 0)
    ]
    table = _tabular(
        "Settings with diverged learners", ["method", "setting", "learners", "first at step"], lines, words=2
    )
    return (
        f"<h3>Divergences</h3><p>{learners:,} of {len(one.records):,} learners diverged, in "
        f"{plural(len(diverged), 'setting')}. Settings are ranked by number of diverged learners first.</p>"
        f'<details class="on-paper"><summary>Diverged settings</summary>{table}</details>'
    )


def _inside(one: Section, anchor: str) -> str:
    found = one.looks
    if not found:
        return ""
    scalars = {name for looks in found.values() for name in looks if not isinstance(looks[name][-1], list)} - {"step"}
    lines = [[name, *_last([looks.get(name) for looks in found.values()])] for name in sorted(scalars)]
    table = _tabular("Last snapshot, means over seeds", ["diagnostic", *(v.label for v in found)], lines, words=1)
    return (
        f'<h3>Diagnostics</h3><figure data-chart="looks" data-of="{anchor}"><figcaption>Snapshots of the best setting, '
        'mean over seeds</figcaption><div class="choices"></div><div class="chart" role="img" '
        'aria-label="Chart: the selected diagnostic against step; the table below has the last values, without histograms.">'
        "</div></figure>"
        f"<details><summary>All diagnostics of the last snapshot</summary>{table}</details>"
    )


def _last(figures: Sequence[Sequence[float | None] | None]) -> list[str]:
    """Format the last values of one diagnostic for each method, with a common number of decimals."""
    values = [figure[-1] if figure else None for figure in figures]
    spec = number_format(values)
    return ["–" if value is None else format(value, spec) for value in values]


def _commands(one: Section, store: str) -> str:
    lines = "".join(
        f'<div class="command"><span>{escape(what)}</span><pre tabindex="0"><code>{escape(command)}</code></pre></div>'
        for what, command in one.commands(store)
    )
    return f'<h3>Reproduce</h3><details class="on-paper"><summary>Commands</summary>{lines}</details>' if lines else ""


def _tabular(
    caption: str, head: Sequence[str], lines: Sequence[Sequence[str]], words: int, marks: Sequence[str] = ()
) -> str:
    """Return a table. The first ``words`` columns are text, the others numbers; ``marks`` are HTML prefixes of the rows."""
    kinds = ["" if column < words else ' class="number"' for column in range(len(head))]
    # On a phone the cells of a row are stacked, with each number next to its column's name.
    cells = [
        "" if column < words else f' class="number" data-label="{escape(name)}"' for column, name in enumerate(head)
    ][1:]
    columns = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>"
        + f'<th scope="row">{mark}{escape(line[0])}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(line[1:], cells, strict=True))
        + "</tr>"
        for mark, line in zip(marks or [""] * len(lines), lines, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _number(value: float, spec: str) -> str:
    return "diverged" if math.isnan(value) else number_text(value, spec)


def _day(moment: str) -> str:
    day = datetime.fromisoformat(moment)
    return f"{day.day} {day:%B %Y}"  # Windows does not support %-d
