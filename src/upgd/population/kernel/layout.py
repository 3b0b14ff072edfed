"""Memory layout of a network, a learner and its samples.

Everything per unit (activations, derivatives) is stored in vectors over all units: the inputs, then each layer's outputs.
Everything per parameter is stored in vectors over all parameters in the order of ``network.parameters()``, which is also the
order of the noise. A *row* is a row of a weight matrix, a filter, or a bias vector.
"""

from typing import NamedTuple

import numpy as np

from upgd.kernels.machine import BytePointer, Bytes, Doubles, Floats, Integers, Pointer, compiled, skip
from upgd.population.kernel.layers import BLOCK

__all__ = [
    "ADAMW",
    "PLAIN",
    "UTILITY",
    "Layer",
    "Learning",
    "Memory",
    "Recipe",
    "Samples",
    "Scratch",
    "aligned",
    "carve",
    "layer_at",
    "scratch",
]

PLAIN, UTILITY, ADAMW = 0, 1, 2


class Recipe(NamedTuple):
    """The specification of a learner: the fields of ``Kind`` as numbers, and its settings."""

    rule: int
    feature_wise: bool
    local: bool
    second_order: bool
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


class Learning(NamedTuple):
    """The method-independent inputs of the loop over samples."""

    units: int
    rows: int
    second_order: bool  #: whether the method uses curvature
    noise: int  #: 0 none, 1 white, 2 anticorrelated
    seed: int
    start: int  #: the step of the stream that the first sample has
    rate: float  #: decay rate of the input normalization
    normalizer: Floats  #: running means and variances of the inputs, ``(2, inputs)``; empty without normalization
    loss_sum: Doubles  #: one number, incremented in place
    correct: Integers  #: one number, incremented in place


class Samples(NamedTuple):
    """The samples of a learner. Either ``dense`` or ``source`` is empty, as is one of the targets; ``permutation`` may be."""

    dense: Floats
    source: Bytes
    image: Integers  #: indices into ``source``
    permutation: Integers
    task: Integers
    scaled: Floats  #: the scaled value of each of the 256 pixel values
    classes: Integers
    values: Floats


class Layer(NamedTuple):
    """A Linear layer or a convolution, and the layers that follow it. A network is an array with one row per layer.

    A Linear layer has one position, and its inputs are the preceding outputs. The last eight fields are for convolutions.
    """

    rows: int  #: units, or filters
    columns: int  #: inputs of each
    weight: int  #: offset of its weights among the parameters
    bias: int  #: offset of its biases; −1 if there are none
    row: int  #: offset of its rows among all rows; the bias, one row, comes last
    inputs: int  #: offset of its inputs among the units
    outputs: int  #: offset of its outputs after the activation: all positions of the first filter, …
    activation: int  #: 0 piecewise linear with the given slope below zero, 1 tanh
    positions: int
    channels: int
    height: int
    width: int
    kernel: int  #: 0 for a Linear layer
    pool: int  #: the size of the max pooling after the activation; 0 for none
    patches: int  #: offset of its patches in the workspace
    filters: int  #: offset of the gradients of its filters and biases, followed by their curvatures
    slope: float


class Memory(NamedTuple):
    """The state of a learner."""

    parameters: Pointer
    trace: Pointer  #: per parameter: the utility, or AdamW's first moment
    second_moment: Pointer  #: per parameter: AdamW's second moment
    features: Pointer  #: per unit: the utility of features
    largest: Pointer  #: per row: the largest utility
    smallest: Pointer  #: per row: the smallest utility


class Scratch(NamedTuple):
    """Temporary storage of a step."""

    h: Pointer  #: per unit: activations
    h2: Pointer  #: their squares
    gradient: Pointer  #: of the loss with respect to them
    curvature: Pointer  #: of the loss with respect to them
    d: Pointer  #: gradient of the loss with respect to the pre-activation
    s: Pointer  #: curvature of the loss with respect to the pre-activation
    gate: Pointer  #: ū of features
    slope: Pointer
    scatter: Pointer
    next_x: Pointer
    first_dot: Pointer  #: products of the first layer's rows with the inputs
    inverse: Pointer  #: per row: 1/scale
    ones: Pointer  #: per row
    idle: BytePointer  #: per row
    noise: Pointer
    spare: Pointer
    workspace: Pointer  #: for convolutions; starts with space for the derivatives of patches


#: Number of vectors over units in a Scratch.
_PER_UNIT = 11
#: Number of floats in a cache line.
LINE = 16


def scratch(units: int, rows: int, longest: int, workspace: int) -> Floats:
    """Return the temporary storage that :func:`carve` divides, aligned to cache lines: vectors that cross them are slower."""
    count = _PER_UNIT * aligned(units) + 2 * aligned(rows) + 2 * aligned(max(longest, BLOCK) + 2) + workspace
    floats = np.zeros(count + LINE, np.float32)
    return floats[-floats.ctypes.data % (4 * LINE) // 4 :][:count]


def aligned(count: int) -> int:
    """Return the number of floats in the cache lines of ``count`` floats."""
    return -(-count // LINE) * LINE


_aligned = compiled(aligned)


@compiled
def carve(floats: Pointer, bytes_: BytePointer, units: int, rows: int, longest: int) -> Scratch:
    units, rows = _aligned(units), _aligned(rows)
    rest = skip(floats, _PER_UNIT * units)
    noise, buffer = skip(rest, 2 * rows), _aligned(max(longest, BLOCK) + 2)
    return Scratch(
        floats, skip(floats, units), skip(floats, 2 * units), skip(floats, 3 * units), skip(floats, 4 * units),
        skip(floats, 5 * units), skip(floats, 6 * units), skip(floats, 7 * units), skip(floats, 8 * units),
        skip(floats, 9 * units), skip(floats, 10 * units),
        rest, skip(rest, rows), bytes_, noise, skip(noise, buffer), skip(noise, 2 * buffer),
    )  # fmt: skip


@compiled
def layer_at(plan: Integers, slopes: Floats, at: int) -> Layer:
    row = plan[at]
    return Layer(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11], row[12],
        row[13], row[14], row[15], slopes[at],
    )  # fmt: skip
