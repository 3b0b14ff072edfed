"""The update rules, over all parameter tensors of a learner."""

import math
from typing import Any

import numpy as np

from upgd.kernels.machine import Floats, Integers, compiled, skip
from upgd.population.kernel.layers import Noise, Tensor, adamw, descend, protect, trace, trace_norms
from upgd.population.kernel.layout import Memory, Recipe, Scratch, layer_at

__all__ = ["adamw_step", "feature_gates", "unit_wise_step", "weight_wise_step"]

_f: Any = np.float32
#: Lower bounds of the scale of an unbiased utility, global and local; see :func:`upgd.rules.local_scale`.
_TINY = float(np.finfo(np.float32).tiny)
_TINY_NORM = math.sqrt(_TINY)


@compiled
def _tensor(plan: Integers, slopes: Floats, number: int, scratch: Scratch) -> Tensor:
    """Return parameter tensor ``number``: weights of layer 0, biases of layer 0, weights of layer 1, …; no rows if absent."""
    layer = layer_at(plan, slopes, number // 2)
    rows, columns, ones = layer.rows, layer.columns, scratch.ones
    d, s = skip(scratch.d, layer.outputs), skip(scratch.s, layer.outputs)
    if layer.kernel:
        d = skip(scratch.workspace, layer.filters)
        s = skip(d, rows * (columns + 1))
        if number % 2 == 0:
            return Tensor(rows, columns, layer.weight, layer.row, columns, d, s, ones, ones)
        d, s = skip(d, rows * columns), skip(s, rows * columns)
    if number % 2 == 0:
        h, h2 = skip(scratch.h, layer.inputs), skip(scratch.h2, layer.inputs)
        return Tensor(rows, columns, layer.weight, layer.row, 0, h, h2, d, s)
    return Tensor(1 if layer.bias >= 0 else 0, rows, layer.bias, layer.row + rows, 0, d, s, ones, ones)


@compiled
def _inverse(scale: float, smallest: float) -> float:
    """Return 1/scale, with a lower bound of the scale."""
    return _f(min(1 / max(np.float64(scale), smallest), 3e38))


@compiled
def weight_wise_step(
    plan: Integers,
    slopes: Floats,
    memory: Memory,
    recipe: Recipe,
    step: int,
    rows: int,
    noise: Noise,
    look_ahead: bool,
    scratch: Scratch,
) -> None:
    tensors = 2 * len(plan)
    unbias = 1 - recipe.beta**step
    beta, first_order = _f(recipe.beta), _f(1 - recipe.beta)
    second_order = _f(0.5 * (1 - recipe.beta)) if recipe.second_order else _f(0)
    if recipe.second_order:
        for i in range(plan[-1, 6]):
            scratch.h2[i] = scratch.h[i] * scratch.h[i]
    top = _f(-np.inf)
    for number in range(tensors):
        tensor = _tensor(plan, slopes, number, scratch)
        if recipe.local:
            trace_norms(tensor, memory.parameters, memory.trace, beta, first_order, second_order, memory.largest)
        elif tensor.rows:
            high = trace(
                tensor, memory.parameters, memory.trace, beta, first_order, second_order,
                scratch.idle, memory.largest, memory.smallest,
            )  # fmt: skip
            top = max(top, high if np.isfinite(high) else _f(0))
    for i in range(rows):
        if recipe.local:
            scratch.inverse[i] = _inverse(memory.largest[i], _TINY_NORM * unbias)
        else:
            scratch.inverse[i] = _inverse(top, _TINY * unbias)

    decay = _f(recipe.lr * recipe.weight_decay)
    gradient, search = (_f(recipe.lr * recipe.c), _f(recipe.p)), (_f(recipe.lr * recipe.sigma), _f(recipe.q))
    for number in range(tensors - 1, -1, -1):
        protect(
            _tensor(plan, slopes, number, scratch), memory.parameters, memory.trace, beta, decay, gradient, search,
            scratch.idle, memory.smallest, scratch.inverse, noise,
            scratch.next_x, scratch.first_dot, look_ahead and number == 0,
        )  # fmt: skip


@compiled
def feature_gates(plan: Integers, slopes: Floats, memory: Memory, recipe: Recipe, step: int, scratch: Scratch) -> None:
    """Compute the utility of every hidden unit and its gate."""
    unbias = 1 - recipe.beta**step
    beta, first_order = _f(recipe.beta), _f(1 - recipe.beta)
    second_order = _f(0.5 * (1 - recipe.beta)) if recipe.second_order else _f(0)
    top = _f(-np.inf)
    for at in range(len(plan) - 1):
        layer = layer_at(plan, slopes, at)
        high, total = _f(-np.inf), 0.0
        for i in range(layer.rows):
            instant = _f(0)
            for p in range(layer.outputs + i * layer.positions, layer.outputs + (i + 1) * layer.positions):
                h = scratch.h[p]
                instant += (second_order * scratch.curvature[p] * h - first_order * scratch.gradient[p]) * h
            u = beta * memory.features[layer.outputs + i] + instant
            memory.features[layer.outputs + i] = u
            high = max(high, u)
            total += np.float64(u) * np.float64(u)
        top = max(top, high if np.isfinite(high) else _f(0))
        scratch.inverse[at] = _inverse(math.sqrt(total), _TINY_NORM * unbias)
    for at in range(len(plan) - 1):
        layer = layer_at(plan, slopes, at)
        scale = np.float64(scratch.inverse[at] if recipe.local else _inverse(top, _TINY * unbias))
        for i in range(layer.outputs, layer.outputs + layer.rows):
            scratch.gate[i] = _f(1 / (1 + math.exp(-np.float64(memory.features[i]) * scale)))


@compiled
def unit_wise_step(
    plan: Integers,
    slopes: Floats,
    memory: Memory,
    recipe: Recipe,
    noise: Noise,
    look_ahead: bool,
    scratch: Scratch,
) -> None:
    """The plain and the feature-wise rule: all incoming parameters of a unit have the same factors."""
    last = len(plan) - 1
    decay = _f(recipe.lr * recipe.weight_decay)
    silence = Noise(0, noise.keys, noise.before, noise.buffer, noise.spare)
    for at in range(last, -1, -1):
        layer = layer_at(plan, slopes, at)
        bare = recipe.feature_wise and at == last  # plain gradient descent without gate and noise
        gated = recipe.feature_wise and not bare
        for i in range(layer.rows):
            gate = scratch.gate[layer.outputs + i] if gated else _f(0)
            rate = _f(recipe.lr if bare else recipe.lr * recipe.c)
            delta = _f(1) if layer.kernel else scratch.d[layer.outputs + i]
            scratch.slope[i] = rate * (_f(1) - _f(recipe.p) * gate) * delta
            scratch.scatter[i] = _f(recipe.lr * recipe.sigma) * (_f(1) - _f(recipe.q) * gate)
        of_layer = silence if bare else noise
        weights, bias = _tensor(plan, slopes, 2 * at, scratch), _tensor(plan, slopes, 2 * at + 1, scratch)
        # Each bias is a separate row, so that it can have its own factors; in a Linear layer, they include its delta.
        h, stride = (bias.h, 1) if layer.kernel else (scratch.ones, 0)
        biases = Tensor(bias.rows * bias.columns, 1, bias.begin, 0, stride, h, h, scratch.ones, scratch.ones)
        for tensor in (biases, weights):
            descend(
                tensor, memory.parameters, decay, scratch.slope, scratch.scatter, of_layer,
                scratch.next_x, scratch.first_dot, look_ahead and at == 0 and tensor.begin == layer.weight,
            )  # fmt: skip


@compiled
def adamw_step(
    plan: Integers, slopes: Floats, memory: Memory, recipe: Recipe, step: int, look_ahead: bool, scratch: Scratch
) -> None:
    settings = (
        _f(recipe.beta1), _f(1 - recipe.beta1), _f(recipe.beta2), _f(1 - recipe.beta2),
        _f(1 / math.sqrt(1 - recipe.beta2**step)), _f(recipe.eps),
        _f(recipe.lr / (1 - recipe.beta1**step)), _f(recipe.lr * recipe.weight_decay),
    )  # fmt: skip
    for number in range(2 * len(plan) - 1, -1, -1):
        adamw(
            _tensor(plan, slopes, number, scratch), memory.parameters, memory.trace, memory.second_moment, settings,
            scratch.next_x, scratch.first_dot, look_ahead and number == 0,
        )  # fmt: skip
