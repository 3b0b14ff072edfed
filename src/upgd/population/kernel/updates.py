"""The update rules, over all parameter tensors of a learner.

The functions with a job become entry points; see :mod:`upgd.population.kernel.layout`.
"""

import math
from typing import Any

import numpy as np

from upgd.kernels.machine import Integers, Pointer, compiled, doubles_at, floats_at, inlined, skip
from upgd.population.kernel.layers import Noise, Tensor, adamw, descend, protect, trace, trace_norms
from upgd.population.kernel.layout import (
    LOOK_AHEAD,
    OWN,
    PARAMETERS,
    ROWS,
    STEP,
    Network,
    Recipe,
    Scratch,
    layer_at,
    network_of,
    noise_of,
    scratch_of,
)

__all__ = ["adamw_step", "unit_wise_step", "weight_wise_step"]

_f: Any = np.float32
#: Lower bounds of the scale of an unbiased utility, global and local; see :func:`upgd.rules.local_scale`.
_TINY = float(np.finfo(np.float32).tiny)
_TINY_NORM = math.sqrt(_TINY)
#: Addresses in the jobs of these rules: of the settings (see :class:`Recipe`), of the utilities per parameter or AdamW's
#: first moments, of the second moments, of the utilities of features, and of the largest and smallest utility of every row.
_RECIPE, _TRACE, _SECOND_MOMENT, _FEATURES, _LARGEST, _SMALLEST = range(OWN, OWN + 6)


@inlined
def _recipe(job: Integers) -> Recipe:
    r = doubles_at(job[_RECIPE])
    return Recipe(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12])


@compiled
def _tensor(network: Network, number: int, scratch: Scratch) -> Tensor:
    """Return parameter tensor ``number``: weights of layer 0, biases of layer 0, weights of layer 1, …; no rows if absent."""
    layer = layer_at(network, number // 2)
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


@inlined
def _higher(top: float, high: float) -> float:
    """Return the larger maximum; one that is infinite or NaN counts as zero."""
    value = high if np.isfinite(high) else _f(0)
    return value if value > top else top


def weight_wise_step(job: Integers) -> None:
    """Weight-wise UPGD and its variants."""
    network, scratch, recipe = network_of(job), scratch_of(job), _recipe(job)
    noise, w, u = noise_of(job, scratch), floats_at(job[PARAMETERS]), floats_at(job[_TRACE])
    largest, smallest = floats_at(job[_LARGEST]), floats_at(job[_SMALLEST])
    tensors = 2 * network.depth
    unbias = 1 - recipe.beta ** job[STEP]
    beta, first_order = _f(recipe.beta), _f(1 - recipe.beta)
    second_order = _f(0.5 * (1 - recipe.beta)) if recipe.second_order else _f(0)
    if recipe.second_order:
        for i in range(layer_at(network, network.depth - 1).outputs):
            scratch.h2[i] = scratch.h[i] * scratch.h[i]
    top = _f(-np.inf)
    for number in range(tensors):
        tensor = _tensor(network, number, scratch)
        if recipe.local:
            trace_norms(tensor, w, u, beta, first_order, second_order, largest)
        elif tensor.rows:
            high = trace(tensor, w, u, beta, first_order, second_order, scratch.idle, largest, smallest)
            top = _higher(top, high)
    for i in range(job[ROWS]):
        if recipe.local:
            scratch.inverse[i] = _inverse(largest[i], _TINY_NORM * unbias)
        else:
            scratch.inverse[i] = _inverse(top, _TINY * unbias)

    decay = _f(recipe.lr * recipe.weight_decay)
    gradient, search = (_f(recipe.lr * recipe.c), _f(recipe.p)), (_f(recipe.lr * recipe.sigma), _f(recipe.q))
    for number in range(tensors - 1, -1, -1):
        protect(
            _tensor(network, number, scratch), w, u, beta, decay, gradient, search,
            scratch.idle, smallest, scratch.inverse, noise,
            scratch.next_x, scratch.first_dot, job[LOOK_AHEAD] and number == 0,
        )  # fmt: skip


@compiled
def _feature_gates(network: Network, utility: Pointer, recipe: Recipe, step: int, scratch: Scratch) -> None:
    """Compute the utility of every hidden unit and its gate."""
    unbias = 1 - recipe.beta**step
    beta, first_order = _f(recipe.beta), _f(1 - recipe.beta)
    second_order = _f(0.5 * (1 - recipe.beta)) if recipe.second_order else _f(0)
    top = _f(-np.inf)
    for at in range(network.depth - 1):
        layer = layer_at(network, at)
        high, total = _f(-np.inf), 0.0
        for i in range(layer.rows):
            instant = _f(0)
            for p in range(layer.outputs + i * layer.positions, layer.outputs + (i + 1) * layer.positions):
                h = scratch.h[p]
                instant += (second_order * scratch.curvature[p] * h - first_order * scratch.gradient[p]) * h
            u = beta * utility[layer.outputs + i] + instant
            utility[layer.outputs + i] = u
            high = u if u > high else high
            total += np.float64(u) * np.float64(u)
        top = _higher(top, high)
        scratch.inverse[at] = _inverse(math.sqrt(total), _TINY_NORM * unbias)
    for at in range(network.depth - 1):
        layer = layer_at(network, at)
        scale = np.float64(scratch.inverse[at] if recipe.local else _inverse(top, _TINY * unbias))
        for i in range(layer.outputs, layer.outputs + layer.rows):
            scratch.gate[i] = _f(1 / (1 + math.exp(-np.float64(utility[i]) * scale)))


def unit_wise_step(job: Integers) -> None:
    """The plain and the feature-wise rule: all incoming parameters of a unit have the same factors."""
    network, scratch, recipe = network_of(job), scratch_of(job), _recipe(job)
    noise, feature_wise = noise_of(job, scratch), recipe.feature_wise != 0
    if feature_wise:
        _feature_gates(network, floats_at(job[_FEATURES]), recipe, job[STEP], scratch)
    last = network.depth - 1
    decay = _f(recipe.lr * recipe.weight_decay)
    silence = Noise(0, noise.keys, noise.before, noise.buffer, noise.spare)
    for at in range(last, -1, -1):
        layer = layer_at(network, at)
        bare = feature_wise and at == last  # plain gradient descent without gate and noise
        gated = feature_wise and not bare
        for i in range(layer.rows):
            gate = scratch.gate[layer.outputs + i] if gated else _f(0)
            rate = _f(recipe.lr if bare else recipe.lr * recipe.c)
            delta = _f(1) if layer.kernel else scratch.d[layer.outputs + i]
            scratch.slope[i] = rate * (_f(1) - _f(recipe.p) * gate) * delta
            scratch.scatter[i] = _f(recipe.lr * recipe.sigma) * (_f(1) - _f(recipe.q) * gate)
        of_layer = silence if bare else noise
        weights, bias = _tensor(network, 2 * at, scratch), _tensor(network, 2 * at + 1, scratch)
        # Each bias is a separate row, so that it can have its own factors; in a Linear layer, they include its delta.
        h, stride = (bias.h, 1) if layer.kernel else (scratch.ones, 0)
        biases = Tensor(bias.rows * bias.columns, 1, bias.begin, 0, stride, h, h, scratch.ones, scratch.ones)
        for tensor in (biases, weights):
            descend(
                tensor, floats_at(job[PARAMETERS]), decay, scratch.slope, scratch.scatter, of_layer,
                scratch.next_x, scratch.first_dot, job[LOOK_AHEAD] and at == 0 and tensor.begin == layer.weight,
            )  # fmt: skip


def adamw_step(job: Integers) -> None:
    """AdamW."""
    network, scratch, recipe, step = network_of(job), scratch_of(job), _recipe(job), job[STEP]
    settings = (
        _f(recipe.beta1), _f(1 - recipe.beta1), _f(recipe.beta2), _f(1 - recipe.beta2),
        _f(1 / math.sqrt(1 - recipe.beta2**step)), _f(recipe.eps),
        _f(recipe.lr / (1 - recipe.beta1**step)), _f(recipe.lr * recipe.weight_decay),
    )  # fmt: skip
    w, m, v = floats_at(job[PARAMETERS]), floats_at(job[_TRACE]), floats_at(job[_SECOND_MOMENT])
    for number in range(2 * network.depth - 1, -1, -1):
        adamw(
            _tensor(network, number, scratch), w, m, v, settings,
            scratch.next_x, scratch.first_dot, job[LOOK_AHEAD] and number == 0,
        )  # fmt: skip
