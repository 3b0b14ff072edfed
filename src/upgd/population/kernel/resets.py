"""Resets of hidden units: what methods such as Continual Backprop do after the update.

:mod:`upgd.methods.reset_tracing` returns ``reset_units`` as operations on one unit and a few *joins*, which need all units of
a layer. They are printed here as loops over the units of a layer, which decide which units to reset. Few steps reset a unit;
:func:`renew` does so.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from upgd.kernels.machine import Pointer, compiled, skip
from upgd.kernels.normals import fresh_keys, uniform
from upgd.kernels.source import NUMBA, Dialect, indented, lines, merged
from upgd.methods import Method
from upgd.methods.reset_tracing import Join, ResetRule
from upgd.methods.tracing import Node
from upgd.population.kernel.layers import dot
from upgd.population.kernel.layout import Layer

__all__ = ["renew", "select", "source", "space", "step"]

_f: Any = np.float32

#: In resets, truth values are the numbers 0 and 1, because methods also add them.
_RESETS = Dialect(
    {
        **NUMBA.forms,
        **{name: f"_f({NUMBA.forms[name]})" for name in ("lt", "le", "gt", "ge", "eq", "ne")},
        "and": "{0} * {1}",
        "or": "larger({0}, {1})",
        "not": "_f(1) - {0}",
        "where": "{1} if {0} != _f(0) else {2}",
        "floor": "_f(math.floor({0}))",
        "pow": "_f(np.float64({0}) ** np.float64({1}))",
    },
    constant=NUMBA.constant,
    fused=NUMBA.fused,
)

_SOURCE = '''

@compiled
def sum_outgoing(following, w, k, space, size):
    """Sum functions of the outgoing weights of every unit."""
    vectorised()
{scalars}
{sums}
    for i in range({sum_count} * size):
        space[i] = _f(0)
    for row in range(following.rows):
        weights = skip(w, following.weight + row * following.columns)
        for i in range(size):
{add}


@compiled
def reset_units(layer, following, number, w, s, count, k, activation, u, units, space, seed, step):
    """Reset units of a layer; return whether there are any."""
    size, keys = layer.rows, unit_keys(seed, step, number)
{scalars}
{states}
{sums}
{selections}
    ranked = skip(space, {used} * size)
    chosen, moved = skip(ranked, size), skip(ranked, 2 * size)
{sum_up}
{joins}
{of_layer}
    found = False
    for i in range(size):
{decide}
{end}
    if found:
        renew(layer, following, number, chosen, moved, w, s, {weight_states}, count, {copies}, {zeroes}, seed, step)
    return found
'''

_STEP = """    first_reset = False
    for at in range(network.depth - 1):
        layer = layer_at(network, at)
        found = reset_units(
            layer, layer_at(network, at + 1), at, w, s, count, skip(k, {first}), skip(scratch.h, layer.outputs),
            skip(floats_at(job[OWN + 6]), layer.outputs), job[UNITS], floats_at(job[OWN + 7]), job[SEED], job[STEP],
        )
        first_reset = first_reset or (found and at == 0)
    if first_reset and look_ahead:
        first = layer_at(network, 0)
        for i in range(first.rows):
            scratch.first_dot[i] = dot(skip(w, first.weight + i * first.columns), scratch.next_x, first.columns)
"""


def space(rule: ResetRule, units: int) -> int:
    """Return the number of floats that a decision needs, for layers of up to so many units."""
    return (len(rule.outgoing) + len(_selections(rule)) + 3) * units


def step(first: int) -> str:
    """Return the part of a step that resets units; ``first`` is the number of the first scalar that only the resets use."""
    return _STEP.format(first=first)


def source(rule: ResetRule, method: Method) -> str:
    """Return the functions that decide which units to reset."""
    rule = replace(rule, nodes=merged(rule.nodes, "complement"))
    shared = [begins_as == "layer" for begins_as in method.unit_state.values()]
    selections, moves = _selections(rule), rule.moved is not None

    def read(node: Node) -> str:
        kind, *number = node
        if kind == "joined":
            return f"among{number[0]}[i]" if number[0] in selections else f"joined{number[0]}"
        if kind == "unit_state":
            return f"u{number[0]}[{0 if shared[number[0]] else 'i'}]"
        named = {"activation": "activation[i]", "draw": "uniform(i, keys)", "outgoing": "weights[i]"}
        return {"outgoing_sum": "sum{}[i]", "scalar": "k{}"}[kind].format(*number) if number else named[kind]

    def values(*wanted: int | None) -> list[str]:
        return lines(rule, [place for place in wanted if place is not None], read, _RESETS)

    decide = values(rule.chosen, rule.moved, *rule.new_state)
    decide += [f"chosen[i] = v{rule.chosen}", f"moved[i] = v{rule.moved}" if moves else "moved[i] = _f(0)"]
    decide.append("found = found or chosen[i] != _f(0) or moved[i] != _f(0)")
    of_layer = []
    for n, place in enumerate(rule.new_state):
        if not shared[n]:
            value = f"u{n}[i]" if place is None else f"flushed(v{place})"
            decide.append(f"u{n}[i] = _f(0) if chosen[i] != _f(0) else {value}")
        elif place is not None:  # stored after the loop, because all units read it
            of_layer.append(n)
            decide.append(f"of_layer{n} = v{place}")
    return _SOURCE.format(
        scalars=indented([f"k{n} = k[{n}]" for n in range(len(rule.scalars))], 4),
        sums=indented([f"sum{n} = skip(space, {n} * size)" for n in range(len(rule.outgoing))], 4),
        sum_count=len(rule.outgoing),
        add=indented([*values(*rule.outgoing), *(f"sum{n}[i] += v{v}" for n, v in enumerate(rule.outgoing))], 12),
        states=indented([f"u{n} = skip(u, {n} * units)" for n in range(len(shared))], 4),
        selections=indented(
            [f"among{n} = skip(space, {len(rule.outgoing) + i} * size)" for i, n in enumerate(selections)], 4
        ),
        used=len(rule.outgoing) + len(selections),
        sum_up=indented(["sum_outgoing(following, w, k, space, size)"] if rule.outgoing else [], 4),
        joins=indented([line for n, join in enumerate(rule.joins) for line in _joined(n, join, values)], 4),
        of_layer=indented([f"of_layer{n} = u{n}[0]" for n in of_layer], 4),
        decide=indented(decide, 8),
        end=indented([f"u{n}[0] = of_layer{n}" for n in of_layer], 4),
        weight_states=len(method.state),
        copies=sum(1 << n for n, begins_as in enumerate(method.state.values()) if begins_as == "parameter"),
        zeroes=rule.zeroes,
    )


def _selections(rule: ResetRule) -> list[int]:
    """Return the numbers of the joins that select units."""
    return [n for n, join in enumerate(rule.joins) if join.operation == "smallest"]


def _joined(n: int, join: Join, values: Callable[..., list[str]]) -> list[str]:
    """Return code that computes a join."""
    body = values(join.value)
    if join.operation == "smallest":
        each = [*body, f"ranked[i] = v{join.value}"]
        limit = ["i = 0", *values(join.limit), f"select(ranked, v{join.limit}, size, among{n})"]
        return ["for i in range(size):", *(f"    {line}" for line in each), *limit]
    if join.operation == "max":
        start, add, end = "_f(-np.inf)", f"total{n} = larger(total{n}, v{join.value})", f"total{n}"
    else:
        start, add = "0.0", f"total{n} += np.float64(v{join.value})"
        end = f"_f(total{n} / size)" if join.operation == "mean" else f"_f(total{n})"
    loop = ["for i in range(size):", *(f"    {line}" for line in (*body, add))]
    return [f"total{n} = {start}", *loop, f"joined{n} = {end}"]


@compiled
def select(values: Pointer, limit: float, size: int, among: Pointer) -> None:
    """Write 1 for the units of rank below the limit, and 0 for the others. NaN is the largest value, and equal values keep
    their order, as in a stable sort."""
    for i in range(size):
        among[i] = _f(0)
    rank = 0
    while rank < limit and rank < size:
        best = -1
        for i in range(size):
            if among[i] == _f(0):
                less = best < 0 or values[i] < values[best] or (np.isnan(values[best]) and not np.isnan(values[i]))
                best = i if less else best
        among[best] = _f(1)
        rank += 1


@compiled
def renew(
    layer: Layer, following: Layer, number: int, chosen: Pointer, moved: Pointer, w: Pointer, s: Pointer,
    states: int, count: int, copies: int, zeroes: bool, seed: int, step: int,
) -> None:  # fmt: skip
    """Reset the chosen units of a layer: draw new incoming weights, set the bias and the outgoing weights to zero, and reset
    the state of these weights.

    Args:
        layer, following, number: the layer, the next one, and the layer's number.
        chosen: per unit: whether to reset it.
        moved: per unit: the factor of its outgoing weights that is added to the biases of the next layer.
        w, s: the parameters and their state.
        states, count: number of state tensors, and of parameters.
        copies: bit n is set if state n begins as a copy of the parameter instead of zero.
        zeroes: whether to zero the outgoing weights.
        seed, step: of the learner.
    """
    if following.bias >= 0:
        for row in range(following.rows):
            weights = skip(w, following.weight + row * following.columns)
            w[following.bias + row] += dot(weights, moved, following.columns)
    keys, bound = fresh_keys(seed, step, number), _f(1 / np.sqrt(layer.columns))
    for i in range(layer.rows):
        if chosen[i] == _f(0):
            continue
        for j in range(i * layer.columns, (i + 1) * layer.columns):
            at = layer.weight + j
            w[at] = (_f(2) * uniform(j, keys) - _f(1)) * bound
            for n in range(states):
                s[n * count + at] = w[at] if copies >> n & 1 else _f(0)
        if layer.bias >= 0:
            _clear(w, s, states, count, layer.bias + i)
        if zeroes:
            for row in range(following.rows):
                _clear(w, s, states, count, following.weight + row * following.columns + i)


@compiled
def _clear(w: Pointer, s: Pointer, states: int, count: int, at: int) -> None:
    """Set a parameter and its state to zero."""
    w[at] = _f(0)
    for n in range(states):
        s[n * count + at] = _f(0)
