"""Convolutions and max pooling of one learner: stride 1, no padding, rectangular images.

A convolution is a matrix product with the *patches* of its input: row (c, a, b) of the patches holds, for every position
(y, x) of the output, the input's value at channel c, row y + a, column x + b. Inner loops run over positions.
"""

from typing import Any

import numpy as np

from upgd.kernels.machine import Pointer, apart, compiled, compiled_sum, fused, skip, vectorised
from upgd.population.kernel.layers import dot

__all__ = [
    "add_patches",
    "convolve",
    "patch_products",
    "patch_square_products",
    "pool",
    "to_patches",
    "unpool",
    "weighted_sums",
]

_f: Any = np.float32


@compiled
def to_patches(x: Pointer, channels: int, height: int, width: int, kernel: int, patches: Pointer) -> None:
    """Write the patches, ``(channels·kernel², positions)``."""
    vectorised()
    rows, columns = height - kernel + 1, width - kernel + 1
    number = 0
    for c in range(channels):
        for a in range(kernel):
            for b in range(kernel):
                out = skip(patches, number * rows * columns)
                number += 1
                for y in range(rows):
                    line = skip(x, (c * height + y + a) * width + b)
                    for i in range(columns):
                        out[y * columns + i] = line[i]


@compiled
def add_patches(patches: Pointer, channels: int, height: int, width: int, kernel: int, out: Pointer) -> None:
    """Add every value of the patches to the place that it came from, the transpose of :func:`to_patches`."""
    vectorised()
    rows, columns = height - kernel + 1, width - kernel + 1
    for i in range(channels * height * width):
        out[i] = _f(0)
    number = 0
    for c in range(channels):
        for a in range(kernel):
            for b in range(kernel):
                values = skip(patches, number * rows * columns)
                number += 1
                for y in range(rows):
                    line = skip(out, (c * height + y + a) * width + b)
                    for i in range(columns):
                        line[i] += values[y * columns + i]


@compiled
def convolve(filters: Pointer, count: int, columns: int, patches: Pointer, positions: int, out: Pointer) -> None:
    """Compute ``out[f, p] = Σ_c filters[f, c]·patches[c, p]``."""
    vectorised()
    for f in range(count):
        o, w = skip(out, f * positions), skip(filters, f * columns)
        for p in range(positions):
            o[p] = _f(0)
        for c in range(columns):
            weight, patch = w[c], skip(patches, c * positions)
            for p in range(positions):
                o[p] = fused(weight, patch[p], o[p])


@compiled
def weighted_sums(
    filters: Pointer, count: int, columns: int, d: Pointer, positions: int, squared: bool, out: Pointer
) -> None:
    """Compute ``out[c, p] = Σ_f filters[f, c]·d[f, p]``, or with squared filters: back to the patches."""
    vectorised()
    for c in range(columns):
        o = skip(out, c * positions)
        for p in range(positions):
            o[p] = _f(0)
        for f in range(count):
            weight, delta = filters[f * columns + c], skip(d, f * positions)
            if squared:
                weight *= weight
            for p in range(positions):
                o[p] = fused(weight, delta[p], o[p])


@compiled
def patch_products(d: Pointer, count: int, positions: int, patches: Pointer, columns: int, out: Pointer) -> None:
    """Compute ``out[f, c] = Σ_p d[f, p]·patches[c, p]``: the gradient of the filters."""
    for f in range(count):
        for c in range(columns):
            out[f * columns + c] = dot(skip(d, f * positions), skip(patches, c * positions), positions)


@compiled_sum
def _dot_with_squares(w: Pointer, x: Pointer, count: int) -> float:
    apart()
    vectorised()
    total = _f(0)
    for j in range(count):
        total += w[j] * x[j] * x[j]
    return total


@compiled
def patch_square_products(s: Pointer, count: int, positions: int, patches: Pointer, columns: int, out: Pointer) -> None:
    """Compute ``out[f, c] = Σ_p s[f, p]·patches[c, p]²``: the curvature of the filters."""
    for f in range(count):
        for c in range(columns):
            out[f * columns + c] = _dot_with_squares(skip(s, f * positions), skip(patches, c * positions), positions)


@compiled
def _largest_at(image: Pointer, width: int, y: int, x: int, size: int) -> int:
    """Return the index of the largest of size × size values, the first in case of ties."""
    best = y * width + x
    for a in range(size):
        for b in range(size):
            at = (y + a) * width + x + b
            if image[at] > image[best]:
                best = at
    return best


@compiled
def pool(maps: Pointer, count: int, height: int, width: int, size: int, out: Pointer) -> None:
    """Take the maximum of every size × size window; incomplete windows at the border are dropped."""
    number = 0
    for f in range(count):
        image = skip(maps, f * height * width)
        for y in range(height // size):
            for x in range(width // size):
                out[number] = image[_largest_at(image, width, y * size, x * size, size)]
                number += 1


@compiled
def unpool(pooled: Pointer, count: int, height: int, width: int, size: int, maps: Pointer, out: Pointer) -> None:
    """Send derivatives back to the positions of the maxima; other positions get zero."""
    for i in range(count * height * width):
        out[i] = _f(0)
    number = 0
    for f in range(count):
        image, back = skip(maps, f * height * width), skip(out, f * height * width)
        for y in range(height // size):
            for x in range(width // size):
                back[_largest_at(image, width, y * size, x * size, size)] = pooled[number]
                number += 1
