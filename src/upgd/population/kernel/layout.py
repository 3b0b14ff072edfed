"""How a network, a learner and its samples are laid out in memory.

Everything that belongs to units (activations, derivatives) lies in vectors over all units: the inputs, then each layer's
outputs. Everything that belongs to parameters lies in vectors over all parameters, in the order of
``network.parameters()``, as the noise counts them; a *row* is a row of a weight matrix, a filter, or a bias vector.
"""

from typing import NamedTuple

from upgd.kernels.machine import BytePointer, Bytes, Floats, Integers, Pointer, compiled, skip
from upgd.population.kernel.layers import BLOCK

__all__ = [
    "ADAMW",
    "PLAIN",
    "UTILITY",
    "Layer",
    "Memory",
    "Recipe",
    "Samples",
    "Scratch",
    "carve",
    "layer_at",
    "scratch_floats",
]

PLAIN, UTILITY, ADAMW = 0, 1, 2


class Recipe(NamedTuple):
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
    """A Linear layer or a convolution, and what follows it. A network is an array of these as numbers, a row per layer.

    A Linear layer is one position, and its inputs are what came before; the last eight belong to convolutions.
    """

    rows: int  #: units, or filters
    columns: int  #: what enters each
    weight: int  #: where its weights begin among the parameters
    bias: int  #: where its biases begin; −1: there are none
    row: int  #: where its rows begin among all rows; the bias, one row, comes last
    inputs: int  #: where its inputs begin among the units
    outputs: int  #: where its outputs begin, behind the activation: all positions of the first filter, …
    activation: int  #: 0 piecewise linear with the given slope below zero, 1 tanh
    positions: int
    channels: int
    height: int
    width: int
    kernel: int  #: 0: this is a Linear layer
    pool: int  #: the size of the max pooling behind the activation; 0: none
    patches: int  #: where its patches are in the workspace
    filters: int  #: where the gradients of its filters and biases are, and then their curvatures
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
    ones: Pointer  #: per row
    idle: BytePointer  #: per row
    noise: Pointer
    spare: Pointer
    workspace: Pointer  #: of convolutions; it begins with room for the derivatives of patches


#: How many vectors over units, and over rows, a Scratch has.
_PER_UNIT = 11


def scratch_floats(units: int, rows: int, longest: int, workspace: int) -> int:
    """How many floats :func:`advance` needs to work with."""
    return _PER_UNIT * units + 2 * rows + 2 * (max(longest, BLOCK) + 2) + workspace


@compiled
def carve(floats: Pointer, bytes_: BytePointer, units: int, rows: int, longest: int) -> Scratch:
    rest = skip(floats, _PER_UNIT * units)
    noise, buffer = skip(rest, 2 * rows), max(longest, BLOCK) + 2
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
