"""The passes over one parameter tensor of one learner.

A tensor is a matrix whose gradient is never stored, because it is a product: the weight in row i and column j has the
gradient ``d[i]·h[j]`` (the delta of the unit times the input of the weight) and the curvature ``s[i]·h2[j]``. A bias vector
is also such a matrix: one row, with d = s = 1, h = the deltas of its layer, h2 = their curvatures. So are the filters of a
convolution, except that each has its own h and h2, the gradient and the curvature themselves.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from upgd.kernels.machine import (
    BytePointer,
    Pointer,
    add,
    apart,
    compiled,
    compiled_sum,
    float_of,
    fused,
    inlined,
    larger,
    least,
    most,
    shifted_left,
    skip,
    smaller,
    truncated,
    vectorised,
)
from upgd.kernels.normals import fill_normals

__all__ = [
    "BLOCK",
    "Noise",
    "Tensor",
    "adamw",
    "back_through",
    "curvature_back_through",
    "descend",
    "dot",
    "make",
    "protect",
    "trace",
    "trace_norms",
]

_f: Any = np.float32
_u: Any = np.uint32
Keys = tuple[int, int, int, int]

#: Number of normals to generate at once: enough for vectorization, few enough for the L1 cache.
BLOCK = 2048
#: Smaller numbers are flushed to zero, because processors are slow with subnormal numbers.
_SMALL = _f(1e-37)


class Tensor(NamedTuple):
    """A parameter tensor: its shape, its offsets among all parameters and all rows, its gradient and curvature."""

    rows: int
    columns: int
    begin: int
    row: int
    stride: int  #: distance between the h of consecutive rows; 0 if they share one
    h: Pointer
    h2: Pointer
    d: Pointer
    s: Pointer


class Noise(NamedTuple):
    """Parameters of the noise of a step."""

    kind: int  #: 0 none, 1 white, 2 anticorrelated
    keys: Keys  #: of this step
    before: Keys  #: of the previous step
    buffer: Pointer  #: space for a block, or for a row if that is longer, and two more; zeros without noise
    spare: Pointer  #: the same size, for anticorrelated noise


@compiled_sum
def dot(w: Pointer, x: Pointer, count: int) -> float:
    """Return the sum of products. All forward passes use this function, so they round in the same way."""
    apart()
    vectorised()
    total = _f(0)
    for j in range(count):
        total += w[j] * x[j]
    return total


@compiled
def back_through(weights: Pointer, rows: int, columns: int, d: Pointer, out: Pointer) -> None:
    """Compute ``out[j] = Σᵢ weights[i, j]·d[i]``: derivatives back through a layer."""
    vectorised()
    for j in range(columns):
        out[j] = _f(0)
    for i in range(rows):
        delta = d[i]
        if delta != _f(0):
            w = skip(weights, i * columns)
            for j in range(columns):
                out[j] = fused(w[j], delta, out[j])


@compiled
def curvature_back_through(weights: Pointer, rows: int, columns: int, s: Pointer, out: Pointer) -> None:
    """Compute ``out[j] = Σᵢ weights[i, j]²·s[i]``: curvature back through a layer."""
    vectorised()
    for j in range(columns):
        out[j] = _f(0)
    for i in range(rows):
        curvature = s[i]
        if curvature != _f(0):
            w = skip(weights, i * columns)
            for j in range(columns):
                out[j] = fused(w[j] * w[j], curvature, out[j])


# ------------------------------------------------------------------------------------------ utility: the first pass


@inlined
def _flushed(x: float) -> float:
    return x if abs(x) >= _SMALL else _f(0)


@inlined
def _traced(u: float, w: float, h: float, h2: float, beta: float, slope: float, bend: float) -> float:
    """Return ``β·u + (1−β)·(½·h·w² − g·w)``, where slope and bend include the factor 1 − β."""
    return _flushed(fused(fused(bend * h2, w, -slope * h), w, beta * u))


@compiled
def trace(
    tensor: Tensor,
    parameters: Pointer,
    utility: Pointer,
    beta: float,
    first_order: float,
    second_order: float,
    idle: BytePointer,
    largest: Pointer,
    smallest: Pointer,
) -> float:
    """Update ``u ← β·u + (1−β)·m`` and the largest and smallest u of every row; return the largest of all.

    A row with zero delta (an inactive ReLU unit) is *idle*: its utility only decays, which changes its largest and smallest
    by the same factor. It is skipped here; :func:`protect`, which reads it anyway, applies the decay.

    Args:
        first_order: 1 − β.
        second_order: (1 − β)/2, or 0 without curvature.
        idle, largest, smallest: per row of all tensors.
    """
    vectorised()
    top = _f(-np.inf)
    for i in range(tensor.rows):
        slope, bend = first_order * tensor.d[i], second_order * tensor.s[i]
        row = tensor.row + i
        if slope == _f(0) and bend == _f(0):
            idle[row] = 1
            largest[row], smallest[row] = _flushed(beta * largest[row]), _flushed(beta * smallest[row])
        else:
            idle[row] = 0
            w = skip(parameters, tensor.begin + i * tensor.columns)
            u = skip(utility, tensor.begin + i * tensor.columns)
            h, h2 = skip(tensor.h, i * tensor.stride), skip(tensor.h2, i * tensor.stride)
            high, low = _f(-np.inf), _f(np.inf)
            if bend == _f(0):
                for j in range(tensor.columns):
                    value = _flushed(fused(-slope * h[j], w[j], beta * u[j]))
                    u[j] = value
                    high = larger(high, value)
                    low = smaller(low, value)
            else:
                for j in range(tensor.columns):
                    value = _traced(u[j], w[j], h[j], h2[j], beta, slope, bend)
                    u[j] = value
                    high = larger(high, value)
                    low = smaller(low, value)
            largest[row], smallest[row] = high, low
        top = largest[row] if largest[row] > top else top
    return top


@compiled
def trace_norms(
    tensor: Tensor,
    parameters: Pointer,
    utility: Pointer,
    beta: float,
    first_order: float,
    second_order: float,
    norms: Pointer,
) -> None:
    """Update ``u ← β·u + (1−β)·m`` and compute the norm of u for every row; see :func:`trace` for the arguments."""
    vectorised()
    for i in range(tensor.rows):
        slope, bend = first_order * tensor.d[i], second_order * tensor.s[i]
        h, h2 = skip(tensor.h, i * tensor.stride), skip(tensor.h2, i * tensor.stride)
        w = skip(parameters, tensor.begin + i * tensor.columns)
        u = skip(utility, tensor.begin + i * tensor.columns)
        for j in range(tensor.columns):
            u[j] = _traced(u[j], w[j], h[j], h2[j], beta, slope, bend)
        norms[tensor.row + i] = _f(math.sqrt(dot(u, u, tensor.columns)))


# ---------------------------------------------------------------------------------------------- the second pass


@inlined
def make(noise: Noise, first: int, count: int) -> None:
    """Write the noise of the entries first, …, first + count − 1 to the buffer, starting at ``first % 2``."""
    if noise.kind:
        pairs = (first % 2 + count + 1) // 2
        fill_normals(noise.buffer, first // 2, pairs, noise.keys)
        if noise.kind == 2:
            fill_normals(noise.spare, first // 2, pairs, noise.before)
            _subtract(noise.buffer, noise.spare, 2 * pairs)


@compiled
def _subtract(x: Pointer, y: Pointer, count: int) -> None:
    vectorised()
    for j in range(count):
        x[j] -= y[j]


@compiled
def protect(
    tensor: Tensor,
    parameters: Pointer,
    utility: Pointer,
    beta: float,
    decay: float,
    gradient: tuple[float, float],
    search: tuple[float, float],
    idle: BytePointer,
    smallest: Pointer,
    inverse: Pointer,
    noise: Noise,
    next_x: Pointer,
    next_dot: Pointer,
    look_ahead: bool,
) -> None:
    """Apply ``w ← w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + wd·w]``, and compute the products with the next sample.

    Args:
        decay: lr·wd.
        gradient: lr·c and p.
        search: lr·σ and q.
        idle, smallest: see :func:`trace`.
        inverse: per row of all tensors, 1/scale, so that ū = sigmoid(u·inverse).
        next_x: if ``look_ahead``, the next sample; its products with the new rows are written to ``next_dot``.
    """
    vectorised()
    columns = tensor.columns
    at_once = most(1, BLOCK // columns)
    # With ū = ½ + y:  1 − p·ū = (1 − p/2) − p·y, and likewise for q.
    noise_flat, noise_bent = search[0] * (_f(1) - _f(0.5) * search[1]), search[0] * search[1]
    both = gradient[1] == _f(1) and search[1] == _f(1)  # UPGD: gradient and noise share the factor 1 − ū
    # From the end to the start, because the end is still in the cache after the first pass.
    for block in range((tensor.rows - 1) // at_once, -1, -1):
        begin, end = block * at_once, least(tensor.rows, (block + 1) * at_once)
        first = tensor.begin + begin * columns
        make(noise, first, (end - begin) * columns)
        for i in range(begin, end):
            w = skip(parameters, tensor.begin + i * columns)
            u = skip(utility, tensor.begin + i * columns)
            z = skip(noise.buffer, first % 2 + (i - begin) * columns if noise.kind else 0)
            h = skip(tensor.h, i * tensor.stride)
            scale = inverse[tensor.row + i]
            slope = gradient[0] * tensor.d[i]
            slope_flat, slope_bent = slope * (_f(1) - _f(0.5) * gradient[1]), slope * gradient[1]
            near = smallest[tensor.row + i] * scale >= _f(-1)  # |û/scale| ≤ 1, the usual case
            decays = idle[tensor.row + i]
            if decays and not (near and both):
                for j in range(columns):
                    u[j] = _flushed(beta * u[j])
            if near and both and decays:  # without a gradient
                for j in range(columns):
                    value = _flushed(beta * u[j])
                    u[j] = value
                    open_ = _f(0.5) - _sigmoid_above_half(value * scale)
                    w[j] -= fused(search[0] * z[j], open_, decay * w[j])
            elif near and both:
                for j in range(columns):
                    open_ = _f(0.5) - _sigmoid_above_half(u[j] * scale)
                    w[j] -= fused(fused(slope, h[j], search[0] * z[j]), open_, decay * w[j])
            elif near:
                for j in range(columns):
                    y = _sigmoid_above_half(u[j] * scale)
                    flat = fused(slope_flat, h[j], noise_flat * z[j])
                    bent = fused(slope_bent, h[j], noise_bent * z[j])
                    w[j] -= fused(-y, bent, fused(decay, w[j], flat))
            else:
                for j in range(columns):
                    y = _sigmoid(u[j] * scale) - _f(0.5)
                    flat = fused(slope_flat, h[j], noise_flat * z[j])
                    bent = fused(slope_bent, h[j], noise_bent * z[j])
                    w[j] -= fused(-y, bent, fused(decay, w[j], flat))
            if look_ahead:
                next_dot[i] = dot(w, next_x, columns)


@inlined
def _sigmoid_above_half(x: float) -> float:
    """Return sigmoid(x) − ½ for |x| ≤ 1."""
    xx = x * x
    y = _f(-1.69512563e-4)
    y = fused(y, xx, _f(2.05409685e-3))
    y = fused(y, xx, _f(-2.08255044e-2))
    y = fused(y, xx, _f(2.49999434e-1))
    return x * y


@inlined
def _sigmoid(x: float) -> float:
    """Return 1/(1 + 2ᵗ) for t = −x·log₂e, which is split into an integer and a rest in [−½, ½]."""
    t = smaller(_f(-math.log2(math.e)) * x, _f(100))
    whole = np.floor(t + _f(0.5))
    rest = t - whole
    p = _f(0.001341)
    p = fused(p, rest, _f(0.00967604))
    p = fused(p, rest, _f(0.05550297))
    p = fused(p, rest, _f(0.24022107))
    p = fused(p, rest, _f(0.69314723))
    p = fused(p, rest, _f(1.00000008))
    power = float_of(shifted_left(add(truncated(whole), _u(127)), _u(23)))
    return _f(1) / fused(p, power, _f(1))


@compiled
def descend(
    tensor: Tensor,
    parameters: Pointer,
    decay: float,
    slope: Pointer,
    scatter: Pointer,
    noise: Noise,
    next_x: Pointer,
    next_dot: Pointer,
    look_ahead: bool,
) -> None:
    """Apply ``w ← w − slope[i]·h − scatter[i]·ξ − decay·w``, with factors per row; see :func:`protect` for the arguments."""
    vectorised()
    columns = tensor.columns
    at_once = most(1, BLOCK // columns)
    for block in range((tensor.rows - 1) // at_once, -1, -1):
        begin, end = block * at_once, least(tensor.rows, (block + 1) * at_once)
        first = tensor.begin + begin * columns
        make(noise, first, (end - begin) * columns)
        for i in range(begin, end):
            w = skip(parameters, tensor.begin + i * columns)
            h = skip(tensor.h, i * tensor.stride)
            g, s = slope[i], scatter[i]
            if noise.kind:
                z = skip(noise.buffer, first % 2 + (i - begin) * columns)
                for j in range(columns):
                    w[j] -= fused(s, z[j], fused(g, h[j], decay * w[j]))
            elif g != _f(0) or decay != _f(0):
                for j in range(columns):
                    w[j] -= fused(g, h[j], decay * w[j])
            if look_ahead:
                next_dot[i] = dot(w, next_x, columns)


@compiled
def adamw(
    tensor: Tensor,
    parameters: Pointer,
    first_moment: Pointer,
    second_moment: Pointer,
    settings: tuple[float, float, float, float, float, float, float, float],
    next_x: Pointer,
    next_dot: Pointer,
    look_ahead: bool,
) -> None:
    """Apply AdamW, and compute the products with the next sample. The decay is part of the step; see rules.update.

    Args:
        settings: β₁, 1 − β₁, β₂, 1 − β₂, 1/√(1 − β₂ᵗ), ε, lr/(1 − β₁ᵗ), lr·wd.
    """
    vectorised()
    beta1, new1, beta2, new2, unbias2, eps, rate, decay = settings
    for i in range(tensor.rows):
        at = tensor.begin + i * tensor.columns
        w, m, v = skip(parameters, at), skip(first_moment, at), skip(second_moment, at)
        h, delta = skip(tensor.h, i * tensor.stride), tensor.d[i]
        for j in range(tensor.columns):
            g = delta * h[j]
            mean = _flushed(fused(beta1, m[j], new1 * g))
            square = _flushed(fused(beta2, v[j], new2 * (g * g)))
            m[j], v[j] = mean, square
            w[j] -= fused(decay, w[j], rate * mean / fused(_f(math.sqrt(square)), unbias2, eps))
        if look_ahead:
            next_dot[i] = dot(w, next_x, tensor.columns)
