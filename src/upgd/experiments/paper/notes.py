"""What a person has to say about a reproduction, with the numbers filled in.

Notes name a number instead of stating it, so that it cannot be another one than in the table below:

- ``{{weight-global | UPGD}}`` is the mean of a panel's curve, ``{{weight-global | UPGD | last quarter}}`` that of its last
  quarter (or ``first quarter``);
- ``{{weight-global | UPGD | lr 0.01}}`` is what the search found next to the chosen setting, with this hyperparameter alone
  changed.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from upgd.experiments.paper.reproduce import Reproduction

__all__ = ["filled"]

Found = TypeVar("Found")

_NAMED = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


def filled(text: str, found: Reproduction) -> str:
    """The text with numbers instead of their names.

    Raises:
        ValueError: a name is not that of a number.
    """
    return _NAMED.sub(lambda match: _number(match.group(1), found), text)


def _number(name: str, found: Reproduction) -> str:
    panel, curve, which = ([part.strip() for part in name.split("|")] + ["", ""])[:3]
    panels = {one.key: one for one in found.plan.panels}
    rows = dict(found.rows(_of(panels, panel, "panel", name)))
    row = _of(rows, curve, "curve", name)
    numbers = {"": row.mean, "first quarter": row.first_quarter, "last quarter": row.last_quarter}
    if which not in numbers:
        (best,) = [one.best for arm, one in found.findings.items() if arm in panels[panel].arms and arm.name == curve]
        numbers |= {f"{key} {value:g}": score for key, own in best.neighbours.items() for value, score in _plain(own)}
    return f"{_of(numbers, which, 'number', name):.4f}"


def _plain(scores: Mapping[object, float]) -> list[tuple[float, float]]:
    return [(value, score) for value, score in scores.items() if isinstance(value, int | float)]


def _of(known: Mapping[str, Found], wanted: str, what: str, name: str) -> Found:
    if wanted not in known:
        raise ValueError(
            f"the notes ask for {{{{{name}}}}}, but there is no {what} {wanted!r}; there is {', '.join(filter(None, known))}"
        )
    return known[wanted]
