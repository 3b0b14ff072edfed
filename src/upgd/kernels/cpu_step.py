"""One step of an optimizer on the CPU: two passes over all its parameters, in loops that numba compiles from the rule.

The first pass, for rules with reductions, only reads; the second writes parameters and state. Both go through *blocks*, each
a piece of one tensor, which threads share evenly. Where a rule asks for reductions over units, a block is a unit.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.kernels.machine import digest_of_sources
from upgd.kernels.modules import module_of
from upgd.kernels.source import NUMBA, indented, lines
from upgd.kernels.steps import Part, Reductions, scalars_of, states_of
from upgd.methods.tracing import Node, Rule

__all__ = ["CpuStep"]

#: What the table says of a tensor: addresses of parameter, gradient, curvature; place among all parameters, step; then
#: addresses of the states.
_W, _G, _C, _NUMBER, _STEP, _FIRST_STATE = range(6)
#: Entries of a block, and of the piece of it whose noise is made at once.
_BLOCK, _CHUNK = 1 << 15, 1 << 12
#: What one thread does alone: less than the others would take to wake up.
_ALONE = 1 << 16

_TEXT = '''"""Made by upgd from the rule of a method."""

import math

import numpy as np

from upgd.kernels.functions import exp, flushed, sign, tanh
from upgd.kernels.machine import (
    compiled, compiled_sum, floats_at, fused, kept_on_disk, larger, skip, smaller, start_of, vectorised,
)
from upgd.kernels.normals import fill_normals, parameter_keys

_f = np.float32
SOURCES = {sources}


@compiled_sum
def observe_block(w, g, c, {states}count, k, out):
    """What is to be reduced, in one block."""
    vectorised()
{scalars}
{begin}
    for j in range(count):
{observed}
{end}


@compiled
def update_piece(w, g, c, {states}z, r, count, k):
    """The new parameters and state."""
    vectorised()
{scalars}
{reduced}
    for j in range(count):
{updated}


@compiled
def take_away(z, previous, count):
    vectorised()
    for j in range(count):
        z[j] -= previous[j]


@kept_on_disk(SOURCES)
def observe(table, blocks, first, last, k, out):
    for b in range(first, last):
        t, begin, count = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        observe_block(
            skip(floats_at(table[t, 0]), begin), skip(floats_at(table[t, 1]), begin),
            skip(floats_at(table[t, 2]), begin), {pointers}
            count, skip(start_of(k), t * k.shape[1]), skip(start_of(out), b * out.shape[1]),
        )


@kept_on_disk(SOURCES)
def update(table, blocks, first, last, k, reduced, seed, noise):
    z, previous = start_of(noise), skip(start_of(noise), {chunk} + 2)
    for b in range(first, last):
        t, whole = blocks[b, 0], blocks[b, 1] + blocks[b, 2]
        step, number = table[t, 4], table[t, 3]
        for begin in range(blocks[b, 1], whole, {chunk}):
            count, odd = min({chunk}, whole - begin), begin % 2
            if {noise} > 0:
                fill_normals(z, begin // 2, (count + odd + 1) // 2, parameter_keys(seed, step, number))
            if {noise} > 1 and step > 1:
                fill_normals(previous, begin // 2, (count + odd + 1) // 2, parameter_keys(seed, step - 1, number))
                take_away(z, previous, count + odd)
            update_piece(
                skip(floats_at(table[t, 0]), begin), skip(floats_at(table[t, 1]), begin),
                skip(floats_at(table[t, 2]), begin), {pointers}
                skip(z, odd), skip(start_of(reduced), b * reduced.shape[1]), count,
                skip(start_of(k), t * k.shape[1]),
            )
'''


def source(rule: Rule, noise: int) -> str:
    """The text of a module for a rule; ``noise`` is 0 for none, 1 for white and 2 for anticorrelated noise."""
    used = states_of(rule)
    begin, adds, end = [], [], []
    for n, ((operation, _), place) in enumerate(zip(rule.reductions, rule.observed, strict=True)):
        begin.append(f"a{n} = _f(-np.inf)" if operation == "max" else f"a{n} = _f(0)")
        if operation == "max":
            # The maximum is only that of numbers; what is none is counted.
            begin.append(f"b{n} = _f(0)")
            adds += [f"a{n} = larger(a{n}, v{place})", f"b{n} += _f(0) if v{place} == v{place} else _f(1)"]
            end.append(f"out[{n}] = a{n} if b{n} == 0 else _f(np.nan)")
        else:
            adds.append(f"a{n} += v{place} * v{place}" if operation == "norm" else f"a{n} += v{place}")
            end.append(f"out[{n}] = a{n}")
    changed = {n: new for n, new in enumerate(rule.new_state) if new is not None}
    updated = lines(rule, [rule.new_weight, *changed.values()], _read, NUMBA)
    updated += [f"s{n}[j] = flushed(v{new})" for n, new in changed.items()]
    scalars = [f"k{n} = k[{n}]" for n in scalars_of(rule)]
    return _TEXT.format(
        sources=digest_of_sources(),
        states="".join(f"s{n}, " for n in used),
        pointers=" ".join(f"skip(floats_at(table[t, {_FIRST_STATE + i}]), begin)," for i in range(len(used))),
        scalars=indented([*scalars, f"factor = k[{len(rule.scalars)}]"], 4),
        begin=indented(begin, 4),
        observed=indented([*lines(rule, list(rule.observed), _read, NUMBA), *adds], 8),
        end=indented(end, 4),
        reduced=indented([f"r{n} = r[{n}]" for n in range(len(rule.reductions))], 4),
        updated=indented([*updated, f"w[j] = v{rule.new_weight}"], 8),
        noise=noise,
        chunk=_CHUNK,
    )


def _read(node: Node) -> str:
    inputs = {"w": "w[j]", "g": "g[j] * factor", "curvature": "c[j] * factor", "noise": "z[j]"}
    if node[0] in inputs:
        return inputs[node[0]]
    return {"state": "s{}[j]", "reduced": "r{}", "scalar": "k{}"}[node[0]].format(node[1])


class CpuStep:
    """Runs the steps of one optimizer."""

    def step(
        self,
        parts: Sequence[Part],
        reductions: Reductions,
        seed: int,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        everywhere: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """See :meth:`upgd.kernels.steps.Engine.step`."""
        if found_inf is not None and float(found_inf) > 0:
            return
        scale = 1.0 if grad_scale is None else 1 / float(grad_scale)
        laid = [_Laid(part, reductions, scale) for part in parts]
        for one in laid:
            one.observe()
        _reduce(laid, reductions, everywhere)
        for one in laid:
            one.update(seed)


class _Laid:
    """A part of a step, as the kernels want it."""

    def __init__(self, part: Part, reductions: Reductions, scale: float) -> None:
        self.part = part
        self.kernels = _kernels(part.rule, part.noise)
        by_unit = any(over == "unit" for _, _, over in reductions)
        self.shapes = tuple((param.numel(), param.shape[0] if param.ndim > 1 else 1) for param in part.params)
        self.blocks, self.first = _blocks(self.shapes, by_unit)
        count = len(part.params)
        table = np.zeros((count, _FIRST_STATE + len(part.states)), np.int64)
        table[:, _W] = [param.data_ptr() for param in part.params]
        table[:, _G] = [grad.data_ptr() for grad in part.grads]
        table[:, _C] = [diagonal.data_ptr() for diagonal in part.curvatures] or table[:, _W]
        table[:, _NUMBER] = part.numbers
        for i, tensors in enumerate(part.states):
            table[:, _FIRST_STATE + i] = [tensor.data_ptr() for tensor in tensors]
        for step in part.steps:
            step += 1
        steps = [int(step.item()) for step in part.steps] or [0] * count
        table[:, _STEP] = steps
        self.table, self.k = table, _scalars(part, steps, part.sign * scale)
        self.out = np.zeros((len(self.blocks), max(1, len(part.rule.reductions))), np.float32)
        self.reduced = np.zeros_like(self.out)

    def observe(self) -> None:
        if self.part.rule.reductions:
            _shared(self.blocks, lambda a, b: self.kernels.observe(self.table, self.blocks, a, b, self.k, self.out))

    def update(self, seed: int) -> None:
        def some(first: int, last: int) -> None:
            noise = np.empty(2 * (_CHUNK + 2), np.float32)
            self.kernels.update(self.table, self.blocks, first, last, self.k, self.reduced, seed, noise)

        _shared(self.blocks, some)


@functools.lru_cache(maxsize=256)
def _kernels(rule: Rule, noise: int) -> ModuleType:
    return module_of(source(rule, noise))


@functools.lru_cache(maxsize=64)
def _blocks(shapes: tuple[tuple[int, int], ...], by_unit: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each block its tensor, first entry and number of entries; and the first block of each tensor."""
    made: list[tuple[int, int, int]] = []
    first = []
    for number, (entries, rows) in enumerate(shapes):
        first.append(len(made))
        size = entries // rows if by_unit else _BLOCK
        made += [(number, begin, min(size, entries - begin)) for begin in range(0, entries, size)]
    return np.array(made, np.int64).reshape(-1, 3), np.array(first, np.int64)


def _scalars(part: Part, steps: list[int], factor: float) -> NDArray[np.float32]:
    """For each tensor the numbers that the rule is computed with, and what gradients are multiplied by."""
    rule = part.rule
    k = np.zeros((len(steps), len(rule.scalars) + 1), np.float32)
    values = {name: float(value) for name, value in part.values.items()}
    rows: dict[int, list[float]] = {}
    used = set(scalars_of(rule))
    for t, step in enumerate(steps):
        if step not in rows:
            known = {**values, "t": float(step)}
            rows[step] = [float(scalar.compute(known)) if n in used else 0.0 for n, scalar in enumerate(rule.scalars)]
        k[t, :-1] = rows[step]
    k[:, -1] = factor
    return k


def _reduce(laid: list[_Laid], reductions: Reductions, everywhere: Callable[[Tensor], Tensor] | None) -> None:
    """From the numbers of blocks to those that the second pass sees."""
    laid = [one for one in laid if one.part.rule.reductions]
    for n, (_, operation, over) in enumerate(reductions):
        per_tensor = []
        for one in laid:
            found = one.out[:, n].astype(np.float64)
            entries = np.array([entries for entries, _ in one.shapes])
            if over == "unit":
                one.reduced[:, n] = _finished(operation, found, one.blocks[:, 2])
                continue
            combined = (np.maximum if operation == "max" else np.add).reduceat(found, one.first)
            if over == "layer":
                one.reduced[:, n] = _finished(operation, combined, entries)[one.blocks[:, 0]]
            elif operation == "max":  # a tensor with an infinite or undefined maximum does not take part
                per_tensor += [(value if np.isfinite(value) else 0.0, 1) for value in combined]
            else:
                per_tensor += list(zip(combined, entries, strict=True))
        if over == "learner" and per_tensor:
            values, counts = (np.array(column) for column in zip(*per_tensor, strict=True))
            overall = values.max() if operation == "max" else values.sum()
            if everywhere is not None:
                overall = everywhere(torch.tensor(overall)).item()
            for one in laid:
                one.reduced[:, n] = _finished(operation, overall, counts.sum())


def _finished(operation: str, value: Any, entries: Any) -> Any:
    """A norm from a sum of squares, a mean from a sum."""
    if operation == "norm":
        return np.sqrt(value)
    return value / entries if operation == "mean" else value


# --------------------------------------------------------------------------------------------------------------- threads

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _shared(blocks: NDArray[np.int64], work: Callable[[int, int], None]) -> None:
    """Share a range of blocks among as many threads as torch uses; this one takes part."""
    threads = torch.get_num_threads()
    ends = np.cumsum(blocks[:, 2])
    if threads == 1 or ends[-1] <= _ALONE:
        work(0, len(blocks))
        return
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads, side="right")
    ranges = list(zip([0, *cuts], [*cuts, len(blocks)], strict=True))
    key = os.getpid(), threads  # threads do not survive a fork
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="upgd-step")
    waiting = [_pools[key].submit(work, int(first), int(last)) for first, last in ranges[1:]]
    work(0, int(ranges[0][1]))
    for one in waiting:
        one.result()
