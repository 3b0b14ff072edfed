"""Memory layout of a network, a learner and its samples.

Everything per unit (activations, derivatives) is stored in vectors over all units: the inputs, then each layer's outputs.
Everything per parameter is stored in vectors over all parameters in the order of ``network.parameters()``, which is also the
order of the noise. A *row* is a row of a weight matrix, a filter, or a bias vector.
"""

from typing import NamedTuple

import numpy as np

from upgd.kernels.machine import (
    BytePointer,
    Bytes,
    Floats,
    Integers,
    Pointer,
    bytes_at,
    compiled,
    floats_at,
    inlined,
    integers_at,
    most,
    skip,
)
from upgd.kernels.normals import step_keys
from upgd.population.kernel.layers import BLOCK, Noise

__all__ = [
    "AT",
    "BACKWARD",
    "CLASSES",
    "CORRECT",
    "DENSE",
    "DIVERGED",
    "FORWARD",
    "IMAGE",
    "LENGTH",
    "LOOK_AHEAD",
    "LOSS",
    "NORMALIZER",
    "OWN",
    "PARAMETERS",
    "PERMUTATION",
    "RATE",
    "ROWS",
    "SCALED",
    "SEED",
    "SOURCE",
    "START",
    "STEP",
    "TAKE_STEP",
    "TASK",
    "UNITS",
    "VALUES",
    "Layer",
    "Network",
    "Recipe",
    "Samples",
    "Scratch",
    "aligned",
    "layer_at",
    "network_of",
    "noise_of",
    "scratch",
    "scratch_of",
]

#: Entries of a *job*, the table of integers that describes a learner and its samples to the kernels: the addresses of layers
#: and slopes, the number of layers, units and rows, the longest row or column of a layer; the addresses of scratch floats,
#: scratch bytes and parameters; the kind of noise and the seed;
LAYERS, SLOPES, DEPTH, UNITS, ROWS, LONGEST, FLOATS, BYTES, PARAMETERS, NOISE, SEED = range(11)
#: the addresses of the fields of :class:`Samples`, 0 if empty; the number of samples and the step before the first;
DENSE, SOURCE, IMAGE, PERMUTATION, TASK, SCALED, CLASSES, VALUES, LENGTH, START = range(11, 21)
#: the addresses of the decay rate of the input normalization and of its running means and variances, 0 without it; of the
#: learner's sum of losses and number of correct predictions, to be incremented; of the forward pass, the backward pass and
#: the function that changes the parameters, given derivatives in the scratch;
RATE, NORMALIZER, LOSS, CORRECT, FORWARD, BACKWARD, TAKE_STEP = range(21, 28)
#: set by the kernels: the index of the current sample, the step, and whether to compute products with the next sample; the
#: step whose loss was not finite, at which learning stopped, or −1; then the entries of one method only.
AT, STEP, LOOK_AHEAD, DIVERGED, OWN = range(28, 33)


class Recipe(NamedTuple):
    """The specification of a learner: fields of ``Kind``, true if not zero, and its settings."""

    feature_wise: float
    local: float
    second_order: float
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
    """The samples of a learner: either ``dense`` or the next three, and one kind of target; the others are empty."""

    dense: Floats
    source: Bytes
    image: Integers  #: indices into ``source``
    permutation: Integers
    task: Integers
    scaled: Floats  #: the scaled value of each of the 256 pixel values
    classes: Integers
    values: Floats


class Network(NamedTuple):
    """The layers of a network."""

    layers: Integers  #: all fields of every :class:`Layer` but the last
    slopes: Pointer  #: the last field
    depth: int  #: the number of layers


class Layer(NamedTuple):
    """A Linear layer or a convolution, and the layers that follow it.

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
    """Return the storage that :func:`scratch_of` divides, aligned to cache lines: vectors that cross them are slower."""
    count = _PER_UNIT * aligned(units) + 2 * aligned(rows) + 2 * aligned(max(longest, BLOCK) + 2) + workspace
    floats = np.zeros(count + LINE, np.float32)
    return floats[-floats.ctypes.data % (4 * LINE) // 4 :][:count]


def aligned(count: int) -> int:
    """Return the number of floats in the cache lines of ``count`` floats."""
    return -(-count // LINE) * LINE


_aligned = compiled(aligned)


@inlined
def scratch_of(job: Integers) -> Scratch:
    floats, units, rows = floats_at(job[FLOATS]), _aligned(job[UNITS]), _aligned(job[ROWS])
    rest = skip(floats, _PER_UNIT * units)
    noise, buffer = skip(rest, 2 * rows), _aligned(most(job[LONGEST], BLOCK) + 2)
    return Scratch(
        floats, skip(floats, units), skip(floats, 2 * units), skip(floats, 3 * units), skip(floats, 4 * units),
        skip(floats, 5 * units), skip(floats, 6 * units), skip(floats, 7 * units), skip(floats, 8 * units),
        skip(floats, 9 * units), skip(floats, 10 * units),
        rest, skip(rest, rows), bytes_at(job[BYTES]), noise, skip(noise, buffer), skip(noise, 2 * buffer),
    )  # fmt: skip


@inlined
def network_of(job: Integers) -> Network:
    return Network(integers_at(job[LAYERS]), floats_at(job[SLOPES]), job[DEPTH])


@compiled
def layer_at(network: Network, at: int) -> Layer:
    row = skip(network.layers, 16 * at)
    return Layer(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11], row[12],
        row[13], row[14], row[15], network.slopes[at],
    )  # fmt: skip


@inlined
def noise_of(job: Integers, scratch: Scratch) -> Noise:
    step, seed = job[STEP], job[SEED]
    kind = 1 if step == 1 and job[NOISE] == 2 else job[NOISE]  # ζ₀ = 0
    return Noise(kind, step_keys(seed, step), step_keys(seed, step - 1), scratch.noise, scratch.spare)
