"""One step of an optimizer on a GPU: Triton kernels made from the rule, each of which goes through all tensors of a group.

``prepare`` counts the step and computes what all entries of a tensor share: scalars and the keys of the noise. ``observe``,
for rules with reductions, only reads; ``combine`` and ``conclude`` reduce what it found; ``update`` writes parameters and
state. Nothing waits for the GPU. A table on the device has the addresses of the tensors, so gradients may move; it is
written anew where they did, and within every captured graph, which thereby has addresses of its own.
"""

import functools
import itertools
import re
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upgd.kernels.modules import module_of
from upgd.kernels.polynomials import COSINE, LOGARITHM, SINE
from upgd.kernels.source import TRITON, indented, lines, reached
from upgd.kernels.steps import Part, Reductions, scalars_of, states_of
from upgd.methods.tracing import CannotTrace, Node, Rule
from upgd.noise import MIXERS, Purpose

__all__ = ["CudaStep", "check"]

#: Rows of the table, which has a column for each tensor; then the addresses of the states.
_W, _G, _C, _STEP, _NUMBER, _ENTRIES, _ROWS, _FIRST_BLOCK, _BLOCKS, _FIRST_ROW, _FIRST_STATE = range(11)
#: Entries of a block and warps that share it; the same for rows, which may be shorter or longer.
_BLOCK, _WARPS = 2048, 8
_ROW_BLOCK, _ROW_WARPS = 1024, 4
#: How many numbers one launch of ``write`` puts into a table.
_WRITTEN_AT_ONCE = 64
#: The key of the maximum −inf; see ``observe``.
_NOTHING = -2139095041

_HEAD = '''"""Made by upgd from the rule of a method."""

import triton
import triton.language as tl


@triton.jit
def number_at(table, row: tl.constexpr, T, t):
    return tl.load(table + row * T + t)


@triton.jit
def at(table, row: tl.constexpr, T, t, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * T + t).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        upper_left, upper_right = (left >> 32) & 0xFFFFFFFF, (right >> 32) & 0xFFFFFFFF
        c0, c1, c2, c3 = upper_right ^ c1 ^ k0, right & 0xFFFFFFFF, upper_left ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def normals(keys, j):
    """The entries 2j and 2j + 1 of the noise."""
    k0, k1 = tl.load(keys).to(tl.uint32, bitcast=True), tl.load(keys + 1).to(tl.uint32, bitcast=True)
    k2, k3 = tl.load(keys + 2).to(tl.uint32, bitcast=True), tl.load(keys + 3).to(tl.uint32, bitcast=True)
    x = k0 + j * k1
    s = (x ^ (x >> 16)) * tl.full((), {first}, tl.uint32)
    s = s ^ (s >> 15)
    radius_word = s * tl.full((), {radius}, tl.uint32)
    radius_word = radius_word ^ (radius_word >> 15)
    angle_word = (s ^ (k2 + j * k3)) * tl.full((), {angle}, tl.uint32)
    angle_word = angle_word ^ (angle_word >> 16)
    # The logarithm: the exponent, and a polynomial for a mantissa in [√½, √2).
    bits = ((radius_word >> 1) | 1).to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True) - {root_half_of_2_31}
    exponent = (bits >> 23).to(tl.float32)
    m = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
{logarithm}
    radius = tl.sqrt(tl.maximum(p * m + exponent * -1.3862943611198906, 0.0))
    y = angle_word.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10
    z = y * y
{cosine}
{sine}
    signed = (radius * cosine).to(tl.uint32, bitcast=True) ^ (angle_word << 31)
    return signed.to(tl.float32, bitcast=True), radius * sine * y
'''

_WRITE = '''"""Made by upgd."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["offset", "count"])
def write(out, offset, count, {arguments}):
    """Write numbers that are arguments of the launch, so that a captured graph has them."""
{writes}
'''

_KERNELS = '''

@triton.jit(do_not_specialize=["T", "A", "first"])
def prepare(
    table, T, A, first, h, k, keys, slots, seed, amp, sign, ADVANCE: tl.constexpr, RESET: tl.constexpr, AMP: tl.constexpr
):
    """Count the step, and compute what depends on it."""
    t = tl.program_id(0) + first
    factor = sign
    proceed = 1.0
    if AMP:
        factor = sign / tl.load(amp)
        proceed = tl.where(tl.load(amp + 1) == 0, 1.0, 0.0)
    tl.store(k + t * {width} + {width} - 1, factor)
{steps}
{scalars}
{keys}
    if RESET:
{slots}


@triton.jit(do_not_specialize=["T", "A", "P", "first"])
def observe(
    table, T, A, P, first, tensor_of, k, slots, partial, amp,
    WT: tl.constexpr, GT: tl.constexpr, ALIGNED: tl.constexpr, AMP: tl.constexpr, BLOCK: tl.constexpr,
):
    """What is to be reduced, in one block or row."""
    b = tl.program_id(0) + first
    t = tl.load(tensor_of + b)
    proceed = True
    if AMP:
        proceed = tl.load(amp + 1) == 0
    if proceed:
{pointers}
{shared}
        entries = number_at(table, {entries}, T, t)
{observe}


@triton.jit(do_not_specialize=["T", "A", "P"])
def combine(table, T, A, P, partial, layers, BLOCK: tl.constexpr):
    """From blocks or rows to tensors."""
    t = tl.program_id(0)
    first, count = number_at(table, {first_piece}, T, t), number_at(table, {pieces}, T, t)
    entries = number_at(table, {entries}, T, t).to(tl.float64)
    j = tl.arange(0, BLOCK)
{combine}


@triton.jit(do_not_specialize=["A"])
def conclude(A, entries, slots, layers, learner, BLOCK: tl.constexpr):
    """From tensors to the learner."""
    j = tl.arange(0, BLOCK)
{conclude}


@triton.jit(do_not_specialize=["T", "A", "P"])
def update(
    table, T, A, P, tensor_of, k, keys, partial, layers, learner, amp,
    WT: tl.constexpr, GT: tl.constexpr, ALIGNED: tl.constexpr, AMP: tl.constexpr, BLOCK: tl.constexpr,
):
    """The new parameters and state."""
    b = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last may still be in the cache
    t = tl.load(tensor_of + b)
    proceed = True
    if AMP:
        proceed = tl.load(amp + 1) == 0
    if proceed:
{pointers}
{shared}
        entries = number_at(table, {entries}, T, t)
        o = (b - number_at(table, {first_block}, T, t)) * BLOCK
{noise}
{reduced}
        if o + BLOCK <= entries:
{full}
        else:
            mask = i < entries
{masked}
'''


def source(rule: Rule, noise: int) -> str:
    """The text of a module for a rule; ``noise`` is 0 for none, 1 for white and 2 for anticorrelated noise."""
    first, radius, angle = MIXERS
    head = _HEAD.format(
        first=first,
        radius=radius,
        angle=angle,
        root_half_of_2_31=0x3F3504F3 + (31 << 23),
        logarithm=_polynomial("p", "m", LOGARITHM),
        cosine=_polynomial("cosine", "z", COSINE),
        sine=_polynomial("sine", "z", SINE),
    )
    used = states_of(rule)
    by_unit = any(over == "unit" for _, over in rule.reductions)
    pointers = ["w_, g_ = at(table, 0, T, t, WT, ALIGNED), at(table, 1, T, t, GT, ALIGNED)"]
    if rule.uses("curvature"):
        pointers.append(f"c_ = at(table, {_C}, T, t, tl.float32, ALIGNED)")
    pointers += [f"s{n}_ = at(table, {_FIRST_STATE + i}, T, t, tl.float32, ALIGNED)" for i, n in enumerate(used)]
    width = _width(rule)
    shared = [f"factor = tl.load(k + t * {width} + {width} - 1)"]
    shared += [f"k{n} = tl.load(k + t * {width} + {n})" for n in scalars_of(rule)]
    return head + _KERNELS.format(
        width=width,
        entries=_ENTRIES,
        first_block=_FIRST_BLOCK,
        first_piece=_FIRST_ROW if by_unit else _FIRST_BLOCK,
        pieces=_ROWS if by_unit else _BLOCKS,
        steps=indented(_steps(rule, noise), 4),
        scalars=indented(_scalars(rule), 4),
        keys=indented(_keys(noise, width), 4),
        slots=indented([f"tl.store(slots + {n} * A + t, {_NOTHING})" for n in _atomic(rule)], 8),
        pointers=indented(pointers, 8),
        shared=indented(shared, 8),
        observe=indented(_observe_rows(rule) if by_unit else _observe_blocks(rule), 8),
        combine=indented(_combine(rule), 4),
        conclude=indented(_conclude(rule), 4),
        noise=indented(_noise(noise, width), 8),
        reduced=indented(_reduced(rule), 8),
        full=indented(_update(rule, ""), 12),
        masked=indented(_update(rule, ", mask=mask"), 12),
    )


def _width(rule: Rule) -> int:
    """The numbers that all entries of a tensor share: scalars, whether there was noise before, and the gradient's factor."""
    return len(rule.scalars) + 2


def _atomic(rule: Rule) -> list[int]:
    """The reductions, if blocks can reduce by themselves; none if something has to combine what they found."""
    alone = all(reduction == ("max", "learner") for reduction in rule.reductions)
    return list(range(len(rule.reductions))) if alone else []


def _polynomial(name: str, of: str, coefficients: Sequence[float]) -> str:
    first, *others = coefficients
    return "\n".join([f"    {name} = {first!r}", *(f"    {name} = {name} * {of} + {c!r}" for c in others)])


def _steps(rule: Rule, noise: int) -> list[str]:
    if not counts(rule, noise):
        return []
    return [
        f"step_ = at(table, {_STEP}, T, t, tl.float32, False)",
        "step = tl.load(step_) + proceed",
        "if ADVANCE:",
        "    tl.store(step_, step)",
        "time = step.to(tl.float64)",
    ]


def counts(rule: Rule, noise: int) -> bool:
    """Whether a step depends on its number."""
    return noise > 0 or any(rule.scalars[n].changes for n in scalars_of(rule))


def names_of(rule: Rule) -> list[str]:
    """The settings that the scalars of a rule are made of."""
    keys = " ".join(rule.scalars[n].key for n in scalars_of(rule))
    return sorted(set(re.findall(r"\b[A-Za-z_]\w*\b(?!\()", keys)) - {"t"})


def _scalars(rule: Rule) -> list[str]:
    names = names_of(rule)
    text = [f"h{i} = tl.load(h + {i})" for i in range(len(names))]
    known = {name: _Text(f"h{i}") for i, name in enumerate(names)} | {"t": _Text("time")}
    for n in scalars_of(rule):
        try:
            # The key of a scalar is its expression, in functions of names and numbers.
            expression = eval(rule.scalars[n].key, {"__builtins__": {}}, {**_FUNCTIONS, **known})
        except NameError as unknown:
            raise CannotTrace(f"its rule computes {rule.scalars[n].key}, which kernels do not know") from unknown
        text.append(f"tl.store(k + t * {_width(rule)} + {n}, ({expression}).to(tl.float32))")
    return text


class _Text(str):
    """An expression in the language of Triton."""


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


def _keys(noise: int, width: int) -> list[str]:
    if not noise:
        return []
    text = [
        f"number = number_at(table, {_NUMBER}, T, t)",
        "key = tl.load(seed)",
        "low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF",
        f"tl.store(k + t * {width} + {width} - 2, tl.where(step > 1, 1.0, 0.0))",
    ]
    for n in range(noise):
        text += [
            f"turn = step.to(tl.int64) - {n}",
            f"k0, k1, k2, k3 = philox(number, turn & 0xFFFFFFFF, (turn >> 32) & 0xFFFFFFFF, {int(Purpose.PARAMETER)}, "
            "low, high)",
        ]
        text += [f"tl.store(keys + t * 8 + {4 * n + i}, (k{i} | {i % 2}).to(tl.int32))" for i in range(4)]
    return text


def _noise(noise: int, width: int) -> list[str]:
    if not noise:
        return ["i = o + tl.arange(0, BLOCK)"]
    # Two columns, one for each entry of a pair: so no thread has to hand its normals to another.
    text = [
        "i = o + 2 * tl.arange(0, BLOCK // 2)[:, None] + tl.arange(0, 2)[None, :]",
        "pair = ((o >> 1) + tl.arange(0, BLOCK // 2)).to(tl.uint32)",
        "even, odd = normals(keys + t * 8, pair)",
    ]
    if noise > 1:
        text += [
            f"before = tl.load(k + t * {width} + {width} - 2)",
            "last_even, last_odd = normals(keys + t * 8 + 4, pair)",
            "even, odd = even - before * last_even, odd - before * last_odd",
        ]
    return [*text, "z = tl.join(even, odd)"]


def _loads(rule: Rule, wanted: list[int], mask: str) -> list[str]:
    """Read what the wanted values are made of."""
    other = f"{mask}, other=0.0" if mask else ""
    kinds = [rule.nodes[place] for place in sorted(reached(rule, wanted))]
    text = []
    for kind, *number in kinds:
        if kind == "w":
            text.append(f"w = tl.load(w_ + i{other}).to(tl.float32)")
        elif kind == "g":
            text.append(f"g = tl.load(g_ + i{other}).to(tl.float32) * factor")
        elif kind == "curvature":
            text.append(f"c = tl.load(c_ + i{other}) * factor")
        elif kind == "state":
            text.append(f"s{number[0]} = tl.load(s{number[0]}_ + i{other})")
    return text


def _read(node: Node) -> str:
    inputs = {"w": "w", "g": "g", "curvature": "c", "noise": "z"}
    return inputs.get(node[0]) or {"state": "s{}", "reduced": "r{}", "scalar": "k{}"}[node[0]].format(node[1])


def _update(rule: Rule, mask: str) -> list[str]:
    changed = {n: place for n, place in enumerate(rule.new_state) if place is not None}
    wanted = [rule.new_weight, *changed.values()]
    text = [*_loads(rule, wanted, mask), *lines(rule, wanted, _read, TRITON)]
    text += [f"tl.store(s{n}_ + i, v{place}{mask})" for n, place in changed.items()]
    return [*text, f"tl.store(w_ + i, v{rule.new_weight}.to(WT){mask})"]


def _reduced(rule: Rule) -> list[str]:
    text = []
    for n, (_, over) in enumerate(rule.reductions):
        if over == "learner":
            text.append(f"r{n} = tl.load(learner + {n})")
        elif over == "layer":
            text.append(f"r{n} = tl.load(layers + {n} * A + t).to(tl.float32)")
        else:
            row = f"number_at(table, {_FIRST_ROW}, T, t) + i // (entries // number_at(table, {_ROWS}, T, t))"
            text.append(f"r{n} = tl.load(partial + {n} * P + {row}, mask=i < entries, other=0.0)")
    return text


def _sum_of(operation: str, place: int) -> str:
    """What is added up, or the largest of which is sought; what is no number counts as infinite."""
    if operation == "max":
        return f"tl.where(v{place} == v{place}, v{place}, float('inf'))"
    return f"v{place} * v{place}" if operation == "norm" else f"v{place}"


def _observe_blocks(rule: Rule) -> list[str]:
    if not rule.reductions:
        return []
    wanted = list(rule.observed)
    text = [
        f"o = (b - number_at(table, {_FIRST_BLOCK}, T, t)) * BLOCK",
        "i = o + tl.arange(0, BLOCK)",
        "if o + BLOCK <= entries:",
    ]
    for mask in ("", ", mask=mask"):
        text += ["else:", "    mask = i < entries"] if mask else []
        body = [*_loads(rule, wanted, mask), *lines(rule, wanted, _read, TRITON)]
        for n, ((operation, _), place) in enumerate(zip(rule.reductions, rule.observed, strict=True)):
            value = _sum_of(operation, place)
            if mask:
                value = f"tl.where(mask, {value}, {_neutral(operation)})"
            body.append(f"a{n} = tl.{'max' if operation == 'max' else 'sum'}({value}, 0)")
        text += ["    " + line for line in body]
    for n in range(len(rule.reductions)):
        if n in _atomic(rule):
            # Integers that are in the order of the floats whose bits they have; there is only one zero.
            text += [
                f"bits = tl.where(a{n} == 0, 0.0, a{n}).to(tl.int32, bitcast=True)",
                f"tl.atomic_max(slots + {n} * A + t, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF))",
            ]
        else:
            text.append(f"tl.store(partial + {n} * P + b, a{n})")
    return text


def _neutral(operation: str) -> str:
    return "float('-inf')" if operation == "max" else "0.0"


def _observe_rows(rule: Rule) -> list[str]:
    wanted = list(rule.observed)
    text = [
        f"columns = entries // number_at(table, {_ROWS}, T, t)",
        f"o = (b - number_at(table, {_FIRST_ROW}, T, t)) * columns",
    ]
    numbered = list(enumerate(zip(rule.reductions, rule.observed, strict=True)))
    for n, ((operation, _), _) in numbered:
        text.append(f"e{n} = tl.full([BLOCK], {_neutral(operation)}, tl.float32)")
    text += ["for c in range(0, columns, BLOCK):", "    j = c + tl.arange(0, BLOCK)", "    mask = j < columns"]
    body = ["i = o + j", *_loads(rule, wanted, ", mask=mask"), *lines(rule, wanted, _read, TRITON)]
    for n, ((operation, _), place) in numbered:
        value = f"tl.where(mask, {_sum_of(operation, place)}, {_neutral(operation)})"
        body.append(f"e{n} = tl.maximum(e{n}, {value})" if operation == "max" else f"e{n} += {value}")
    text += ["    " + line for line in body]
    for n, ((operation, over), _) in numbered:
        value = f"tl.{'max' if operation == 'max' else 'sum'}(e{n}, 0)"
        if over == "unit":
            value = {"norm": f"tl.sqrt({value})", "mean": f"{value} / columns"}.get(operation, value)
        text.append(f"tl.store(partial + {n} * P + b, {value})")
    return text


def _combine(rule: Rule) -> list[str]:
    text = []
    for n, (operation, over) in enumerate(rule.reductions):
        if over == "unit" or n in _atomic(rule):
            continue
        add = f"tl.maximum(e{n}, found)" if operation == "max" else f"e{n} + found"
        text += [
            f"e{n} = tl.full([BLOCK], {_neutral(operation)}, tl.float64)",
            "for c in range(0, count, BLOCK):",
            f"    found = tl.load(partial + {n} * P + first + c + j, mask=c + j < count, "
            f"other={_neutral(operation)}).to(tl.float64)",
            f"    e{n} = {add}",
            f"a{n} = tl.{'max' if operation == 'max' else 'sum'}(e{n}, 0)",
        ]
        if over == "layer":
            text += {"norm": [f"a{n} = tl.sqrt(a{n})"], "mean": [f"a{n} = a{n} / entries"]}.get(operation, [])
        text.append(f"tl.store(layers + {n} * A + t, a{n})")
    return text


def _conclude(rule: Rule) -> list[str]:
    text = []
    for n, (operation, over) in enumerate(rule.reductions):
        if over != "learner":
            continue
        text += [f"e{n} = tl.full([BLOCK], {_neutral(operation)}, tl.float64)", "for c in range(0, A, BLOCK):"]
        if n in _atomic(rule):
            text += [
                f"    key = tl.load(slots + {n} * A + c + j, mask=c + j < A, other={_NOTHING})",
                "    found = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True).to(tl.float64)",
            ]
        else:
            text.append(f"    found = tl.load(layers + {n} * A + c + j, mask=c + j < A, other={_neutral(operation)})")
        if operation == "max":  # a tensor with an infinite or undefined maximum does not take part
            text += [
                "    found = tl.where(tl.abs(found) < float('inf'), found, 0.0)",
                f"    e{n} = tl.maximum(e{n}, tl.where(c + j < A, found, float('-inf')))",
                f"a{n} = tl.max(e{n}, 0)",
            ]
        else:
            text += [f"    e{n} += found", f"a{n} = tl.sum(e{n}, 0)"]
            text += {"norm": [f"a{n} = tl.sqrt(a{n})"], "mean": [f"a{n} = a{n} / entries"]}.get(operation, [])
        text.append(f"tl.store(learner + {n}, a{n}.to(tl.float32))")
    return text


@functools.lru_cache(maxsize=256)
def _kernels(rule: Rule, noise: int) -> ModuleType:
    return module_of(source(rule, noise))


@functools.cache
def _kernels_for_writing() -> ModuleType:
    some = range(_WRITTEN_AT_ONCE)
    return module_of(
        _WRITE.format(
            arguments=", ".join(f'v{n}: "i64"' for n in some),
            writes="\n".join(f"    tl.store(out + offset + {n}, v{n}, mask={n} < count)" for n in some),
        )
    )


def check(rule: Rule) -> None:
    """Raise :class:`upgd.methods.tracing.CannotTrace` if no kernels can be made of a rule."""
    if rule.uses("bound"):
        raise CannotTrace("its rule asks for the bound of the initial distribution")
    _scalars(rule)


class CudaStep:
    """Runs the steps of one optimizer on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laid: dict[int, _Laid] = {}
        self._common: _Common | None = None

    def step(
        self,
        parts: Sequence[Part],
        reductions: Reductions,
        seed: int,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        everywhere: Callable[[Tensor], Tensor] | None = None,
        changed: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """See :meth:`upgd.kernels.steps.Engine.step`.

        If all tensors have been observed, ``changed`` lists those, by part and place, that have changed since then.
        """
        common = self._shared_by(parts, reductions, seed)
        amp = common.amp(grad_scale, found_inf)
        starts = _starts([len(part.params) if part.rule.reductions else 0 for part in parts])
        laid = [self._lay(n, part, common, start) for n, (part, start) in enumerate(zip(parts, starts, strict=True))]
        for number, place in changed or ():
            laid[number].observe_again(place)
        for one in laid:
            one.prepare(amp, reset=changed is None)
        observing = [one for one in laid if one.part.rule.reductions]
        if changed is None:
            for one in observing:
                one.observe(amp)
        if observing:
            common.conclude(observing, everywhere)
        for one in laid:
            one.update(amp)

    def observe(self, part: Part, number: int, place: int, grad: Tensor) -> bool:
        """Observe a tensor of a part that has been in a step, with a new gradient; whether that is possible."""
        known = self._laid.get(number)
        if known is None or known.part is not part or _capturing(self._device):
            return False
        known.move(place, grad)
        known.observe_again(place)
        return True

    def _shared_by(self, parts: Sequence[Part], reductions: Reductions, seed: int) -> "_Common":
        tensors = sum(len(part.params) for part in parts if part.rule.reductions)
        entries = sum(param.numel() for part in parts if part.rule.reductions for param in part.params)
        key = tensors, entries, reductions, seed
        if _capturing(self._device):
            return _Common(self._device, *key)
        if self._common is None or self._common.key != key:
            self._common = _Common(self._device, *key)
            self._laid.clear()
        return self._common

    def _lay(self, number: int, part: Part, common: "_Common", start: int) -> "_Laid":
        if _capturing(self._device):
            return _Laid(part, common, start)
        known = self._laid.get(number)
        if known is None or not known.takes(part, start):
            self._laid[number] = _Laid(part, common, start)
        else:
            known.refresh(part)
        return self._laid[number]


class _Common:
    """What all parts of a step share."""

    def __init__(self, device: torch.device, tensors: int, entries: int, reductions: Reductions, seed: int) -> None:
        self.key = tensors, entries, reductions, seed
        self.device, self.tensors, self.entries, self.reductions = device, tensors, entries, reductions
        count = max(1, len(reductions))
        self.slots = torch.empty(count * max(1, tensors), dtype=torch.int32, device=device)
        self.layers = torch.empty(count * max(1, tensors), dtype=torch.float64, device=device)
        self.learner = torch.zeros(count, dtype=torch.float32, device=device)
        self.scaling = torch.ones(2, dtype=torch.float32, device=device)
        self.seed = torch.empty(1, dtype=torch.int64, device=device)
        _send(self.seed, [seed - 2**64 if seed >= 2**63 else seed])

    def amp(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Take over what a gradient scaler says; whether it says anything."""
        for n, given in enumerate((grad_scale, found_inf)):
            if given is not None:
                self.scaling[n].copy_(given.reshape(()))
        if grad_scale is None and found_inf is not None:
            self.scaling[0].fill_(1.0)
        return grad_scale is not None or found_inf is not None

    def conclude(self, observing: "list[_Laid]", everywhere: Callable[[Tensor], Tensor] | None) -> None:
        kernels = observing[0].kernels
        if not _atomic(observing[0].part.rule):
            for one in observing:
                one.combine()
        if any(over == "learner" for _, _, over in self.reductions):
            kernels.conclude[(1,)](self.tensors, float(self.entries), self.slots, self.layers, self.learner, BLOCK=1024)
            if everywhere is not None:
                self.learner.copy_(everywhere(self.learner))


class _Laid:
    """A part of a step, as the kernels want it."""

    def __init__(self, part: Part, common: _Common, start: int) -> None:
        self.part, self.common = part, common
        self.block, self.warps = _BLOCK, _WARPS
        self.offset = start  #: the place of the first tensor among all that are reduced
        self.kernels = _kernels(part.rule, part.noise)
        self.by_unit = any(over == "unit" for _, over in part.rule.reductions)
        self.signature = self._signature(part)
        device, count = common.device, len(part.params)
        sizes = [param.numel() for param in part.params]
        rows = [param.shape[0] if param.ndim > 1 else 1 for param in part.params]
        blocks = [-(-size // self.block) for size in sizes]
        nothing = [0] * count
        self.blocks, self.rows = sum(blocks), sum(rows)
        self.piece_counts = rows if self.by_unit else blocks  #: of each tensor, as ``observe`` goes through them
        self.piece_starts = _starts(self.piece_counts)
        self.pieces = sum(self.piece_counts)
        table = [
            [param.data_ptr() for param in part.params],
            [grad.data_ptr() for grad in part.grads],
            [diagonal.data_ptr() for diagonal in part.curvatures] or nothing,
            [step.data_ptr() for step in part.steps] or nothing,
            part.numbers,
            sizes,
            rows,
            _starts(blocks),
            blocks,
            _starts(rows),
            *([tensor.data_ptr() for tensor in tensors] for tensors in part.states),
        ]
        self.table = torch.empty(len(table), count, dtype=torch.int64, device=device)
        _send(self.table, [number for row in table for number in row])
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        self.tensor_of_block = torch.repeat_interleave(numbers, self.table[_BLOCKS], output_size=self.blocks)
        if self.by_unit:
            self.tensor_of_row = torch.repeat_interleave(numbers, self.table[_ROWS], output_size=self.rows)
        self.names = names_of(part.rule)
        self.h = torch.empty(max(1, len(self.names)), dtype=torch.float64, device=device)
        self.k = torch.empty(count * _width(part.rule), dtype=torch.float32, device=device)
        self.keys = torch.empty(count * 8, dtype=torch.int32, device=device)
        self.partial = torch.empty(max(1, len(part.rule.reductions)) * self.pieces, dtype=torch.float32, device=device)
        self.moving = self._moving(part)
        self.types = self._types()
        self.slots, self.layers = common.slots[self.offset :], common.layers[self.offset :]
        self.values: list[float] | None = None
        self._send_values()

    @staticmethod
    def _signature(part: Part) -> tuple[Any, ...]:
        addresses = tuple(tensor.data_ptr() for tensors in (part.params, *part.states) for tensor in tensors)
        steps = tuple(step.data_ptr() for step in part.steps)
        shapes = tuple(param.shape for param in part.params)
        return addresses, part.rule, part.noise, steps, shapes, tuple(part.numbers), bool(part.curvatures)

    @staticmethod
    def _moving(part: Part) -> list[int]:
        return [tensor.data_ptr() for tensors in (part.grads, part.curvatures) for tensor in tensors]

    def takes(self, part: Part, start: int) -> bool:
        """Whether this is the same part, but for gradients, curvature and settings."""
        return self.offset == start and (part is self.part or self.signature == self._signature(part))

    def refresh(self, part: Part) -> None:
        """Take over gradients, curvature and settings."""
        self.part = part
        moving = self._moving(part)
        if moving != self.moving:
            self.moving = moving
            self.types = self._types()
            _send(self.table[_G : _G + len(moving) // len(part.params)], moving)
        self._send_values()

    def _send_values(self) -> None:
        values = [0.0 if isinstance(v := self.part.values[name], Tensor) else float(v) for name in self.names]
        if values != self.values:
            self.values = values
            _send(
                self.h.view(torch.int64)[: len(values)], [struct.unpack("<q", struct.pack("<d", v))[0] for v in values]
            )
        for i, name in enumerate(self.names):
            if isinstance(value := self.part.values[name], Tensor):
                self.h[i].copy_(value.reshape(()))

    def move(self, place: int, grad: Tensor) -> None:
        """Take over the gradient of one tensor."""
        if self.moving[place] != grad.data_ptr():
            self.moving[place] = grad.data_ptr()
            self.types = self._types()
            _send(self.table[_G, place : place + 1], [grad.data_ptr()])

    def observe_again(self, place: int) -> None:
        """Observe one tensor before the step is counted, whether or not it has been observed before."""
        self.prepare(False, advance=False, only=place)
        self.observe(False, only=place)

    def prepare(self, amp: bool, *, advance: bool = True, reset: bool = True, only: int | None = None) -> None:
        common, count = self.common, len(self.part.params)
        self.kernels.prepare[(count if only is None else 1,)](
            self.table,
            count,
            common.tensors,
            only or 0,
            self.h,
            self.k,
            self.keys,
            self.slots,
            common.seed,
            common.scaling,
            self.part.sign,
            ADVANCE=advance,
            RESET=reset,
            AMP=amp,
            num_warps=1,
        )

    def observe(self, amp: bool, *, only: int | None = None) -> None:
        common, count = self.common, len(self.part.params)
        self.kernels.observe[(self.pieces if only is None else self.piece_counts[only],)](
            self.table,
            count,
            common.tensors,
            self.pieces,
            0 if only is None else self.piece_starts[only],
            self.tensor_of_row if self.by_unit else self.tensor_of_block,
            self.k,
            self.slots,
            self.partial,
            common.scaling,
            **self.types,
            AMP=amp,
            BLOCK=_ROW_BLOCK if self.by_unit else self.block,
            num_warps=_ROW_WARPS if self.by_unit else self.warps,
        )

    def combine(self) -> None:
        common, count = self.common, len(self.part.params)
        self.kernels.combine[(count,)](
            self.table, count, common.tensors, self.pieces, self.partial, self.layers, BLOCK=1024
        )

    def update(self, amp: bool) -> None:
        common, count = self.common, len(self.part.params)
        self.kernels.update[(self.blocks,)](
            self.table,
            count,
            common.tensors,
            self.pieces,
            self.tensor_of_block,
            self.k,
            self.keys,
            self.partial,
            self.layers,
            common.learner,
            common.scaling,
            **self.types,
            AMP=amp,
            BLOCK=self.block,
            num_warps=self.warps,
        )

    def _types(self) -> dict[str, Any]:
        import triton.language as tl

        kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        return {
            "WT": kinds[self.part.params[0].dtype],
            "GT": kinds[self.part.grads[0].dtype],
            "ALIGNED": not any(address % 16 for address in (*self.signature[0], *self.moving)),
        }


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _send(out: Tensor, numbers: list[int]) -> None:
    """Bring numbers to the device without waiting for it."""
    if not _capturing(out.device):
        out.view(-1).copy_(torch.tensor(numbers, dtype=torch.int64), non_blocking=True)
        return
    write = _kernels_for_writing().write
    for start in range(0, len(numbers), _WRITTEN_AT_ONCE):
        some = numbers[start : start + _WRITTEN_AT_ONCE]
        write[(1,)](out, start, len(some), *some, *[0] * (_WRITTEN_AT_ONCE - len(some)), num_warps=1)
