"""Hand-written notes about a reproduction, with the numbers filled in.

Notes refer to numbers by name, so that they always agree with the tables:

- ``{{weight-global | UPGD}}`` is the mean of a panel's curve, ``{{weight-global | UPGD | last quarter}}`` that of its last
  quarter (or ``first quarter``);
- ``{{weight-global | UPGD - SGDW}}`` is the paired difference of two curves with its 95 % interval, marked if they are
  level;
- ``{{weight-global | UPGD | lr 0.01}}`` is the score in the search of the setting that differs from the chosen one only in
  this hyperparameter.

A paragraph with a number that has not been computed yet is omitted.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from upgd.experiments.paper.catalogue import Panel
from upgd.experiments.paper.reproduce import Reproduction
from upgd.experiments.paper.statistics import against_all

__all__ = ["filled"]

Found = TypeVar("Found")

_NAMED = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


class _NotComputed(Exception):
    """A curve of the study has no final runs yet."""


def filled(text: str, found: Reproduction) -> str:
    """Replace names by numbers in the text, and omit paragraphs with numbers that are not computed yet.

    Raises:
        ValueError: a name is not that of a number.
    """
    paragraphs = []
    for paragraph in text.split("\n\n"):
        try:
            paragraphs.append(_NAMED.sub(lambda match: _number(match.group(1), found), paragraph))
        except _NotComputed:
            continue
    return "\n\n".join(paragraphs)


def _number(name: str, found: Reproduction) -> str:
    key, curve, which = ([part.strip() for part in name.split("|")] + ["", ""])[:3]
    panel = _of({one.key: one for one in found.plan.study.panels}, key, "panel", name)
    first, minus, second = (part.strip() for part in curve.partition(" - "))
    rows = dict(found.rows(panel))
    for one in (first, second) if minus else (first,):
        if one not in rows and one.removesuffix(", paper's grid") in {arm.name for arm in panel.arms}:
            raise _NotComputed
        _of(rows, one, "curve", name)
    if minus:
        return _difference(found, panel, first, second)
    row = rows[first]
    numbers = {"": row.mean, "first quarter": row.first_quarter, "last quarter": row.last_quarter}
    if which not in numbers:
        (best,) = [one.best for arm, one in found.findings.items() if arm in panel.arms and arm.name == first]
        numbers |= {f"{key} {value:g}": score for key, own in best.neighbours.items() for value, score in _plain(own)}
    return f"{_of(numbers, which, 'number', name):.4f}"


def _difference(found: Reproduction, panel: Panel, first: str, second: str) -> str:
    for one in against_all(found, panel):
        if {one.first, one.second} == {first, second} and one.pair.difference is not None:
            difference = one.pair.difference if one.first == first else -one.pair.difference
            reach = "" if one.pair.reach is None else f" ± {one.pair.reach:.4f}"
            return f"{difference:+.4f}{reach}{', level' * one.level}".replace("-", "−")
    raise _NotComputed


def _plain(scores: Mapping[object, float]) -> list[tuple[float, float]]:
    return [(value, score) for value, score in scores.items() if isinstance(value, int | float)]


def _of(known: Mapping[str, Found], wanted: str, what: str, name: str) -> Found:
    if wanted not in known:
        raise ValueError(
            f"the notes refer to {{{{{name}}}}}, but there is no {what} {wanted!r}; use one of "
            f"{', '.join(filter(None, known))}"
        )
    return known[wanted]
