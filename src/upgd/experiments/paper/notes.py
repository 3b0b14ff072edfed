"""Hand-written notes about a reproduction, with the numbers filled in.

Notes refer to numbers by name, so that they always agree with the tables:

- ``{{weight-global | UPGD}}`` is the mean of a panel's curve, ``{{weight-global | UPGD | last quarter}}`` that of its last
  quarter (or ``first quarter``);
- ``{{weight-global | UPGD - SGDW}}`` is the paired difference of two curves with its 95% interval, marked if they are
  level;
- ``{{weight-global | UPGD, paper's grid}}`` is the best setting in the paper's grid, if a larger grid was searched;
- ``{{weight-global | UPGD | lr 0.01}}`` is the score in the search of the setting that differs from the chosen one only in
  this hyperparameter.

A paragraph with a number that has not been computed yet is omitted.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from upgd.experiments.analysis.layout import number_text
from upgd.experiments.paper.catalogue import Panel
from upgd.experiments.paper.reproduce import PAPERS, Finding, Reproduction
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
    first, second = (_row_name(found, panel, one) for one in (first, second))
    for one in (first, second) if minus else (first,):
        if one not in rows and one.removesuffix(PAPERS) in {arm.name for arm in panel.arms}:
            raise _NotComputed
        _of(rows, one, "curve", name)
    if minus:
        return _difference(found, panel, first, second)
    row = rows[first]
    numbers = {"": row.mean, "first quarter": row.first_quarter, "last quarter": row.last_quarter}
    if which not in numbers:
        best = _finding(found, panel, first).best
        numbers |= {f"{key} {value:g}": score for key, own in best.neighbours.items() for value, score in _plain(own)}
    return f"{_of(numbers, which, 'number', name):.4f}"


def _row_name(found: Reproduction, panel: Panel, curve: str) -> str:
    """Return the row of a curve: if the best setting is in the paper's grid, there is no other row for that."""
    one = next((found.findings.get(arm) for arm in panel.arms if curve == f"{arm.name}{PAPERS}"), None)
    return curve if one is None or one.papers is not None else one.arm.name


def _finding(found: Reproduction, panel: Panel, row: str) -> Finding:
    (one,) = (one for arm, one in found.findings.items() if arm in panel.arms and arm.name == row.removesuffix(PAPERS))
    return one.papers if one.papers is not None and row.endswith(PAPERS) else one


def _difference(found: Reproduction, panel: Panel, first: str, second: str) -> str:
    for one in against_all(found, panel):
        if {one.first, one.second} == {first, second} and one.pair.difference is not None:
            difference = one.pair.difference if one.first == first else -one.pair.difference
            reach = "" if one.pair.reach is None else f" ± {one.pair.reach:.4f}"
            return f"{number_text(difference, '+.4f')}{reach}{', level' * one.level}"
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
