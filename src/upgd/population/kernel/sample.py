"""Derivatives for a sample: forward pass, loss and backward pass.

The functions with a job become entry points; see :mod:`upgd.population.kernel.layout`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from upgd.kernels.machine import (
    Integers,
    Pointer,
    bytes_at,
    compiled,
    doubles_at,
    floats_at,
    fused,
    inlined,
    integers_at,
    skip,
    vectorised,
)
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
from upgd.population.kernel.layout import (
    CLASSES,
    DENSE,
    IMAGE,
    NORMALIZER,
    PARAMETERS,
    PERMUTATION,
    RATE,
    SCALED,
    SOURCE,
    START,
    TASK,
    VALUES,
    Layer,
    Scratch,
    layer_at,
    network_of,
    scratch_of,
)

__all__ = ["backward_with", "forward_with", "judge", "load"]

_f: Any = np.float32


@compiled
def load(job: Integers, at: int, x: Pointer, count: int) -> None:
    """Write a sample to x, normalized if the learner does that; see :mod:`upgd.normalization`."""
    if job[DENSE]:
        dense = skip(floats_at(job[DENSE]), at * count)
        for j in range(count):
            x[j] = dense[j]
    else:
        image, scaled = skip(bytes_at(job[SOURCE]), integers_at(job[IMAGE])[at] * count), floats_at(job[SCALED])
        if job[PERMUTATION]:
            order = skip(integers_at(job[PERMUTATION]), integers_at(job[TASK])[at] * count)
            for j in range(count):
                x[j] = scaled[image[order[j]]]
        else:
            for j in range(count):
                x[j] = scaled[image[j]]
    if job[NORMALIZER]:
        mean, step = floats_at(job[NORMALIZER]), job[START] + at + 1
        _normalize(x, mean, skip(mean, count), count, min(doubles_at(job[RATE])[0], (step - 1) / step))


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
def _activate(activation: int, slope: float, count: int, bias: float, out: Pointer) -> None:
    """Apply the activation to pre-activations of one bias, in place."""
    vectorised()
    if activation:
        for i in range(count):
            out[i] = _f(math.tanh(out[i] + bias))
    else:
        for i in range(count):
            a = out[i] + bias
            out[i] = a * slope if a <= _f(0) else a


@inlined
def _back_through_activation(layer: Layer, second_order: bool, scratch: Scratch) -> None:
    """Compute derivatives with respect to pre-activations from those with respect to activations."""
    count, units = layer.rows * layer.positions, layer.outputs
    h, gradient, d = skip(scratch.h, units), skip(scratch.gradient, units), skip(scratch.d, units)
    _gradient_back(layer.activation, layer.slope, count, h, gradient, d)
    if second_order:
        curvature, s = skip(scratch.curvature, units), skip(scratch.s, units)
        _curvature_back(layer.activation, layer.slope, count, h, gradient, curvature, s)


@compiled
def _gradient_back(activation: int, slope: float, count: int, h: Pointer, gradient: Pointer, d: Pointer) -> None:
    vectorised()
    if activation:
        for i in range(count):
            d[i] = (_f(1) - h[i] * h[i]) * gradient[i]
    else:
        for i in range(count):
            d[i] = (slope if h[i] <= _f(0) else _f(1)) * gradient[i]


@compiled
def _curvature_back(
    activation: int, slope: float, count: int, h: Pointer, gradient: Pointer, curvature: Pointer, s: Pointer
) -> None:
    vectorised()
    for i in range(count):
        rise, bend = _f(1), _f(0)  # the activation's first and second derivative
        if activation:
            rise = _f(1) - h[i] * h[i]
            bend = _f(-2) * h[i] * rise
        elif h[i] <= _f(0):
            rise = slope
        s[i] = rise * rise * curvature[i] + bend * gradient[i]


@functools.cache
def forward_with(convolutions: bool) -> Callable[[Integers], None]:
    """Return the forward pass; what a network does not need is not compiled."""

    def forward(job: Integers) -> None:
        """Compute the activations of all layers; the products of a first Linear layer with the inputs are already known."""
        network, scratch, parameters = network_of(job), scratch_of(job), floats_at(job[PARAMETERS])
        for at in range(network.depth):
            layer = layer_at(network, at)
            if convolutions and layer.kernel:
                _forward_convolution(layer, parameters, scratch)
            else:
                _forward_linear(layer, parameters, at == 0, scratch)

    return forward


@inlined
def _forward_linear(layer: Layer, parameters: Pointer, first: bool, scratch: Scratch) -> None:
    x, out, weights = skip(scratch.h, layer.inputs), skip(scratch.h, layer.outputs), skip(parameters, layer.weight)
    for i in range(layer.rows):
        bias = parameters[layer.bias + i] if layer.bias >= 0 else _f(0)
        a = scratch.first_dot[i] if first else dot(skip(weights, i * layer.columns), x, layer.columns)
        out[i] = a + bias
    _activate(layer.activation, layer.slope, layer.rows, _f(0), out)


@inlined
def _forward_convolution(layer: Layer, parameters: Pointer, scratch: Scratch) -> None:
    out, patches = skip(scratch.h, layer.outputs), skip(scratch.workspace, layer.patches)
    positions = layer.positions
    to_patches(skip(scratch.h, layer.inputs), layer.channels, layer.height, layer.width, layer.kernel, patches)
    convolve(skip(parameters, layer.weight), layer.rows, layer.columns, patches, positions, out)
    for i in range(layer.rows):
        bias = parameters[layer.bias + i] if layer.bias >= 0 else _f(0)
        _activate(layer.activation, layer.slope, positions, bias, skip(out, i * positions))
    if layer.pool:
        height, width = layer.height - layer.kernel + 1, layer.width - layer.kernel + 1
        pool(out, layer.rows, height, width, layer.pool, skip(out, layer.rows * positions))


@compiled
def judge(job: Integers, at: int, outputs: Pointer, count: int, d: Pointer, s: Pointer) -> tuple[float, bool]:
    """Return the loss and whether the largest output is the target's; write the derivatives to d and s."""
    if job[VALUES]:
        values = skip(floats_at(job[VALUES]), at * count)
        total, each = _f(0), _f(2 / count)
        for i in range(count):
            error = outputs[i] - values[i]
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
    target = integers_at(job[CLASSES])[at]
    d[target] -= _f(1)
    return _f(math.log(total_weight) + np.float64(outputs[best]) - np.float64(outputs[target])), best == target


@functools.cache
def backward_with(convolutions: bool, second_order: bool) -> Callable[[Integers], None]:
    """Return the backward pass, without curvature unless it is used."""

    def backward(job: Integers) -> None:
        """Compute the derivatives of all units, starting at the outputs, and of filters."""
        network, scratch, parameters = network_of(job), scratch_of(job), floats_at(job[PARAMETERS])
        for at in range(network.depth - 1, -1, -1):
            layer = layer_at(network, at)
            if convolutions and layer.kernel:
                _look_at_filters(layer, second_order, scratch)
            if at > 0:
                below = layer_at(network, at - 1)
                if convolutions and layer.kernel:
                    _back_to_patches(layer, parameters, second_order, scratch)
                else:
                    _back_to_inputs(layer, parameters, second_order, scratch)
                if convolutions and below.pool:
                    _back_through_pool(below, second_order, scratch)
                _back_through_activation(below, second_order, scratch)

    return backward


@inlined
def _back_to_inputs(layer: Layer, parameters: Pointer, second_order: bool, scratch: Scratch) -> None:
    """Propagate gradient and curvature from the pre-activation of a Linear layer to its inputs."""
    weights, rows, columns, units = skip(parameters, layer.weight), layer.rows, layer.columns, layer.outputs
    back_through(weights, rows, columns, skip(scratch.d, units), skip(scratch.gradient, layer.inputs))
    if second_order:
        curvature_back_through(weights, rows, columns, skip(scratch.s, units), skip(scratch.curvature, layer.inputs))


@inlined
def _back_to_patches(layer: Layer, parameters: Pointer, second_order: bool, scratch: Scratch) -> None:
    """Propagate gradient and curvature from the pre-activation of a convolution to its inputs."""
    weights, patches, positions = skip(parameters, layer.weight), scratch.workspace, layer.positions
    weighted_sums(weights, layer.rows, layer.columns, skip(scratch.d, layer.outputs), positions, patches)
    _add_to_inputs(layer, patches, scratch.gradient)
    if second_order:
        square_weighted_sums(weights, layer.rows, layer.columns, skip(scratch.s, layer.outputs), positions, patches)
        _add_to_inputs(layer, patches, scratch.curvature)


@inlined
def _add_to_inputs(layer: Layer, patches: Pointer, out: Pointer) -> None:
    add_patches(patches, layer.channels, layer.height, layer.width, layer.kernel, skip(out, layer.inputs))


@inlined
def _back_through_pool(layer: Layer, second_order: bool, scratch: Scratch) -> None:
    height, width = layer.height - layer.kernel + 1, layer.width - layer.kernel + 1
    maps, pooled = skip(scratch.h, layer.outputs), layer.rows * layer.positions
    for number in range(2 if second_order else 1):
        out = skip(scratch.curvature if number else scratch.gradient, layer.outputs)
        unpool(skip(out, pooled), layer.rows, height, width, layer.pool, maps, out)


@inlined
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
