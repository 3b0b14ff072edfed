"""Numbers and text of the page about a file of results, independent of HTML."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from upgd import plugins
from upgd.experiments.analysis.bands import interval, of_seeds
from upgd.experiments.analysis.compare import OWN_LOOP, Best, Comparison, Entry, Row, comparisons
from upgd.experiments.analysis.layout import number_format
from upgd.experiments.analysis.metrics import METRICS, Metric, area
from upgd.experiments.analysis.tables import CAVEAT
from upgd.experiments.analysis.variants import Variant, best_of_variants, by_variant, dashes, table_rows
from upgd.experiments.analysis.variants import variant as variant_of
from upgd.experiments.analysis.wording import settings_text
from upgd.experiments.spec.settings import hyperparameters, ordered
from upgd.experiments.spec.settings import words as words_for
from upgd.report.colours import Colours, colours
from upgd.store import Record

__all__ = ["ScoredSetting", "Section", "sections"]

#: Limits on the points per curve and the digits per number; a screen cannot show more.
_POINTS = 150
_DIGITS = 5


@dataclass(frozen=True)
class ScoredSetting:
    """One setting of a variant and its scores.

    Attributes:
        variant: the variant of the method.
        settings: all settings, including switches.
        score: the mean area under the curve of the seeds that did not diverge; NaN if all diverged.
        seeds, diverged: the number of seeds, and how many of them diverged.
        diverged_at: the step of the first divergence.
        best: whether this is the variant's best setting.
    """

    variant: Variant
    settings: Mapping[str, Any]
    score: float
    seeds: int
    diverged: int
    diverged_at: int | None
    best: bool


@dataclass(frozen=True)
class Section:
    """One comparison: a problem, a network and a number of steps."""

    comparison: Comparison
    best: Mapping[Variant, Best]
    rows: Sequence[Row]
    settings: Sequence[ScoredSetting]

    @property
    def records(self) -> list[Record]:
        return [record for entry in self.comparison.entries for record in entry.records.values()]

    @property
    def ranked(self) -> list[Variant]:
        """The variants, best first."""
        return [variant_of(row.entry) for row in self.rows]

    @cached_property
    def diverged(self) -> list[ScoredSetting]:
        """The settings with diverged learners, on any seeds."""
        found = [
            _setting(variant, entry, self.comparison, entry is self.best[variant].entry)
            for variant, own in by_variant(self.comparison).items()
            for entry in own.entries
        ]
        return [setting for setting in found if setting.diverged]

    @cached_property
    def colours(self) -> dict[Variant, Colours]:
        """The colours of the variants. Variants of one method share a colour and differ in their dashes."""
        tints = colours([one.method for one in self.best])
        return {one: tints[one.method] for one in self.best}

    @cached_property
    def dashes(self) -> dict[Variant, str]:
        """The line style of each variant."""
        return dashes(self.best)

    @cached_property
    def looks(self) -> dict[Variant, dict[str, Any]]:
        """Diagnostics recorded for the best setting of each variant; variants without diagnostics are left out."""
        found = {one: _inside(self.best[one].shown) for one in self.ranked}
        return {one: figures for one, figures in found.items() if figures}

    def verdict(self) -> str:
        """Summarize the result in one or two sentences."""
        ahead, first = self.rows[0], self.ranked[0].label
        lines = [row for row in self.rows if row.evaluation == ahead.evaluation]
        if math.isnan(ahead.mean):
            return "Every learner diverged."
        noun = self.comparison.metric.replace("-", " ")
        of_it = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} of"
        higher = METRICS[self.comparison.metric].higher
        means = [row.mean for row in lines if not math.isnan(row.mean)]
        lead = f"has the {'highest' if higher else 'lowest'} {noun}:"
        if ahead.mean != (max(means) if higher else min(means)):
            lead = f"diverges least often, with {of_it}"
        if len(lines) == 1:
            lead = f"has {of_it}"
        spec = number_format(value for row in self.rows for value in (row.mean, row.first_quarter, row.last_quarter))
        spread = "" if math.isnan(ahead.error) else f" ± {ahead.error:{spec}}"
        words = f"{first} {lead} {ahead.mean:{spec}}{spread} over all steps ({_counted(ahead)})."
        if len(lines) > 1 and lines[1].difference is not None:
            second, p = lines[1], lines[1].p_holm
            behind = (second.difference or 0) * (-1 if higher else 1)
            words += f" {self.ranked[1].label} follows, {abs(behind):{spec}} {'behind' if behind >= 0 else 'ahead'}"
            if p is not None:
                words += f", paired t-test p {'< 0.001' if p < 0.001 else f'= {p:.2g}'} (Holm)"
            words += f", but {second.diverged} of {second.seeds} diverged." if behind < 0 else "."
        return words

    @property
    def caveat(self) -> str:
        """A caveat about the statistical tests, or an empty string."""
        after_search = any(row.evaluation == "search" and row.p is not None for row in self.rows)
        return CAVEAT if after_search else ""

    def chart(self) -> dict[str, Any]:
        """Return the data of the charts, for page.js."""
        return {
            "metric": self.comparison.metric,
            "noun": self.comparison.noun.removeprefix("online "),
            "higher": METRICS[self.comparison.metric].higher,
            "steps": self.comparison.steps,
            "format": number_format(setting.score for setting in self.settings),
            "methods": [self._method(variant) for variant in self.ranked],
            "words": {
                name: words_for(name)
                for name in hyperparameters(dict.fromkeys(name for one in self.settings for name in one.settings))
            },
        }

    def commands(self, store: str) -> list[tuple[str, str]]:
        """Return, for each variant, the commands that rerun its best setting and all its settings."""
        lines = []
        own = by_variant(self.comparison)
        for variant in self.ranked:
            best, entries = self.best[variant], own[variant].entries
            if any(record.backend == OWN_LOOP for record in best.entry.records.values()):
                continue  # cannot be run from the command line
            again = self._command("run --method", [best.entry], sorted(best.entry.records), store)
            lines.append((f"{variant.label}, best setting", again))
            if len(entries) > 1:
                what = f"{variant.label}, all {len(entries)} settings"
                values = {name: {_typed(entry.settings[name]) for entry in entries} for name in entries[0].settings}
                combinations = math.prod(map(len, values.values()))
                if combinations > len(entries):
                    what += f", and {combinations - len(entries)} more combinations of their values"
                lines.append((what, self._command("sweep --methods", entries, best.seeds, store)))
        return lines

    def _method(self, variant: Variant) -> dict[str, Any]:
        steps, values = of_seeds(self.best[variant].shown, self.comparison.metric, _POINTS)
        mean, low, high = interval(values, self.comparison.metric) if len(values) else (values,) * 3
        own = [setting for setting in self.settings if setting.variant == variant]
        names = hyperparameters(own[0].settings)
        return {
            "name": variant.label,
            **self.colours[variant]._asdict(),
            "dash": self.dashes[variant],
            "seeds": len(values),
            "setting": settings_text(self.best[variant].entry.settings),
            "x": [int(step) for step in steps],
            "y": _rounded(mean),
            "low": _rounded(low),
            "high": _rounded(high),
            "names": names,
            "tried": [
                [
                    *(_value(setting.settings.get(name)) for name in names),
                    *_rounded([setting.score, setting.diverged / setting.seeds]),
                ]
                for setting in own
            ],
            "inside": self.looks.get(variant, {}),
        }

    def _command(self, verb: str, entries: Sequence[Entry], seeds: Sequence[int], store: str) -> str:
        comparison, first = self.comparison, entries[0]
        command, option = verb.split()
        words = ["upgd", command, comparison.problem, option, first.method]
        for name in ordered(first.settings):
            values = dict.fromkeys(_typed(entry.settings[name]) for entry in entries)
            words += [f"--{name.replace('_', '-')}", ",".join(values)]
        first_ones = list(seeds) == list(range(len(seeds)))
        words += ["--seeds", str(len(seeds)) if first_ones else ",".join(map(str, seeds)) + ","]
        words += ["--steps", str(comparison.steps), "--network", comparison.network]
        for name, value in comparison.options.items():
            words += ["--option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        used = {name: version for one in first.records.values() for name, version in (one.plugins or {}).items()}
        for module in sorted(name for name, version in used.items() if not plugins.is_installed(version)):
            words += ["--plugin", module]
        return shlex.join([*words, "--store", first.source or store])


def sections(records: Iterable[Record], metric: Metric | None = None) -> list[Section]:
    """Return the comparisons in a file of results."""
    return [_section(comparison) for comparison in comparisons(records, metric)]


def _section(comparison: Comparison) -> Section:
    best = best_of_variants(comparison)
    lines = table_rows(comparison)
    settings = [
        _setting(
            variant, entry.on(best[variant].search_seeds or entry.records), comparison, entry is best[variant].entry
        )
        for variant, own in by_variant(comparison).items()
        for entry in own.entries
    ]
    return Section(comparison, best, lines, [setting for setting in settings if setting.seeds])


def _setting(variant: Variant, entry: Entry, comparison: Comparison, best: bool) -> ScoredSetting:
    scores = [area(record, comparison.metric) for record in entry.records.values()]
    alive = [score for score in scores if not math.isnan(score)]
    moments = [record.diverged_at for record in entry.records.values() if record.diverged_at is not None]
    mean = sum(alive) / len(alive) if alive else math.nan
    return ScoredSetting(variant, entry.settings, mean, len(scores), len(moments), min(moments, default=None), best)


def _inside(entry: Entry) -> dict[str, Any]:
    """Return the recorded diagnostics as means over seeds, by name; ``step`` holds the steps. Empty if none were recorded."""
    looks = [
        record.diagnostics for record in entry.records.values() if record.diagnostics and record.diverged_at is None
    ]
    looks = [one for one in looks if one["step"] == looks[0]["step"]]
    if not looks:
        return {}
    shared = [name for name in looks[0] if name != "step" and all(name in one for one in looks)]
    means = {name: np.array([one[name] for one in looks], np.float64).mean(0) for name in shared}
    return {"step": looks[0]["step"]} | {name: _rounded(mean) for name, mean in means.items()}


def _rounded(values: ArrayLike) -> list[Any]:
    """Round to a few digits, as nested lists; non-finite values become None, because JSON cannot represent them."""
    exact = np.asarray(values, np.float64)
    size = np.log10(np.abs(exact), out=np.zeros_like(exact), where=np.isfinite(exact) & (exact != 0))
    digits = _DIGITS - 1 - np.floor(size)
    # Powers of ten with non-negative exponents are exact, so the result is the float closest to a short decimal.
    above, below = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    short = np.rint(exact * above / below) * below / above
    listed = short.astype(object)
    listed[~np.isfinite(short)] = None
    return list(listed.tolist())


def _value(value: Any) -> Any:
    """Convert a value for a chart: a number, or text."""
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return str(value) if value is None or isinstance(value, bool) else value


def _typed(value: Any) -> str:
    """Format a value for the command line."""
    if isinstance(value, list | tuple):
        return "/".join(repr(part) for part in value)
    return value if isinstance(value, str) else repr(value)


def _counted(row: Row) -> str:
    """Describe the seeds behind a mean."""
    seeds = f"{row.seeds - row.diverged} seed{'s' * (row.seeds - row.diverged != 1)}"
    return f"{seeds}, {row.diverged} diverged" if row.diverged else seeds
