"""Variants of a method: weight- or feature-wise, global or local, first or second order, white or anticorrelated noise.

Variants are not hyperparameters: tables show the best setting of each variant rather than the best variant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from upgd.experiments.analysis.compare import Best, Comparison, Entry, Evaluation, Row, best, rows
from upgd.experiments.spec.settings import is_usual, known, ordered
from upgd.methods import METHODS

__all__ = ["Variant", "best_of_variants", "by_variant", "dashes", "evaluated", "label", "table_rows", "variant"]

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
#: Line styles of variants, by the switches that are not at their default; plotly's names.
_BY_SWITCHES = {(): "solid", ("scaling",): "longdash", ("granularity",): "dot", ("granularity", "scaling"): "dashdot"}


class Variant(NamedTuple):
    """A method with its switches that are not at their default, as pairs of name and value, and the store of its results, if
    several are compared."""

    method: str
    switches: tuple[tuple[str, Any], ...] = ()
    source: str = ""

    @property
    def label(self) -> str:
        """The method's label, with the switches that are not at their default."""
        words = [_word(name, value) for name, value in self.switches]
        name = ", ".join([label(self.method), *filter(None, words)])
        return f"{name} ({Path(self.source).with_suffix('')})" if self.source else name

    @property
    def dash(self) -> str:
        """Its line style."""
        names = tuple(name for name, _ in self.switches)
        return "dash" if "order" in names else _BY_SWITCHES.get(tuple(n for n in names if n != "noise"), "dashdot")


def label(method: str) -> str:
    """Return the label of a method in tables and figures; its name if it is not loaded."""
    return METHODS[method].label if method in METHODS else method


def _word(name: str, value: Any) -> str:
    setting = known().get(name)
    return f"{name} {value}" if setting is None else setting.words.get(value, f"{name} {value}")


def variant(entry: Entry) -> Variant:
    """Return the variant of an entry."""
    every = known()
    names = [name for name in ordered(entry.settings) if name in every and every[name].is_switch]
    switches = ((name, entry.settings[name]) for name in names if not is_usual(name, entry.settings[name]))
    # Settings of custom methods may have these names with any values.
    plain = ((name, value if isinstance(value, str | int) else str(value)) for name, value in switches)
    return Variant(entry.method, tuple(plain), entry.source)


def dashes(variants: Iterable[Variant]) -> dict[Variant, str]:
    """Return the line styles of variants that are shown together; the same method from another store gets another style."""
    listed = list(variants)
    sources = list(dict.fromkeys(one.source for one in listed))
    return {one: _DASHES[(_DASHES.index(one.dash) + sources.index(one.source)) % len(_DASHES)] for one in listed}


def by_variant(comparison: Comparison) -> dict[Variant, Comparison]:
    """Group the entries of a comparison by variant."""
    grouped: dict[Variant, list[Entry]] = {}
    for entry in comparison.entries:
        grouped.setdefault(variant(entry), []).append(entry)
    return {one: replace(comparison, entries=tuple(entries)) for one, entries in grouped.items()}


def best_of_variants(comparison: Comparison) -> dict[Variant, Best]:
    """Return the best setting of every variant."""
    return {one: best(own, one.method) for one, own in by_variant(comparison).items()}


def evaluated(comparison: Comparison, *, all_settings: bool = False) -> list[tuple[Evaluation, list[Entry]]]:
    """Return the entries of tables: every variant at its best setting, or at all settings, on fresh seeds if it has some.

    Returns:
        Entries on fresh seeds, then those on the seeds of the search; no group is empty. If no variant has more than one
        setting, there is a single group of all entries with all of their seeds.
    """
    chosen = best_of_variants(comparison)
    searched = {one: best for one, best in chosen.items() if best.search_seeds}
    if not searched:
        return [(None, list(comparison.entries) if all_settings else [best.entry for best in chosen.values()])]
    fresh = [best.shown for one, best in chosen.items() if best.fresh_seeds or one not in searched]
    if not any(best.fresh_seeds for best in searched.values()):
        fresh = []  # single settings stay with the others
    if all_settings:
        search = [
            entry.on(searched[one].search_seeds) if one in searched else entry
            for one, own in by_variant(comparison).items()
            for entry in own.entries
            if one in searched or not fresh
        ]
        search = [entry for entry in search if entry.records]
    else:
        search = [best.entry for best in chosen.values() if not fresh or (best.search_seeds and not best.fresh_seeds)]
    groups: list[tuple[Evaluation, list[Entry]]] = [("fresh", fresh), ("search", search)]
    return [(evaluation, entries) for evaluation, entries in groups if entries]


def table_rows(comparison: Comparison, *, all_settings: bool = False, against: str | None = None) -> list[Row]:
    """Return a table's lines: those on fresh seeds, then those on the seeds of the search, each group best first.

    Args:
        comparison: the comparison.
        all_settings: whether to include all settings, not only the best of every variant.
        against: the method, or the label of a variant, to compare the others with. Default: the best.
    """
    groups = evaluated(comparison, all_settings=all_settings)
    reference = None if against is None else _reference(comparison, [e for _, own in groups for e in own], against)
    return [
        row
        for evaluation, entries in groups
        for row in rows(comparison, entries, reference=reference, evaluation=evaluation, corrected=not all_settings)
    ]


def _reference(comparison: Comparison, entries: Sequence[Entry], name: str) -> Entry:
    found = [entry for entry in entries if name in (entry.method, variant(entry).label)]
    if len(found) == 1:
        return found[0]
    methods = {variant(entry).label: entry.method for entry in found or entries}
    # A method with one variant is known by its name, and several variants of a method by their labels.
    known = [method if [*methods.values()].count(method) == 1 else label for label, method in methods.items()]
    problem = "are several methods" if found else "is no method"
    raise ValueError(f"{comparison.title}: there {problem} {name!r} to compare with; choose among {'; '.join(known)}")
