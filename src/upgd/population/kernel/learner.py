"""One learner through a block of samples: the loop of all methods, and the function that Python calls for those by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from upgd.kernels.machine import (
    Bytes,
    Floats,
    Integers,
    digest_of_sources,
    inlined,
    kept_on_disk,
    skip,
    start_of,
)
from upgd.kernels.normals import step_keys
from upgd.population.kernel.layers import Noise, dot
from upgd.population.kernel.layout import ADAMW, UTILITY, Learning, Memory, Recipe, Samples, Scratch, carve, layer_at
from upgd.population.kernel.sample import backward, forward, judge, load, normalize
from upgd.population.kernel.updates import adamw_step, feature_gates, unit_wise_step, weight_wise_step

__all__ = ["advance", "learning_with"]

_f: Any = np.float32


def learning_with(take_step: Callable[..., None]) -> Callable[..., int]:
    """Return the compiled loop over samples of a method.

    Args:
        take_step: the compiled function that changes the parameters, given the derivatives in the scratch.
    """

    @inlined  # which takes less time to compile than a function of its own
    def learn(
        plan: Integers,
        slopes: Floats,
        parameters: Floats,
        learning: Learning,
        samples: Samples,
        floats: Floats,
        bytes_: Bytes,
        own: Any,
    ) -> int:
        """Learn from all samples.

        Args:
            plan, slopes: the layers, see :class:`Layer`.
            parameters: the learner's parameters.
            learning: what all methods have in common.
            samples: the samples.
            floats, bytes_: the result of :func:`upgd.population.kernel.layout.scratch`, and one byte per row.
            own: what only ``take_step`` knows.

        Returns:
            The step whose loss was not finite, at which learning stopped; −1 if there was none.
        """
        w, units, rows = start_of(parameters), learning.units, learning.rows
        longest = max(plan[:, 0].max(), plan[:, 1].max())
        scratch = carve(start_of(floats), start_of(bytes_), units, rows, longest)
        for i in range(rows):
            scratch.ones[i] = _f(1)
        first, last = layer_at(plan, slopes, 0), layer_at(plan, slopes, len(plan) - 1)
        inputs, dense = first.outputs, first.kernel == 0
        d, s = skip(scratch.d, last.outputs), skip(scratch.s, last.outputs)
        steps = max(samples.classes.shape[0], samples.values.shape[0])

        load(samples, 0, scratch.h, inputs)
        normalize(learning, learning.start + 1, scratch.h, inputs)
        if dense:
            for i in range(first.rows):
                scratch.first_dot[i] = dot(skip(w, first.weight + i * first.columns), scratch.h, first.columns)
        for at in range(steps):
            forward(plan, slopes, w, scratch)
            loss, right = judge(samples, at, skip(scratch.h, last.outputs), last.rows, d, s)
            if not np.isfinite(loss):
                return learning.start + at
            learning.loss_sum[0] += loss
            learning.correct[0] += right
            backward(plan, slopes, w, learning.second_order, scratch)
            step = learning.start + at + 1
            if at + 1 < steps:
                load(samples, at + 1, scratch.next_x, inputs)
                normalize(learning, step + 1, scratch.next_x, inputs)
            kind = 1 if step == 1 and learning.noise == 2 else learning.noise  # ζ₀ = 0
            keys, before = step_keys(learning.seed, step), step_keys(learning.seed, step - 1)
            noise = Noise(kind, keys, before, scratch.noise, scratch.spare)
            take_step(own, plan, slopes, at, step, noise, at + 1 < steps and dense, scratch)
            for j in range(inputs):
                scratch.h[j] = scratch.next_x[j]
        return -1

    return learn


@inlined
def _step_by_hand(
    own: tuple[Memory, Recipe, int],
    plan: Integers,
    slopes: Floats,
    at: int,
    step: int,
    noise: Noise,
    look_ahead: bool,
    scratch: Scratch,
) -> None:
    memory, recipe, rows = own
    if recipe.rule == ADAMW:
        adamw_step(plan, slopes, memory, recipe, step, look_ahead, scratch)
    elif recipe.rule == UTILITY and not recipe.feature_wise:
        weight_wise_step(plan, slopes, memory, recipe, step, rows, noise, look_ahead, scratch)
    else:
        if recipe.rule == UTILITY:
            feature_gates(plan, slopes, memory, recipe, step, scratch)
        unit_wise_step(plan, slopes, memory, recipe, noise, look_ahead, scratch)


_learn_by_hand = learning_with(_step_by_hand)


@kept_on_disk(digest_of_sources(Path(__file__).parent))
def advance(
    plan: Integers,
    slopes: Floats,
    parameters: Floats,
    traces: Floats,
    second_moment: Floats,
    features: Floats,
    extremes: Floats,
    recipe: Recipe,
    learning: Learning,
    samples: Samples,
    floats: Floats,
    bytes_: Bytes,
) -> int:
    """Learn from all samples; see :func:`learning_with`.

    Args:
        parameters, traces, second_moment, features, extremes: the learner's state, see :class:`Memory`; the last,
            ``(2, rows)``, holds the largest and smallest utilities.
        recipe: the learner's rule and settings.
    """
    rows = extremes.shape[1]
    memory = Memory(
        start_of(parameters), start_of(traces), start_of(second_moment), start_of(features),
        start_of(extremes), skip(start_of(extremes), rows),
    )  # fmt: skip
    return _learn_by_hand(plan, slopes, parameters, learning, samples, floats, bytes_, (memory, recipe, rows))
