"""One learner's way through a block of samples: forward, judge, backward, update, sample after sample.

Everything that belongs to units (activations, derivatives) lies in vectors over all units: the inputs, then each layer's
outputs. Everything that belongs to parameters lies in vectors over all parameters, in the order of
``network.parameters()``, as the noise counts them; a *row* is a row of a weight matrix, or a whole bias vector.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from upgd.population.kernel.layers import (
    BLOCK,
    Noise,
    Tensor,
    adamw,
    back_through,
    curvature_back_through,
    descend,
    dot,
    protect,
    trace,
    trace_norms,
)
from upgd.population.kernel.machine import (
    BytePointer,
    Bytes,
    Doubles,
    Floats,
    Integers,
    Pointer,
    compiled,
    digest_of_sources,
    kept_on_disk,
    skip,
    start_of,
)
from upgd.population.kernel.normals import step_keys

__all__ = ["ADAMW", "PLAIN", "UTILITY", "Method", "Samples", "advance", "scratch_floats"]

_f: Any = np.float32
_TINY = float(np.finfo(np.float32).tiny)
PLAIN, UTILITY, ADAMW = 0, 1, 2


class Method(NamedTuple):
    """What a learner does: the choices of ``Kind`` as numbers, and its settings."""

    rule: int
    feature_wise: bool
    local: bool
    second_order: bool
    noise: int  #: 0 none, 1 white, 2 anticorrelated
    seed: int
    lr: float
    beta: float
    sigma: float
    weight_decay: float
    c: float
    p: float
    q: float
    beta1: float
    beta2: float
    eps: float


class Samples(NamedTuple):
    """What a learner sees. ``dense`` is empty if ``source`` is not; ``permutation`` may be; one of the targets is."""

    dense: Floats
    source: Bytes
    image: Integers  #: which one of ``source``
    permutation: Integers
    task: Integers
    scaled: Floats  #: what each of the 256 values of a pixel means
    classes: Integers
    values: Floats


class Layer(NamedTuple):
    """Where a layer is. A network is an array of these as numbers, one row per layer."""

    rows: int
    columns: int
    weight: int  #: where its weights begin among the parameters
    bias: int  #: where its biases begin; −1: there are none
    row: int  #: where its rows begin among all rows; the bias, one row, comes last
    inputs: int  #: where its inputs begin among the units
    outputs: int  #: where its outputs begin
    activation: int  #: behind the layer: 0 piecewise linear with the given slope below zero, 1 tanh
    slope: float


class Memory(NamedTuple):
    """What a learner keeps from step to step."""

    parameters: Pointer
    trace: Pointer  #: per parameter: the utility; AdamW's first moment
    second_moment: Pointer  #: per parameter, AdamW's
    features: Pointer  #: per unit: the utility of features
    largest: Pointer  #: per row: the largest utility
    smallest: Pointer  #: … and the smallest


class Scratch(NamedTuple):
    """What a step needs and the next one may overwrite."""

    h: Pointer  #: per unit: activations
    h2: Pointer  #: their squares
    gradient: Pointer  #: of the loss with respect to them
    curvature: Pointer  #: likewise
    d: Pointer  #: gradient of the loss with respect to what enters the activation
    s: Pointer  #: its curvature
    gate: Pointer  #: ū of features
    slope: Pointer
    scatter: Pointer
    next_x: Pointer
    first_dot: Pointer  #: the products of the first layer's rows and the inputs
    inverse: Pointer  #: per row: 1/scale
    one: Pointer
    idle: BytePointer  #: per row
    noise: Pointer
    spare: Pointer


#: How many vectors over units, and over rows, a Scratch has.
_PER_UNIT = 11


def scratch_floats(units: int, rows: int, longest: int) -> int:
    """How many floats :func:`advance` needs to work with."""
    return _PER_UNIT * units + rows + 1 + 2 * (max(longest, BLOCK) + 2)


@compiled
def _scratch(floats: Pointer, bytes_: BytePointer, units: int, rows: int, longest: int) -> Scratch:
    rest = skip(floats, _PER_UNIT * units)
    noise = skip(rest, rows + 1)
    return Scratch(
        floats, skip(floats, units), skip(floats, 2 * units), skip(floats, 3 * units), skip(floats, 4 * units),
        skip(floats, 5 * units), skip(floats, 6 * units), skip(floats, 7 * units), skip(floats, 8 * units),
        skip(floats, 9 * units), skip(floats, 10 * units),
        skip(rest, 1), rest, bytes_, noise, skip(noise, max(longest, BLOCK) + 2),
    )  # fmt: skip


@compiled
def _layer(plan: Integers, slopes: Floats, at: int) -> Layer:
    row = plan[at]
    return Layer(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], slopes[at])


# ------------------------------------------------------------------------------------------------- the sample's way


@compiled
def _load(samples: Samples, at: int, x: Pointer, count: int) -> None:
    if samples.dense.size:
        for j in range(count):
            x[j] = samples.dense[at, j]
        return
    image = samples.image[at]
    if samples.permutation.size:
        task = samples.task[at]
        for j in range(count):
            x[j] = samples.scaled[samples.source[image, samples.permutation[task, j]]]
    else:
        for j in range(count):
            x[j] = samples.scaled[samples.source[image, j]]


@compiled
def _forward(plan: Integers, slopes: Floats, parameters: Pointer, scratch: Scratch) -> None:
    """The activations of all layers; the products with the inputs are known already."""
    for at in range(len(plan)):
        layer = _layer(plan, slopes, at)
        x, out = skip(scratch.h, layer.inputs), skip(scratch.h, layer.outputs)
        for i in range(layer.rows):
            weights = skip(parameters, layer.weight + i * layer.columns)
            a = scratch.first_dot[i] if at == 0 else dot(weights, x, layer.columns)
            if layer.bias >= 0:
                a += parameters[layer.bias + i]
            if layer.activation:
                a = _f(math.tanh(a))
            elif a <= _f(0):
                a *= layer.slope
            out[i] = a


@compiled
def _judge(samples: Samples, at: int, outputs: Pointer, count: int, d: Pointer, s: Pointer) -> tuple[float, bool]:
    """The loss and whether the largest output is the target's; its derivatives go to d and s."""
    if samples.values.size:
        total, each = _f(0), _f(2 / count)
        for i in range(count):
            error = outputs[i] - samples.values[at, i]
            total += error * error
            d[i], s[i] = each * error, each
        return _f(total / _f(count)), False
    best = 0
    for i in range(1, count):
        if outputs[i] > outputs[best]:
            best = i
    total_weight = 0.0
    for i in range(count):
        total_weight += math.exp(np.float64(outputs[i]) - np.float64(outputs[best]))
    for i in range(count):
        q = math.exp(np.float64(outputs[i]) - np.float64(outputs[best])) / total_weight
        d[i], s[i] = _f(q), _f(q - q * q)
    target = samples.classes[at]
    d[target] -= _f(1)
    return _f(math.log(total_weight) + np.float64(outputs[best]) - np.float64(outputs[target])), best == target


@compiled
def _backward(plan: Integers, slopes: Floats, parameters: Pointer, second_order: bool, scratch: Scratch) -> None:
    for at in range(len(plan) - 1, 0, -1):
        layer, below = _layer(plan, slopes, at), _layer(plan, slopes, at - 1)
        weights, units = skip(parameters, layer.weight), layer.inputs
        gradient, curvature = skip(scratch.gradient, units), skip(scratch.curvature, units)
        back_through(weights, layer.rows, layer.columns, skip(scratch.d, layer.outputs), gradient)
        if second_order:
            curvature_back_through(weights, layer.rows, layer.columns, skip(scratch.s, layer.outputs), curvature)
        for i in range(layer.columns):
            h = scratch.h[units + i]
            rise, bend = _f(1), _f(0)  # the activation's first and second derivative
            if below.activation:
                rise = _f(1) - h * h
                bend = _f(-2) * h * rise
            elif h <= _f(0):
                rise = below.slope
            scratch.d[units + i] = rise * gradient[i]
            scratch.s[units + i] = rise * rise * curvature[i] + bend * gradient[i]


# ------------------------------------------------------------------------------------------------------ the updates


@compiled
def _tensor(plan: Integers, slopes: Floats, number: int, scratch: Scratch) -> Tensor:
    """Parameter tensor ``number``: weights of layer 0, biases of layer 0, weights of layer 1, …; no rows if not there."""
    layer = _layer(plan, slopes, number // 2)
    d, s = skip(scratch.d, layer.outputs), skip(scratch.s, layer.outputs)
    if number % 2 == 0:
        h, h2 = skip(scratch.h, layer.inputs), skip(scratch.h2, layer.inputs)
        return Tensor(layer.rows, layer.columns, layer.weight, layer.row, h, h2, d, s)
    rows = 1 if layer.bias >= 0 else 0
    return Tensor(rows, layer.rows, layer.bias, layer.row + layer.rows, d, s, scratch.one, scratch.one)


@compiled
def _inverse(scale: float, unbias: float) -> float:
    """1/scale, where the smallest scale of an unbiased utility is the smallest normal float."""
    return _f(min(1 / max(np.float64(scale), _TINY * unbias), 3e38))


@compiled
def _weight_wise(
    plan: Integers,
    slopes: Floats,
    memory: Memory,
    method: Method,
    step: int,
    rows: int,
    noise: Noise,
    look_ahead: bool,
    scratch: Scratch,
) -> None:
    tensors = 2 * len(plan)
    unbias = 1 - method.beta**step
    beta, first_order = _f(method.beta), _f(1 - method.beta)
    second_order = _f(0.5 * (1 - method.beta)) if method.second_order else _f(0)
    if method.second_order:
        for i in range(plan[-1, 6]):
            scratch.h2[i] = scratch.h[i] * scratch.h[i]
    top = _f(-np.inf)
    for number in range(tensors):
        tensor = _tensor(plan, slopes, number, scratch)
        if method.local:
            trace_norms(tensor, memory.parameters, memory.trace, beta, first_order, second_order, memory.largest)
        elif tensor.rows:
            high = trace(
                tensor, memory.parameters, memory.trace, beta, first_order, second_order,
                scratch.idle, memory.largest, memory.smallest,
            )  # fmt: skip
            top = max(top, high if np.isfinite(high) else _f(0))
    for i in range(rows):
        scratch.inverse[i] = _inverse(memory.largest[i] if method.local else top, unbias)

    decay = _f(1 - method.lr * method.weight_decay)
    gradient, search = (_f(method.lr * method.c), _f(method.p)), (_f(method.lr * method.sigma), _f(method.q))
    for number in range(tensors - 1, -1, -1):
        protect(
            _tensor(plan, slopes, number, scratch), memory.parameters, memory.trace, beta, decay, gradient, search,
            scratch.idle, memory.smallest, scratch.inverse, noise,
            scratch.next_x, scratch.first_dot, look_ahead and number == 0,
        )  # fmt: skip


@compiled
def _feature_gates(plan: Integers, slopes: Floats, memory: Memory, method: Method, step: int, scratch: Scratch) -> None:
    """The utility of every hidden unit and its gate."""
    unbias = 1 - method.beta**step
    beta, first_order = _f(method.beta), _f(1 - method.beta)
    second_order = _f(0.5 * (1 - method.beta)) if method.second_order else _f(0)
    top = _f(-np.inf)
    for at in range(len(plan) - 1):
        layer = _layer(plan, slopes, at)
        high, total = _f(-np.inf), 0.0
        for i in range(layer.outputs, layer.outputs + layer.rows):
            h = scratch.h[i]
            u = (
                beta * memory.features[i]
                + (second_order * scratch.curvature[i] * h - first_order * scratch.gradient[i]) * h
            )
            memory.features[i] = u
            high = max(high, u)
            total += np.float64(u) * np.float64(u)
        top = max(top, high if np.isfinite(high) else _f(0))
        scratch.inverse[at] = _inverse(math.sqrt(total), unbias)
    for at in range(len(plan) - 1):
        layer = _layer(plan, slopes, at)
        scale = np.float64(scratch.inverse[at] if method.local else _inverse(top, unbias))
        for i in range(layer.outputs, layer.outputs + layer.rows):
            scratch.gate[i] = _f(1 / (1 + math.exp(-np.float64(memory.features[i]) * scale)))


@compiled
def _unit_wise(
    plan: Integers,
    slopes: Floats,
    memory: Memory,
    method: Method,
    noise: Noise,
    look_ahead: bool,
    scratch: Scratch,
) -> None:
    """The plain rule and the feature-wise one: all parameters that enter a unit have the same factors."""
    last = len(plan) - 1
    decay = _f(1 - method.lr * method.weight_decay)
    silence = Noise(0, noise.keys, noise.before, noise.buffer, noise.spare)
    for at in range(last, -1, -1):
        layer = _layer(plan, slopes, at)
        bare = method.feature_wise and at == last  # plain gradient descent: no gate and no noise
        gated = method.feature_wise and not bare
        for i in range(layer.rows):
            gate = scratch.gate[layer.outputs + i] if gated else _f(0)
            rate = _f(method.lr if bare else method.lr * method.c)
            scratch.slope[i] = rate * (_f(1) - _f(method.p) * gate) * scratch.d[layer.outputs + i]
            scratch.scatter[i] = _f(method.lr * method.sigma) * (_f(1) - _f(method.q) * gate)
        of_layer = silence if bare else noise
        weights = _tensor(plan, slopes, 2 * at, scratch)
        bias = Tensor(
            layer.rows if layer.bias >= 0 else 0, 1, layer.bias, 0, scratch.one, scratch.one, scratch.one, scratch.one
        )
        for tensor in (bias, weights):
            descend(
                tensor, memory.parameters, decay, scratch.slope, scratch.scatter, of_layer,
                scratch.next_x, scratch.first_dot, look_ahead and at == 0 and tensor.begin == layer.weight,
            )  # fmt: skip


@compiled
def _adamw(
    plan: Integers, slopes: Floats, memory: Memory, method: Method, step: int, look_ahead: bool, scratch: Scratch
) -> None:
    settings = (
        _f(method.beta1), _f(1 - method.beta1), _f(method.beta2), _f(1 - method.beta2),
        _f(1 / math.sqrt(1 - method.beta2**step)), _f(method.eps),
        _f(method.lr / (1 - method.beta1**step)), _f(1 - method.lr * method.weight_decay),
    )  # fmt: skip
    for number in range(2 * len(plan) - 1, -1, -1):
        adamw(
            _tensor(plan, slopes, number, scratch), memory.parameters, memory.trace, memory.second_moment, settings,
            scratch.next_x, scratch.first_dot, look_ahead and number == 0,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- all of it


def _entry(sources: int) -> Any:
    """The function that Python calls. On disk its key knows ``sources``, because that is one of its free variables."""

    def advance(
        plan: Integers,
        slopes: Floats,
        parameters: Floats,
        traces: Floats,
        second_moment: Floats,
        features: Floats,
        extremes: Floats,
        method: Method,
        samples: Samples,
        start: int,
        loss_sum: Doubles,
        correct: Integers,
        floats: Floats,
        bytes_: Bytes,
    ) -> int:
        """Learn from all samples, the first of which is at step ``start`` of the stream.

        Args:
            plan, slopes: the layers, see :class:`Layer`.
            parameters, traces, second_moment, features, extremes: what the learner keeps, see :class:`Memory`; the last,
                ``(2, rows)``, has the largest and smallest utilities.
            method, samples: what the learner does and sees.
            loss_sum, correct: one number each, which is added to.
            floats, bytes_: ``scratch_floats(…)`` zeros, and one byte for each row.

        Returns:
            The step whose loss was not finite, where learning stopped; or −1.
        """
        units, rows = features.size, extremes.shape[1]
        memory = Memory(
            start_of(parameters), start_of(traces), start_of(second_moment), start_of(features),
            start_of(extremes), skip(start_of(extremes), rows),
        )  # fmt: skip
        longest = max(plan[:, 0].max(), plan[:, 1].max())
        scratch = _scratch(start_of(floats), start_of(bytes_), units, rows, longest)
        scratch.one[0] = _f(1)
        first, last = _layer(plan, slopes, 0), _layer(plan, slopes, len(plan) - 1)
        d, s = skip(scratch.d, last.outputs), skip(scratch.s, last.outputs)
        steps = max(samples.classes.shape[0], samples.values.shape[0]) if sources else 0

        _load(samples, 0, scratch.h, first.columns)
        for i in range(first.rows):
            weights = skip(memory.parameters, first.weight + i * first.columns)
            scratch.first_dot[i] = dot(weights, scratch.h, first.columns)
        for at in range(steps):
            _forward(plan, slopes, memory.parameters, scratch)
            loss, right = _judge(samples, at, skip(scratch.h, last.outputs), last.rows, d, s)
            if not np.isfinite(loss):
                return start + at
            loss_sum[0] += loss
            correct[0] += right
            _backward(plan, slopes, memory.parameters, method.second_order, scratch)
            look_ahead = at + 1 < steps
            if look_ahead:
                _load(samples, at + 1, scratch.next_x, first.columns)
            step = start + at + 1
            kind = 1 if step == 1 and method.noise == 2 else method.noise  # ζ₀ = 0
            keys, before = step_keys(method.seed, step), step_keys(method.seed, step - 1)
            noise = Noise(kind, keys, before, scratch.noise, scratch.spare)
            if method.rule == ADAMW:
                _adamw(plan, slopes, memory, method, step, look_ahead, scratch)
            elif method.rule == UTILITY and not method.feature_wise:
                _weight_wise(plan, slopes, memory, method, step, rows, noise, look_ahead, scratch)
            else:
                if method.rule == UTILITY:
                    _feature_gates(plan, slopes, memory, method, step, scratch)
                _unit_wise(plan, slopes, memory, method, noise, look_ahead, scratch)
            for j in range(first.columns):
                scratch.h[j] = scratch.next_x[j]
        return -1

    return kept_on_disk(advance)


advance = _entry(digest_of_sources())
