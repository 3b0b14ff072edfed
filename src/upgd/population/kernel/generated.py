"""Kernels made from a method's rule: the source of a module that takes a learner of that method through its samples.

:mod:`upgd.methods.tracing` gives the rule as operations; here they are printed as the inner loops of two passes over a
parameter tensor. The first pass, for rules with reductions, only reads; the second writes parameters and state. All else
(samples, forward and backward pass, noise) is shared with the kernels written by hand.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upgd.kernels.machine import digest_of_sources
from upgd.kernels.modules import module_of
from upgd.kernels.source import NUMBA, indented, lines
from upgd.methods import Method
from upgd.methods.tracing import CannotTrace, Node, Rule, traced

__all__ = ["module_of", "rule_of", "source", "table", "unsupported"]

_HEAD = '''"""Made by upgd from the rule of the method {name}."""

import math

import numpy as np

from upgd.kernels.functions import exp, flushed, sign, tanh
from upgd.population.kernel.layers import BLOCK, Noise, _make, dot
from upgd.population.kernel.layout import carve, layer_at
from upgd.kernels.machine import (
    compiled, compiled_sum, fused, kept_on_disk, larger, skip, smaller, start_of, vectorised,
)
from upgd.kernels.normals import step_keys
from upgd.population.kernel.sample import backward, forward, judge, load
from upgd.population.kernel.updates import _tensor

_f = np.float32
SOURCES = {sources}
'''

_OBSERVE = '''

@compiled_sum
def observe(tensor, parameters, state, count, k, reduced, rows):
    """What is to be reduced, row by row."""
    vectorised()
{scalars}
    for i in range(tensor.rows):
        at = tensor.begin + i * tensor.columns
        w = skip(parameters, at)
{states}
        h, delta = skip(tensor.h, i * tensor.stride), tensor.d[i]
        h2, bend = skip(tensor.h2, i * tensor.stride), tensor.s[i]
{begin}
        for j in range(tensor.columns):
{body}
{end}


@compiled
def combine(plan, slopes, reduced, rows, scratch):
    """From values of rows to those that the second pass sees."""
{combined}
'''

_UPDATE = '''

@compiled
def update(tensor, parameters, state, count, k, reduced, rows, noise, next_x, next_dot, look_ahead, fan_in):
    """The new parameters and state, and the products with the next sample."""
    vectorised()
    bound = _f(1 / math.sqrt(fan_in))
{scalars}
    columns = tensor.columns
    at_once = max(1, BLOCK // columns)
    for block in range((tensor.rows - 1) // at_once, -1, -1):
        begin, end = block * at_once, min(tensor.rows, (block + 1) * at_once)
        first = tensor.begin + begin * columns
        _make(noise, first, (end - begin) * columns)
        for i in range(begin, end):
            at = tensor.begin + i * columns
            w = skip(parameters, at)
{states}
            h, delta = skip(tensor.h, i * tensor.stride), tensor.d[i]
            h2, bend = skip(tensor.h2, i * tensor.stride), tensor.s[i]
            z = skip(noise.buffer, first % 2 + (i - begin) * columns if noise.kind else 0)
{reduced}
            for j in range(columns):
{body}
            if look_ahead:
                next_dot[i] = dot(w, next_x, columns)
'''

_ADVANCE = """

@kept_on_disk(SOURCES)
def advance(
    plan, slopes, parameters, state, scalars, reduced, units, rows, seed, noise_kind, samples, start, loss_sum, correct,
    floats, bytes_,
):
    count = parameters.size
    w, s, r = start_of(parameters), start_of(state), start_of(reduced)
    longest = max(plan[:, 0].max(), plan[:, 1].max())
    scratch = carve(start_of(floats), start_of(bytes_), units, rows, longest)
    for i in range(rows):
        scratch.ones[i] = _f(1)
    opening, last = layer_at(plan, slopes, 0), layer_at(plan, slopes, len(plan) - 1)
    inputs, dense = opening.outputs, opening.kernel == 0
    d_out, s_out = skip(scratch.d, last.outputs), skip(scratch.s, last.outputs)
    steps = max(samples.classes.shape[0], samples.values.shape[0])
    load(samples, 0, scratch.h, inputs)
    if dense:
        for i in range(opening.rows):
            scratch.first_dot[i] = dot(skip(w, opening.weight + i * opening.columns), scratch.h, opening.columns)
    for at in range(steps):
        forward(plan, slopes, w, scratch)
        loss, right = judge(samples, at, skip(scratch.h, last.outputs), last.rows, d_out, s_out)
        if not np.isfinite(loss):
            return start + at
        loss_sum[0] += loss
        correct[0] += right
        backward(plan, slopes, w, {curvature}, scratch)
        look_ahead = at + 1 < steps and dense
        if at + 1 < steps:
            load(samples, at + 1, scratch.next_x, inputs)
        step = start + at + 1
        kind = 1 if step == 1 and noise_kind == 2 else noise_kind  # there is no noise before the first step
        noise = Noise(kind, step_keys(seed, step), step_keys(seed, step - 1), scratch.noise, scratch.spare)
        k = skip(start_of(scalars), at * scalars.shape[1])
{curvatures}{observing}        for number in range(2 * len(plan) - 1, -1, -1):
            tensor = _tensor(plan, slopes, number, scratch)
            update(
                tensor, w, s, count, k, r, rows, noise, scratch.next_x, scratch.first_dot, look_ahead and number == 0,
                plan[number // 2, 1],
            )
        for j in range(inputs):
            scratch.h[j] = scratch.next_x[j]
    return -1
"""

_CURVATURES = """        for i in range(plan[-1, 6]):
            scratch.h2[i] = scratch.h[i] * scratch.h[i]
"""
_OBSERVING = """        for number in range(2 * len(plan)):
            tensor = _tensor(plan, slopes, number, scratch)
            if tensor.rows:
                observe(tensor, w, s, count, k, r, rows)
        combine(plan, slopes, r, rows, scratch)
"""


def unsupported(method: Method) -> str | None:
    """Why no kernel can be made for a method, to be read after "because"; ``None`` if one can."""
    try:
        rule_of(method)
    except CannotTrace as reason:
        return f"no kernel can be made of {method.name}: {reason}"
    return None


def rule_of(method: Method) -> Rule:
    """The method's rule as operations."""
    return traced(method)


def source(name: str, rule: Rule) -> str:
    """The text of the module."""
    scalars = [f"    k{n} = k[{n}]" for n in range(len(rule.scalars))]
    head = _HEAD.format(name=name, sources=digest_of_sources(Path(__file__).parent))
    observe = _observe(rule, scalars) if rule.reductions else ""
    return head + observe + _update(rule, scalars) + _advance(rule)


def _update(rule: Rule, scalars: list[str]) -> str:
    lines = _lines(rule, [rule.new_weight, *(place for place in rule.new_state if place is not None)])
    lines += [f"s{n}[j] = flushed(v{place})" for n, place in enumerate(rule.new_state) if place is not None]
    lines.append(f"w[j] = v{rule.new_weight}")
    return _UPDATE.format(
        scalars="\n".join(scalars),
        states=indented(_states(rule), 12),
        reduced=indented([f"r{n} = reduced[{n} * rows + tensor.row + i]" for n in range(len(rule.reductions))], 12),
        body=indented(lines, 16),
    )


def _observe(rule: Rule, scalars: list[str]) -> str:
    begins, adds, ends, combined = [], [], [], []
    for n, ((operation, over), place) in enumerate(zip(rule.reductions, rule.observed, strict=True)):
        begins.append(f"a{n} = _f(-np.inf)" if operation == "max" else f"a{n} = _f(0)")
        adds.append(
            {
                "max": f"a{n} = larger(a{n}, v{place})",
                "norm": f"a{n} += v{place} * v{place}",
                "mean": f"a{n} += v{place}",
                "sum": f"a{n} += v{place}",
            }[operation]
        )
        ends.append(f"reduced[{n} * rows + tensor.row + i] = a{n}")
        combined += _combined(n, operation, over)
    return _OBSERVE.format(
        scalars="\n".join(scalars),
        states=indented(_states(rule), 8),
        begin=indented(begins, 8),
        body=indented([*_lines(rule, list(rule.observed)), *adds], 12),
        end=indented(ends, 8),
        combined=indented(combined, 4),
    )


def _advance(rule: Rule) -> str:
    curvature = rule.uses("curvature")
    return _ADVANCE.format(
        curvature=curvature,
        curvatures=_CURVATURES if curvature else "",
        observing=_OBSERVING if rule.reductions else "",
    )


def _combined(n: int, operation: str, over: str) -> list[str]:
    """From one number per row to one per unit, tensor or learner, written back to all of its rows."""
    lines = [f"out = skip(reduced, {n} * rows)", "total, entries = 0.0, 0", "top = _f(-np.inf)"]
    lines += ["for number in range(2 * len(plan)):", "    tensor = _tensor(plan, slopes, number, scratch)"]
    if over in ("unit", "layer"):
        lines += ["    total, entries = 0.0, 0", "    top = _f(-np.inf)"]
    lines += [
        "    high = _f(-np.inf)",
        "    for i in range(tensor.row, tensor.row + tensor.rows):",
    ]
    if over == "unit":
        each = {
            "max": "out[i] = out[i]",
            "norm": "out[i] = _f(math.sqrt(np.float64(out[i])))",
            "mean": "out[i] = _f(np.float64(out[i]) / tensor.columns)",
            "sum": "out[i] = out[i]",
        }[operation]
        return [*lines, f"        {each}"]
    lines += ["        high = max(high, out[i])", "        total += np.float64(out[i])"]
    lines += ["    entries += tensor.rows * tensor.columns"]
    # A tensor with an infinite or undefined maximum does not take part.
    lines += ["    if tensor.rows:", "        top = max(top, high if np.isfinite(high) else _f(0))"]
    value = {
        "max": "top",
        "norm": "_f(math.sqrt(total))",
        "mean": "_f(total / max(1, entries))",
        "sum": "_f(total)",
    }[operation]
    if over == "layer":
        return [*lines, "    for i in range(tensor.row, tensor.row + tensor.rows):", f"        out[i] = {value}"]
    return [*lines, f"value = {value}", "for i in range(rows):", "    out[i] = value"]


def _states(rule: Rule) -> list[str]:
    return [f"s{n} = skip(state, {n} * count + at)" for n in range(len(rule.state))]


def _lines(rule: Rule, wanted: list[int]) -> list[str]:
    return lines(rule, wanted, _read, NUMBA)


def _read(node: Node) -> str:
    """An input, inside the loop over the columns of a row."""
    inputs = {"w": "w[j]", "g": "delta * h[j]", "curvature": "bend * h2[j]", "noise": "z[j]", "bound": "bound"}
    if node[0] in inputs:
        return inputs[node[0]]
    return {"state": "s{}[j]", "reduced": "r{}", "scalar": "k{}"}[node[0]].format(node[1])


def table(rule: Rule, values: dict[str, float], steps: NDArray[np.float64]) -> NDArray[np.float32]:
    """The per-learner numbers of all steps, ``(steps, scalars)``, computed in float64."""
    made = np.empty((len(steps), max(1, len(rule.scalars))), np.float32)
    for n, scalar in enumerate(rule.scalars):
        made[:, n] = scalar.compute({**values, "t": steps})
    return made
