"""Settings, counts and choices in words, for tables, pages and commands."""

import html
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from upgd.experiments.analysis.layout import wrapped
from upgd.experiments.analysis.metrics import Metric, area
from upgd.experiments.spec.settings import is_usual, ordered, symbol

if TYPE_CHECKING:  # it uses this module
    from upgd.experiments.analysis.compare import Best, Comparison, Entry

__all__ = [
    "AT_EDGE",
    "best_text",
    "enumerated",
    "finite",
    "mean_score",
    "note_html",
    "out_of",
    "plugins_text",
    "plural",
    "settings_text",
    "short_names",
    "value_text",
]

#: The meaning of the mark of :func:`settings_text`.
AT_EDGE = "* the smallest or largest value tried: a wider grid may be better"


def note_html(text: str) -> str:
    """Format a note as HTML; text between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def settings_text(settings: Mapping[str, Any], edges: Collection[str] = ()) -> str:
    """Format settings briefly, omitting defaults of variants; those in ``edges`` are marked."""
    names = [name for name in ordered(settings) if not is_usual(name, settings[name])]
    return ", ".join(f"{symbol(name)} {value_text(settings[name])}{'*' * (name in edges)}" for name in names)


def short_names(names: Iterable[str]) -> str:
    """Return the names of settings as in tables."""
    return " and ".join(map(symbol, names))


def best_text(chosen: "Iterable[tuple[Comparison, Best]]", width: int | None = None) -> str:
    """Describe the best settings of each comparison, in lines of at most ``width``."""
    parts: dict[str, list[str]] = {}
    for comparison, one in chosen:
        seeds = plural(len(one.seeds), "seed")
        result = f"{comparison.chosen_by} {one.score:.4f}, mean of {seeds}"
        if math.isnan(one.score):
            result = f"diverged with {seeds}"
        source = f" ({one.entry.source})" if one.entry.source else ""
        lines = [
            f"  {one.entry.method}{source}: {settings_text(one.entry.settings)}",
            f"    {result}; {plural(one.tried, 'setting')} tried",
        ]
        if one.tried > 1:
            lines[-1] += f", {one.flat:.0%} of them within 1% of the best"
        if one.diverged_settings:
            lines[-1] += f", {one.diverged_settings} with diverged learners"
        if one.left_out:
            lines.append(f"    {plural(one.left_out, 'setting')} skipped, without a common seed")
        if one.fresh_seeds:
            fresh = mean_score(one.shown, comparison.chosen_by)
            lines.append(
                f"    on {plural(len(one.fresh_seeds), 'fresh seed')}: {comparison.chosen_by} {value_text(fresh)}"
            )
        if comparison.metric != comparison.chosen_by:
            lines.append(f"    {comparison.metric} {value_text(mean_score(one.shown, comparison.metric))}")
        for name, near in one.neighbours.items():
            scores = ", ".join(
                f"{value_text(value)} → {'diverged' if math.isnan(score) else f'{score:.4f}'}"
                for value, score in near.items()
            )
            lines.append(f"    neighbours: {symbol(name)} {scores}")
        if one.edges:
            lines.append(f"    {short_names(one.edges)} at the edge of the grid: a wider grid may be better")
        parts.setdefault(comparison.title, []).extend(lines)
    return "\n\n".join(
        "\n".join(wrapped(line, width, indent="      ") for line in [title, *lines]) for title, lines in parts.items()
    )


def mean_score(entry: "Entry", metric: Metric) -> float | None:
    """Return the mean of the metric over seeds; None if no seed has it."""
    areas = [score for record in entry.records.values() if not math.isnan(score := area(record, metric))]
    return sum(areas) / len(areas) if areas else None


def plugins_text(plugins: Mapping[str, str]) -> str:
    """Format modules and versions as one line: ``decay_home.method (decay-home 0.1.0)``."""
    return ", ".join(f"{module} ({version})" if version else module for module, version in plugins.items())


def plural(count: int, what: str) -> str:
    """Format a count with its noun: 1 seed, 2,000 seeds."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def out_of(computed: int, wanted: int) -> str:
    """Format a count with the one that is wanted, if they differ: 3 of 20."""
    return f"{wanted:,}" if computed == wanted else f"{computed:,} of {wanted:,}"


def enumerated(words: Iterable[str]) -> str:
    """Join words as in a sentence: lr, sigma and eps."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def finite(value: float) -> float | None:
    """Return None for NaN, which JSON cannot represent."""
    return None if math.isnan(value) else value


def value_text(value: Any) -> str:
    """Format the value of a setting, or a count; – if there is none."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return "/".join(value_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
