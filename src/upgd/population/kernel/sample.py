"""Derivatives for a sample: forward pass, loss and backward pass."""

import math
from typing import Any

import numpy as np

from upgd.kernels.machine import Floats, Integers, Pointer, compiled, fused, skip, start_of, vectorised
from upgd.population.kernel.convolution import (
    add_patches,
    convolve,
    patch_products,
    patch_square_products,
    pool,
    square_weighted_sums,
    to_patches,
    total,
    unpool,
    weighted_sums,
)
from upgd.population.kernel.layers import back_through, curvature_back_through, dot
from upgd.population.kernel.layout import Layer, Learning, Samples, Scratch, layer_at

__all__ = ["backward", "forward", "judge", "load", "normalize"]

_f: Any = np.float32


@compiled
def load(samples: Samples, at: int, x: Pointer, count: int) -> None:
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
def normalize(learning: Learning, step: int, x: Pointer, count: int) -> None:
    """Normalize a sample in place, if the learner does; see :mod:`upgd.normalization`."""
    if learning.normalizer.size:
        mean = start_of(learning.normalizer)
        _normalize(x, mean, skip(mean, count), count, min(learning.rate, (step - 1) / step))


@compiled
def _normalize(x: Pointer, mean: Pointer, variance: Pointer, count: int, decay: float) -> None:
    vectorised()
    old, new = _f(decay), _f(1 - decay)
    for j in range(count):
        before = mean[j]
        moved = fused(old, before, new * x[j])
        spread = fused(old, variance[j], new * ((x[j] - before) * (x[j] - moved)))
        mean[j], variance[j] = moved, spread
        z = (x[j] - moved) / _f(math.sqrt(spread + _f(1e-4)))
        x[j] = _f(-5) if z < _f(-5) else (_f(5) if z > _f(5) else z)


@compiled
def _activate(out: Pointer, count: int, bias: float, layer: Layer) -> None:
    """Apply the activation to pre-activations of one bias, in place."""
    vectorised()
    slope = layer.slope
    if layer.activation:
        for i in range(count):
            out[i] = _f(math.tanh(out[i] + bias))
    else:
        for i in range(count):
            a = out[i] + bias
            out[i] = a * slope if a <= _f(0) else a


@compiled
def _back_through_activation(
    layer: Layer, second_order: bool, h: Pointer, gradient: Pointer, curvature: Pointer, d: Pointer, s: Pointer
) -> None:
    """Compute derivatives with respect to pre-activations from those with respect to activations."""
    vectorised()
    count, slope = layer.rows * layer.positions, layer.slope
    if layer.activation:
        for i in range(count):
            d[i] = (_f(1) - h[i] * h[i]) * gradient[i]
    else:
        for i in range(count):
            d[i] = (slope if h[i] <= _f(0) else _f(1)) * gradient[i]
    if second_order:
        for i in range(count):
            rise, bend = _f(1), _f(0)  # the activation's first and second derivative
            if layer.activation:
                rise = _f(1) - h[i] * h[i]
                bend = _f(-2) * h[i] * rise
            elif h[i] <= _f(0):
                rise = slope
            s[i] = rise * rise * curvature[i] + bend * gradient[i]


@compiled
def forward(plan: Integers, slopes: Floats, parameters: Pointer, scratch: Scratch) -> None:
    """Compute the activations of all layers; the products of a first Linear layer with the inputs are already known."""
    for at in range(len(plan)):
        layer = layer_at(plan, slopes, at)
        x, out = skip(scratch.h, layer.inputs), skip(scratch.h, layer.outputs)
        weights, positions = skip(parameters, layer.weight), layer.positions
        if layer.kernel:
            patches = skip(scratch.workspace, layer.patches)
            to_patches(x, layer.channels, layer.height, layer.width, layer.kernel, patches)
            convolve(weights, layer.rows, layer.columns, patches, positions, out)
        for i in range(layer.rows):
            bias = parameters[layer.bias + i] if layer.bias >= 0 else _f(0)
            if layer.kernel:
                _activate(skip(out, i * positions), positions, bias, layer)
            else:
                a = scratch.first_dot[i] if at == 0 else dot(skip(weights, i * layer.columns), x, layer.columns)
                out[i] = a + bias
        if not layer.kernel:
            _activate(out, layer.rows, _f(0), layer)
        if layer.pool:
            height, width = layer.height - layer.kernel + 1, layer.width - layer.kernel + 1
            pool(out, layer.rows, height, width, layer.pool, skip(out, layer.rows * positions))


@compiled
def judge(samples: Samples, at: int, outputs: Pointer, count: int, d: Pointer, s: Pointer) -> tuple[float, bool]:
    """Return the loss and whether the largest output is the target's; write the derivatives to d and s."""
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
def _back_to_inputs(
    layer: Layer, parameters: Pointer, squared: bool, d: Pointer, out: Pointer, scratch: Scratch
) -> None:
    """Propagate the gradient (``squared``: the curvature) from a layer's pre-activation to its inputs."""
    weights, d, out = skip(parameters, layer.weight), skip(d, layer.outputs), skip(out, layer.inputs)
    if layer.kernel:
        patches = scratch.workspace
        if squared:
            square_weighted_sums(weights, layer.rows, layer.columns, d, layer.positions, patches)
        else:
            weighted_sums(weights, layer.rows, layer.columns, d, layer.positions, patches)
        add_patches(patches, layer.channels, layer.height, layer.width, layer.kernel, out)
    elif squared:
        curvature_back_through(weights, layer.rows, layer.columns, d, out)
    else:
        back_through(weights, layer.rows, layer.columns, d, out)


@compiled
def _back_through_pool(layer: Layer, derivative: Pointer, scratch: Scratch) -> None:
    height, width = layer.height - layer.kernel + 1, layer.width - layer.kernel + 1
    maps, out = skip(scratch.h, layer.outputs), skip(derivative, layer.outputs)
    unpool(skip(out, layer.rows * layer.positions), layer.rows, height, width, layer.pool, maps, out)


@compiled
def backward(plan: Integers, slopes: Floats, parameters: Pointer, second_order: bool, scratch: Scratch) -> None:
    """Compute the derivatives of all units, starting at the outputs, and of filters."""
    for at in range(len(plan) - 1, -1, -1):
        layer = layer_at(plan, slopes, at)
        if at < len(plan) - 1:
            above = layer_at(plan, slopes, at + 1)
            _back_to_inputs(above, parameters, False, scratch.d, scratch.gradient, scratch)
            if second_order:
                _back_to_inputs(above, parameters, True, scratch.s, scratch.curvature, scratch)
            if layer.pool:
                _back_through_pool(layer, scratch.gradient, scratch)
                if second_order:
                    _back_through_pool(layer, scratch.curvature, scratch)
            h, gradient = skip(scratch.h, layer.outputs), skip(scratch.gradient, layer.outputs)
            curvature, d = skip(scratch.curvature, layer.outputs), skip(scratch.d, layer.outputs)
            s = skip(scratch.s, layer.outputs)
            _back_through_activation(layer, second_order, h, gradient, curvature, d, s)
        if layer.kernel:
            _look_at_filters(layer, second_order, scratch)


@compiled
def _look_at_filters(layer: Layer, second_order: bool, scratch: Scratch) -> None:
    """Compute gradient and curvature of a convolution's filters, followed by those of its biases."""
    rows, columns, positions = layer.rows, layer.columns, layer.positions
    d, s = skip(scratch.d, layer.outputs), skip(scratch.s, layer.outputs)
    patches, gradient = skip(scratch.workspace, layer.patches), skip(scratch.workspace, layer.filters)
    curvature = skip(gradient, rows * (columns + 1))
    patch_products(d, rows, positions, patches, columns, gradient)
    if second_order:
        patch_square_products(s, rows, positions, patches, columns, curvature)
    for f in range(rows):
        gradient[rows * columns + f] = total(skip(d, f * positions), positions)
        if second_order:
            curvature[rows * columns + f] = total(skip(s, f * positions), positions)
