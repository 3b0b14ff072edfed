"""Variants of a method: weight- or feature-wise, global or local, first or second order, white or anticorrelated noise.

A variant is no hyperparameter: nobody asks for the best of them, but for the best setting of each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from upgd.experiments.compare import Best, Comparison, Entry, Evaluation, Row, best, rows
from upgd.experiments.settings import SWITCHES

__all__ = ["LABELS", "Variant", "best_of_variants", "by_variant", "dashes", "evaluated", "table_rows", "variant"]

LABELS = {
    "upgd": "UPGD",
    "upgd-nonprotecting": "UPGD, non-protecting",
    "ups": "UPS",
    "ups-even": "even search",
    "sgd": "SGD",
    "sgdw": "SGDW",
    "adamw": "AdamW",
    "pgd": "PGD",
    "anti-pgd": "Anti-PGD",
    "shrink-and-perturb": "Shrink & Perturb",
}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
#: What is worth saying about a variant: everything but the usual.
_WORDS = {"feature": "feature-wise", "local": "local", 2: "2nd order", "anticorrelated": "anticorrelated"}


class Variant(NamedTuple):
    """A method with its switches; and the store that its results come from, where several are compared."""

    method: str
    wise: str = "weight"
    scaling: str = "global"
    order: int = 1
    noise: str = "white"
    source: str = ""

    @property
    def label(self) -> str:
        """The method's name for people, with what is unusual about it."""
        words = [_WORDS[switch] for switch in self[1:5] if switch in _WORDS]
        name = ", ".join([LABELS.get(self.method, self.method), *words])
        return f"{name} ({Path(self.source).with_suffix('')})" if self.source else name

    @property
    def dash(self) -> str:
        """How its lines are drawn, so that variants with one colour can be told apart; in plotly's words."""
        if self.order == 2:
            return "dash"
        return {("weight", "global"): "solid", ("weight", "local"): "longdash", ("feature", "global"): "dot"}.get(
            (self.wise, self.scaling), "dashdot"
        )


def variant(entry: Entry) -> Variant:
    """The variant that an entry is a setting of."""
    switches: dict[str, Any] = {name: entry.settings.get(name, usual) for name, usual in SWITCHES.items()}
    # Settings of somebody's own method may have these names, and any values.
    switches = {name: value if isinstance(value, str | int) else str(value) for name, value in switches.items()}
    return Variant(entry.method, **switches, source=entry.source)


def dashes(variants: Iterable[Variant]) -> dict[Variant, str]:
    """How the lines of variants are drawn side by side: the same method from another store gets another dash."""
    listed = list(variants)
    sources = list(dict.fromkeys(one.source for one in listed))
    return {one: _DASHES[(_DASHES.index(one.dash) + sources.index(one.source)) % len(_DASHES)] for one in listed}


def by_variant(comparison: Comparison) -> dict[Variant, Comparison]:
    """The entries of a comparison, variant by variant."""
    sorted_: dict[Variant, list[Entry]] = {}
    for entry in comparison.entries:
        sorted_.setdefault(variant(entry), []).append(entry)
    return {one: replace(comparison, entries=tuple(entries)) for one, entries in sorted_.items()}


def best_of_variants(comparison: Comparison) -> dict[Variant, Best]:
    """The best setting of every variant."""
    return {one: best(own, one.method) for one, own in by_variant(comparison).items()}


def evaluated(comparison: Comparison, *, all_settings: bool = False) -> list[tuple[Evaluation, list[Entry]]]:
    """What tables show: every variant at its best setting, or at all of them, on fresh seeds where it has some.

    Returns:
        Entries on fresh seeds, then those on the seeds of the search; no group is empty. Where no variant has more than one
        setting, there is nothing to tell apart, and the only group has all entries with all of their seeds.
    """
    chosen = best_of_variants(comparison)
    searched = {one: best for one, best in chosen.items() if best.search_seeds}
    if not searched:
        return [(None, list(comparison.entries) if all_settings else [best.entry for best in chosen.values()])]
    fresh = [best.shown for one, best in chosen.items() if best.fresh_seeds or one not in searched]
    if not any(best.fresh_seeds for best in searched.values()):
        fresh = []  # then single settings stay with the others
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
    """A table's lines: those on fresh seeds, then those on the seeds of the search, each group the best first.

    Args:
        comparison: the learners of one problem.
        all_settings: all settings, and not only the best of every variant.
        against: the method (or the label of the variant) with which the others are compared; by default the best.
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
    labels = dict.fromkeys(variant(entry).label for entry in found or entries)
    problem = "several methods" if found else "no method"
    raise ValueError(
        f"{comparison.title}: there are {problem} {name!r} to compare with; choose among {'; '.join(labels)}"
    )
