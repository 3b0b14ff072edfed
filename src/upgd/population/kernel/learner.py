"""The function that Python calls: advance one learner through a block of samples."""

from pathlib import Path
from typing import Any

import numpy as np

from upgd.kernels.machine import (
    Bytes,
    Doubles,
    Floats,
    Integers,
    digest_of_sources,
    kept_on_disk,
    skip,
    start_of,
)
from upgd.kernels.normals import step_keys
from upgd.population.kernel.layers import Noise, dot
from upgd.population.kernel.layout import ADAMW, UTILITY, Memory, Recipe, Samples, carve, layer_at
from upgd.population.kernel.sample import backward, forward, judge, load
from upgd.population.kernel.updates import adamw_step, feature_gates, unit_wise_step, weight_wise_step

__all__ = ["advance"]

_f: Any = np.float32


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
    samples: Samples,
    start: int,
    loss_sum: Doubles,
    correct: Integers,
    floats: Floats,
    bytes_: Bytes,
) -> int:
    """Learn from all samples; the first one is at step ``start`` of the stream.

    Args:
        plan, slopes: the layers, see :class:`Layer`.
        parameters, traces, second_moment, features, extremes: the learner's state, see :class:`Memory`; the last,
            ``(2, rows)``, holds the largest and smallest utilities.
        recipe, samples: the learner's specification and samples.
        loss_sum, correct: one number each, incremented in place.
        floats, bytes_: ``scratch_floats(…)`` zeros, and one byte per row.

    Returns:
        The step whose loss was not finite, at which learning stopped; −1 if there was none.
    """
    units, rows = features.size, extremes.shape[1]
    memory = Memory(
        start_of(parameters), start_of(traces), start_of(second_moment), start_of(features),
        start_of(extremes), skip(start_of(extremes), rows),
    )  # fmt: skip
    longest = max(plan[:, 0].max(), plan[:, 1].max())
    scratch = carve(start_of(floats), start_of(bytes_), units, rows, longest)
    for i in range(rows):
        scratch.ones[i] = _f(1)
    first, last = layer_at(plan, slopes, 0), layer_at(plan, slopes, len(plan) - 1)
    inputs, dense = first.outputs, first.kernel == 0
    d, s = skip(scratch.d, last.outputs), skip(scratch.s, last.outputs)
    steps = max(samples.classes.shape[0], samples.values.shape[0])

    load(samples, 0, scratch.h, inputs)
    if dense:
        for i in range(first.rows):
            weights = skip(memory.parameters, first.weight + i * first.columns)
            scratch.first_dot[i] = dot(weights, scratch.h, first.columns)
    for at in range(steps):
        forward(plan, slopes, memory.parameters, scratch)
        loss, right = judge(samples, at, skip(scratch.h, last.outputs), last.rows, d, s)
        if not np.isfinite(loss):
            return start + at
        loss_sum[0] += loss
        correct[0] += right
        backward(plan, slopes, memory.parameters, recipe.second_order, scratch)
        look_ahead = at + 1 < steps and dense
        if at + 1 < steps:
            load(samples, at + 1, scratch.next_x, inputs)
        step = start + at + 1
        kind = 1 if step == 1 and recipe.noise == 2 else recipe.noise  # ζ₀ = 0
        keys, before = step_keys(recipe.seed, step), step_keys(recipe.seed, step - 1)
        noise = Noise(kind, keys, before, scratch.noise, scratch.spare)
        if recipe.rule == ADAMW:
            adamw_step(plan, slopes, memory, recipe, step, look_ahead, scratch)
        elif recipe.rule == UTILITY and not recipe.feature_wise:
            weight_wise_step(plan, slopes, memory, recipe, step, rows, noise, look_ahead, scratch)
        else:
            if recipe.rule == UTILITY:
                feature_gates(plan, slopes, memory, recipe, step, scratch)
            unit_wise_step(plan, slopes, memory, recipe, noise, look_ahead, scratch)
        for j in range(inputs):
            scratch.h[j] = scratch.next_x[j]
    return -1
