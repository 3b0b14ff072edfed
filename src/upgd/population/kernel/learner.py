"""One learner through a block of samples: the loop that all methods have in common.

The forward pass, the backward pass and the step of the method are called by their addresses, so each of them is compiled
once, when it is first used, and not once for every combination.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from upgd.kernels.machine import (
    Integers,
    call,
    digest_of_sources,
    doubles_at,
    entry_point,
    floats_at,
    integers_at,
    skip,
)
from upgd.population.kernel.layers import dot
from upgd.population.kernel.layout import (
    AT,
    BACKWARD,
    CORRECT,
    DIVERGED,
    FORWARD,
    LENGTH,
    LOOK_AHEAD,
    LOSS,
    PARAMETERS,
    ROWS,
    START,
    STEP,
    TAKE_STEP,
    layer_at,
    network_of,
    scratch_of,
)
from upgd.population.kernel.sample import judge, load

__all__ = ["address_of", "advance", "entry"]

_f: Any = np.float32
_SOURCES = digest_of_sources(Path(__file__).parent)


@functools.cache
def entry(function: Callable[[Integers], None]) -> Any:
    """Compile a function of a job, when first used, or load it from numba's cache."""
    return entry_point(_SOURCES)(function)


def address_of(function: Callable[[Integers], None]) -> int:
    """Return the address of the compiled function."""
    return int(entry(function).address)


def advance(job: Integers) -> int:
    """Learn from all samples of a job.

    Returns:
        The step whose loss was not finite, at which learning stopped; −1 if there was none.
    """
    _function(address_of(learn))(job.ctypes.data)  # this releases the GIL
    return int(job[DIVERGED])


_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def learn(job: Integers) -> None:
    """The loop over samples."""
    network, scratch, w = network_of(job), scratch_of(job), floats_at(job[PARAMETERS])
    for i in range(job[ROWS]):
        scratch.ones[i] = _f(1)
    first, last = layer_at(network, 0), layer_at(network, network.depth - 1)
    inputs, dense = first.outputs, first.kernel == 0
    outputs, d, s = skip(scratch.h, last.outputs), skip(scratch.d, last.outputs), skip(scratch.s, last.outputs)
    load(job, 0, scratch.h, inputs)
    if dense:
        for i in range(first.rows):
            scratch.first_dot[i] = dot(skip(w, first.weight + i * first.columns), scratch.h, first.columns)
    job[DIVERGED] = -1
    for at in range(job[LENGTH]):
        job[AT], job[STEP], job[LOOK_AHEAD] = at, job[START] + at + 1, at + 1 < job[LENGTH] and dense
        call(job[FORWARD], job)
        loss, right = judge(job, at, outputs, last.rows, d, s)
        if not np.isfinite(loss):
            job[DIVERGED] = job[START] + at
            break
        doubles_at(job[LOSS])[0] += loss
        integers_at(job[CORRECT])[0] += right
        call(job[BACKWARD], job)
        if at + 1 < job[LENGTH]:
            load(job, at + 1, scratch.next_x, inputs)
        call(job[TAKE_STEP], job)
        for j in range(inputs):
            scratch.h[j] = scratch.next_x[j]
