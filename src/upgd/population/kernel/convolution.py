"""Convolutions and max pooling of one learner: stride 1, no padding, rectangular images.

A convolution is a matrix product with the *patches* of its input: row (c, a, b) of the patches holds, for every position
(y, x) of the output, the input's value at channel c, row y + a, column x + b. Inner loops run over positions.
"""

from typing import Any

import numpy as np

from upgd.kernels.machine import Pointer, apart, compiled, compiled_sum, fused, inlined, least, skip, vectorised
from upgd.population.kernel.layers import dot

__all__ = [
    "add_patches",
    "convolve",
    "patch_products",
    "patch_square_products",
    "pool",
    "square_weighted_sums",
    "to_patches",
    "total",
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


@inlined
def convolve(filters: Pointer, count: int, columns: int, patches: Pointer, positions: int, out: Pointer) -> None:
    """Compute ``out[f, p] = Σ_c filters[f, c]·patches[c, p]``, for all filters while five rows of the patches are cached."""
    for i in range(count * positions):
        out[i] = _f(0)
    for c in range(0, columns, 5):
        for f in range(count):
            weights = skip(filters, f * columns + c)
            _add_products(
                weights, 1, least(5, columns - c), skip(patches, c * positions), positions, skip(out, f * positions)
            )


@inlined
def weighted_sums(filters: Pointer, count: int, columns: int, d: Pointer, positions: int, out: Pointer) -> None:
    """Compute ``out[c, p] = Σ_f filters[f, c]·d[f, p]``: back to the patches."""
    for i in range(columns * positions):
        out[i] = _f(0)
    for c in range(columns):
        _add_products(skip(filters, c), columns, count, d, positions, skip(out, c * positions))


@compiled
def _add_products(weights: Pointer, stride: int, count: int, vectors: Pointer, length: int, out: Pointer) -> None:
    """Add ``Σ_c weights[c·stride]·vectors[c]`` to a vector, in the order of c. Five at once save loads and stores."""
    vectorised()
    whole = count - count % 5
    for c in range(0, whole, 5):
        w0, w1, w2 = weights[c * stride], weights[(c + 1) * stride], weights[(c + 2) * stride]
        w3, w4 = weights[(c + 3) * stride], weights[(c + 4) * stride]
        v0, v1 = skip(vectors, c * length), skip(vectors, (c + 1) * length)
        v2, v3, v4 = skip(v1, length), skip(v1, 2 * length), skip(v1, 3 * length)
        for p in range(length):
            out[p] = fused(w4, v4[p], fused(w3, v3[p], fused(w2, v2[p], fused(w1, v1[p], fused(w0, v0[p], out[p])))))
    for c in range(whole, count):
        w0, v0 = weights[c * stride], skip(vectors, c * length)
        for p in range(length):
            out[p] = fused(w0, v0[p], out[p])


@compiled
def square_weighted_sums(filters: Pointer, count: int, columns: int, s: Pointer, positions: int, out: Pointer) -> None:
    """Compute ``out[c, p] = Σ_f filters[f, c]²·s[f, p]``: curvature back to the patches."""
    vectorised()
    for c in range(columns):
        o = skip(out, c * positions)
        for p in range(positions):
            o[p] = _f(0)
        for f in range(count):
            weight, curvature = filters[f * columns + c], skip(s, f * positions)
            weight *= weight
            for p in range(positions):
                o[p] = fused(weight, curvature[p], o[p])


@inlined
def patch_products(d: Pointer, count: int, positions: int, patches: Pointer, columns: int, out: Pointer) -> None:
    """Compute ``out[f, c] = Σ_p d[f, p]·patches[c, p]``: the gradient of the filters."""
    whole = columns - columns % 5
    for c in range(0, whole, 5):
        for f in range(count):
            _five_dots(skip(d, f * positions), skip(patches, c * positions), positions, skip(out, f * columns + c))
    for c in range(whole, columns):
        for f in range(count):
            out[f * columns + c] = dot(skip(d, f * positions), skip(patches, c * positions), positions)


@compiled_sum
def _five_dots(d: Pointer, patches: Pointer, positions: int, out: Pointer) -> None:
    """Compute the products of d with five consecutive rows of the patches, loading d once."""
    apart()
    vectorised()
    p1, p2 = skip(patches, positions), skip(patches, 2 * positions)
    p3, p4 = skip(patches, 3 * positions), skip(patches, 4 * positions)
    a0 = a1 = a2 = a3 = a4 = _f(0)
    for j in range(positions):
        a0 += d[j] * patches[j]
        a1 += d[j] * p1[j]
        a2 += d[j] * p2[j]
        a3 += d[j] * p3[j]
        a4 += d[j] * p4[j]
    out[0], out[1], out[2], out[3], out[4] = a0, a1, a2, a3, a4


@compiled_sum
def total(x: Pointer, count: int) -> float:
    """Return the sum of a vector."""
    apart()
    vectorised()
    added = _f(0)
    for j in range(count):
        added += x[j]
    return added


@compiled_sum
def _dot_with_squares(w: Pointer, x: Pointer, count: int) -> float:
    apart()
    vectorised()
    added = _f(0)
    for j in range(count):
        added += w[j] * x[j] * x[j]
    return added


@inlined
def patch_square_products(s: Pointer, count: int, positions: int, patches: Pointer, columns: int, out: Pointer) -> None:
    """Compute ``out[f, c] = Σ_p s[f, p]·patches[c, p]²``: the curvature of the filters."""
    for f in range(count):
        for c in range(columns):
            out[f * columns + c] = _dot_with_squares(skip(s, f * positions), skip(patches, c * positions), positions)


@compiled
def _largest_at(image: Pointer, width: int, x: int, size: int) -> int:
    """Return the index of the largest of size × size values from column x on, the first in case of ties."""
    best = x
    for a in range(size):
        for b in range(size):
            at = a * width + x + b
            if image[at] > image[best]:
                best = at
    return best


@inlined
def pool(maps: Pointer, count: int, height: int, width: int, size: int, out: Pointer) -> None:
    """Take the maximum of every size × size window; incomplete windows at the border are dropped."""
    rows, columns = height // size, width // size
    for f in range(count):
        for y in range(rows):
            image, line = skip(maps, (f * height + y * size) * width), skip(out, (f * rows + y) * columns)
            if size == 2:
                _pool_pairs(image, skip(image, width), columns, line)
            else:
                for x in range(columns):
                    line[x] = image[_largest_at(image, width, x * size, size)]


@compiled
def _pool_pairs(upper: Pointer, lower: Pointer, count: int, out: Pointer) -> None:
    """Take the maxima of two rows in windows of 2 × 2."""
    vectorised()
    for x in range(count):
        a, b, c, d = upper[2 * x], upper[2 * x + 1], lower[2 * x], lower[2 * x + 1]
        best = b if b > a else a
        best = c if c > best else best
        out[x] = d if d > best else best


@inlined
def unpool(pooled: Pointer, count: int, height: int, width: int, size: int, maps: Pointer, out: Pointer) -> None:
    """Send derivatives back to the positions of the maxima; other positions get zero."""
    rows, columns = height // size, width // size
    for i in range(count * height * width):
        out[i] = _f(0)
    for f in range(count):
        for y in range(rows):
            at, line = (f * height + y * size) * width, skip(pooled, (f * rows + y) * columns)
            image, back = skip(maps, at), skip(out, at)
            if size == 2:
                _unpool_pairs(line, columns, image, skip(image, width), back, skip(back, width))
            else:
                for x in range(columns):
                    back[_largest_at(image, width, x * size, size)] = line[x]


@compiled
def _unpool_pairs(pooled: Pointer, count: int, upper: Pointer, lower: Pointer, out: Pointer, below: Pointer) -> None:
    """Send derivatives back to the first maximum of every window of 2 × 2, in two rows."""
    vectorised()
    for x in range(count):
        a, b, c, d = upper[2 * x], upper[2 * x + 1], lower[2 * x], lower[2 * x + 1]
        value, place = (b, 1) if b > a else (a, 0)
        value, place = (c, 2) if c > value else (value, place)
        place = 3 if d > value else place
        gradient = pooled[x]
        out[2 * x] = gradient if place == 0 else _f(0)
        out[2 * x + 1] = gradient if place == 1 else _f(0)
        below[2 * x] = gradient if place == 2 else _f(0)
        below[2 * x + 1] = gradient if place == 3 else _f(0)
