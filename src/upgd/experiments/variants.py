"""Variants of a method: weight- or feature-wise, global or local, first or second order, white or anticorrelated noise.

A variant is no hyperparameter: nobody asks for the best of them, but for the best setting of each.
"""

from dataclasses import replace
from typing import NamedTuple

from upgd.experiments.compare import Best, Comparison, Entry, best
from upgd.experiments.settings import SWITCHES

__all__ = ["LABELS", "Variant", "best_of_variants", "by_variant", "variant"]

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
#: What is worth saying about a variant: everything but the usual.
_WORDS = {"feature": "feature-wise", "local": "local", 2: "2nd order", "anticorrelated": "anticorrelated"}


class Variant(NamedTuple):
    """A method with its switches."""

    method: str
    wise: str = "weight"
    scaling: str = "global"
    order: int = 1
    noise: str = "white"

    @property
    def label(self) -> str:
        """The method's name for people, with what is unusual about it."""
        words = [_WORDS[switch] for switch in self[1:] if switch in _WORDS]
        return ", ".join([LABELS.get(self.method, self.method), *words])

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
    return Variant(entry.method, *(entry.settings.get(name, usual) for name, usual in SWITCHES.items()))


def by_variant(comparison: Comparison) -> dict[Variant, Comparison]:
    """The entries of a comparison, variant by variant."""
    sorted_: dict[Variant, list[Entry]] = {}
    for entry in comparison.entries:
        sorted_.setdefault(variant(entry), []).append(entry)
    return {one: replace(comparison, entries=tuple(entries)) for one, entries in sorted_.items()}


def best_of_variants(comparison: Comparison) -> dict[Variant, Best]:
    """The best setting of every variant."""
    return {one: best(own, one.method) for one, own in by_variant(comparison).items()}
