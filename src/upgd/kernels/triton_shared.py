"""Code for the values that all entries of a tensor share: scalars, and the keys of random numbers."""

import re
from collections.abc import Callable
from typing import NamedTuple

from upgd.kernels.source import reached
from upgd.kernels.steps import scalars_of, states_of
from upgd.kernels.triton_text import NUMBER, STEP
from upgd.methods.tracing import CannotTrace, Rule
from upgd.noise import Purpose

__all__ = [
    "Narrow",
    "Slots",
    "Widths",
    "count",
    "early",
    "early_names_of",
    "early_scalars",
    "keys",
    "names_of",
    "scalars",
    "settings",
    "step",
    "widths",
]

#: For each tensor of a rule that is rounded stochastically, the slot of its random numbers; None for others. The
#: first is the parameter, and the states that the rule uses follow.
Slots = tuple[int | None, ...]


class Widths(NamedTuple):
    """The numbers of values per tensor in the buffers of a part."""

    scalars: int
    keys: int
    early: int
    early_keys: int


def widths(narrow: "Narrow") -> Widths:
    """Return the widths of the buffers for a rule."""
    return Widths(
        scalars=len(scalars_of(narrow.rule)) + 1,  # one more: whether there was noise at the previous step
        keys=max(1, narrow.first_key + 2 * len(narrow.slots)),
        early=max(1, len(early_scalars(narrow.rule))),
        early_keys=max(1, 2 * len(narrow.observed)),
    )


class Narrow:
    """A rule, and those of its tensors that are rounded stochastically.

    Args:
        rule: the rule.
        noise: 0 for none, 1 for white and 2 for anticorrelated noise.
        slots: see :data:`Slots`.
        coded: whether narrow states have 8 bits instead of bfloat16; see ``upgd/optim/_narrow.py``.
    """

    def __init__(self, rule: Rule, noise: int, slots: Slots, coded: bool) -> None:
        self.rule, self.noise, self.coded = rule, noise, coded
        self.first_key = 4 * noise
        by_state = dict(zip(states_of(rule), slots[1:], strict=False))
        #: The slots of states, by their numbers.
        self.states = {n: slot for n, slot in by_state.items() if slot is not None}
        #: The slots in the order of their keys.
        self.slots = [slot for slot in slots if slot is not None]
        self.weight = slots[0] if slots else None
        needed = reached(rule, list(rule.observed))
        #: The slots that ``observe`` needs.
        self.observed = [slot for n, slot in self.states.items() if rule.new_state[n] in needed]
        #: Whether a step depends on its number.
        self.counts = noise > 0 or bool(self.slots) or any(rule.scalars[n].changes for n in scalars_of(rule))

    def added(self, text: list[str], keys: str, order: list[int], first: int) -> list[str]:
        """Return assignments in which new states are rounded; the keys of a slot are at its index in ``order``."""
        places = {f"v{self.rule.new_state[n]} = ": (n, slot) for n, slot in self.states.items() if slot in order}
        result = []
        for line in text:
            result.append(line)
            for start, (n, slot) in places.items():
                if line.startswith(start):
                    value, at = start[:-3], f"{keys} + {first + 2 * order.index(slot)}"
                    rounded = f"{value} = rounded({value}, {at}, index)"
                    result.append(
                        f"{value}, code{n}, scale{n} = coded({value}, {at}, index, mask)" if self.coded else rounded
                    )
        return result


def early_scalars(rule: Rule) -> list[int]:
    """Return the numbers of the scalars that ``observe`` needs."""
    nodes = (rule.nodes[place] for place in reached(rule, list(rule.observed)))
    return sorted({node[1] for node in nodes if node[0] == "scalar"})


def step(narrow: Narrow) -> list[str]:
    """Return code that loads the step count."""
    if not narrow.counts:
        return []
    return [f"step_ = at(table, {STEP}, T, t, tl.float64, False)", "step = tl.load(step_)"]


def count(narrow: Narrow) -> list[str]:
    """Return code that counts the step."""
    if not narrow.counts:
        return []
    return ["step = step + proceed", "tl.store(step_, step)", "time = step"]


def names_of(rule: Rule) -> list[str]:
    """Return the settings that the scalars of a rule depend on."""
    return _names(rule, scalars_of(rule))


def early_names_of(rule: Rule) -> list[str]:
    """Return the settings that the scalars for ``observe`` depend on."""
    return _names(rule, early_scalars(rule))


def _names(rule: Rule, scalars: list[int]) -> list[str]:
    keys = " ".join(rule.scalars[n].key for n in scalars)
    return sorted(set(re.findall(r"\b[A-Za-z_]\w*\b(?!\()", keys)) - {"t"})


def settings(rule: Rule) -> list[str]:
    """Return code that loads the settings."""
    text = []
    for i, name in enumerate(names_of(rule)):
        text.append(f"h{i} = tl.load(h + {i})")
        if name == "lr":
            text += ["if LR:", f"    h{i} = tl.load(lr).to(tl.float64)"]
    return text


def scalars(rule: Rule, wanted: list[int], out: str) -> list[str]:
    """Return code that stores scalars."""
    known = {name: _Text(f"h{i}") for i, name in enumerate(names_of(rule))} | {"t": _Text("time")}
    text = []
    for i, n in enumerate(wanted):
        try:
            # The key of a scalar is its expression, with functions of names and numbers.
            expression = eval(rule.scalars[n].key, {"__builtins__": {}}, {**_FUNCTIONS, **known})
        except NameError as unknown:
            raise CannotTrace(f"its rule computes {rule.scalars[n].key}, which kernels do not support") from unknown
        text.append(f"tl.store({out} + {i}, ({expression}).to(tl.float32))")
    return text


class _Text(str):
    """An expression in Triton's language."""


def _written(form: str) -> Callable[..., _Text]:
    return lambda *arguments: _Text(
        "(" + form.format(*(a if isinstance(a, _Text) else repr(a) for a in arguments)) + ")"
    )


_FUNCTIONS = {
    "add": _written("{0} + {1}"),
    "sub": _written("{0} - {1}"),
    "mul": _written("{0} * {1}"),
    "div": _written("{0} / {1}"),
    "neg": _written("-{0}"),
    "pow": _written("tl.exp2({1} * tl.log2({0}))"),
    "sqrt": _written("tl.sqrt({0})"),
    "exp": _written("tl.exp({0})"),
}


def _key(turn: str, purpose: int, out: str, count: int) -> list[str]:
    """Return code that stores the first keys for a purpose at a step; see :func:`upgd.noise.parameter_keys`."""
    return [
        f"turn_ = ({turn}).to(tl.int64)",
        f"k0, k1, k2, k3 = philox(number, turn_ & 0xFFFFFFFF, (turn_ >> 32) & 0xFFFFFFFF, {purpose}, low, high)",
        *(f"tl.store({out} + {i}, (k{i} | {i % 2}).to(tl.int32))" for i in range(count)),
    ]


_SEED = [
    f"number = number_at(table, {NUMBER}, T, t)",
    "key = tl.load(seed)",
    "low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF",
]


def _rounding(slot: int) -> int:
    return int(Purpose.ROUNDING) + (slot << 8)


def keys(narrow: Narrow, width: Widths) -> list[str]:
    """Return code that stores the keys of the random numbers of ``update``."""
    if not narrow.noise and not narrow.slots:
        return []
    text = [*_SEED, f"tl.store(k + t * {width.scalars} + {width.scalars} - 1, tl.where(step > 1, 1.0, 0.0))"]
    for n in range(narrow.noise):
        text += _key(f"step - {n}", int(Purpose.PARAMETER), f"keys + t * {width.keys} + {4 * n}", 4)
    for i, slot in enumerate(narrow.slots):
        text += _key("step", _rounding(slot), f"keys + t * {width.keys} + {narrow.first_key + 2 * i}", 2)
    return text


def early(narrow: Narrow, width: Widths) -> list[str]:
    """Return code that stores what the next ``observe`` needs."""
    rule = narrow.rule
    if not rule.reductions:
        return []
    wanted = early_scalars(rule)
    text = ["half = tl.load(turn)", "if COUNT:", "    half = 1 - half"]
    if narrow.observed or any(rule.scalars[n].changes for n in wanted):
        text += ["time = step + 1"]
    text += scalars(rule, wanted, f"early + (half * T + t) * {width.early}")
    if narrow.observed:
        text += _SEED
    for i, slot in enumerate(narrow.observed):
        text += _key("step + 1", _rounding(slot), f"early_keys + (half * T + t) * {width.early_keys} + {2 * i}", 2)
    return text
