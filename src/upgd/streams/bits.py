"""Slowly changing regression, also known as bit flipping."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from upgd.noise import Purpose, words
from upgd.streams.contract import (
    Chunk,
    Device,
    Loss,
    checked_count,
    checked_task_length,
    described,
    seed_tensor,
    step_tensor,
)

__all__ = ["BitFlipping"]

#: The slow bits are the cumulative sum of all earlier flips, so they are cached after every block of this many flips. At
#: most 512 blocks are supported.
_FLIPS_AT_ONCE = 1 << 15
_MOST_FLIPS = 512 * _FLIPS_AT_ONCE


class BitFlipping:
    """Regression on slowly flipping bits, with a fixed random network as the target.

    The target network is too complex for the learner to represent exactly, so the learner has to keep tracking it.

    This is the slowly changing regression problem of Dohare et al. ("Continual backprop", 2021; "Loss of plasticity in
    deep continual learning", 2024). The first ``flipping`` of the ``bits`` inputs are constant for ``task_length`` steps;
    then one of them, chosen at random, flips. The other bits are redrawn at every step. The target is the output of a
    network of ``units`` linear threshold units with weights and biases of ±1. A unit outputs 1 if more than a fraction
    ``beta`` of its inputs, including the bias, agree in sign with their weights, and 0 otherwise. The output layer sums
    the units with weights ±1 and adds a bias of ±1.

    Args:
        bits: Number of inputs, m.
        flipping: Number of slowly flipping inputs, f; at least 1.
        task_length: Number of steps between flips, T.
        units: Number of threshold units in the target network.
        beta: Fraction of a unit's inputs that must agree with its weights, β.

    Example:
        >>> BitFlipping(bits=20).chunk(seeds=[0], start=0, length=3).inputs().shape
        torch.Size([1, 3, 20])
    """

    name = "bit-flipping"
    outputs = 1
    loss: Loss = "mse"
    __repr__ = described

    def __init__(
        self, *, bits: int = 20, flipping: int = 15, task_length: int = 10_000, units: int = 100, beta: float = 0.7
    ) -> None:
        self.bits = checked_count("bits", bits, 1, 10_000)
        self.flipping = checked_count("flipping", flipping, 1, self.bits)
        self.units = checked_count("units", units, 1, 10_000)
        if not (isinstance(beta, int | float) and math.isfinite(beta)):
            raise ValueError(f"beta must be a finite number, such as 0.7, not {beta!r}")
        self.beta = float(beta)
        self.input_shape: tuple[int, ...] = (self.bits,)
        self.task_length = checked_task_length(task_length)

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        of_seeds, steps = seed_tensor(seeds), step_tensor(start, length, device)
        first = start // self.task_length
        task = steps // self.task_length - first
        slow = self._slow_bits(of_seeds, first, (start + length - 1) // self.task_length).to(steps.device)[:, task]
        fast = _bits(words(of_seeds.to(steps.device)[:, None], Purpose.INPUTS, steps, self.bits - self.flipping))
        inputs = torch.cat((slow, fast), -1).float()
        return Chunk(start=start, targets=self._targets(of_seeds, inputs), dense=inputs, task=task)

    def _slow_bits(self, seeds: Tensor, first: int, last: int) -> Tensor:
        """Return the slow bits after ``first`` to ``last`` flips, of shape ``(seeds, last − first + 1, flipping)``."""
        if last >= _MOST_FLIPS:
            raise ValueError(
                f"bit-flipping supports at most {_MOST_FLIPS:,} flips, not {last:,}; use a larger task_length"
            )
        block = first // _FLIPS_AT_ONCE
        before = torch.stack([_after_blocks(int(seed), self.flipping, block) for seed in seeds])
        changes = _changes(seeds, self.flipping, block * _FLIPS_AT_ONCE, last)
        return (before[:, None] + changes.cumsum(1))[:, first - block * _FLIPS_AT_ONCE :] % 2

    def _targets(self, seeds: Tensor, inputs: Tensor) -> Tensor:
        """Return targets of shape ``(seeds, length, 1)``.

        Every sum is over a few small integers, so it is exact and identical on every device.
        """
        inner = words(seeds[:, None], Purpose.TARGET, torch.arange(self.units), self.bits + 1)
        outer = words(seeds, Purpose.TARGET, self.units, self.units + 1)
        inner, outer = (_bits(drawn).to(inputs) * 2 - 1 for drawn in (inner, outer))
        # An input of 1 agrees with a weight of 1, an input of 0 with a weight of −1. The input of the bias is always 1.
        agreeing = inputs @ inner[..., :-1].mT + (inner < 0).sum(-1)[:, None] + inner[:, None, :, -1]
        active = (agreeing.double() > self.beta * (self.bits + 1)).to(inputs)
        return active @ outer[:, :-1, None] + outer[:, None, -1:]


def _bits(drawn: Tensor) -> Tensor:
    """Return the top bit of each random word."""
    return drawn >> 31


def _changes(seeds: Tensor, flipping: int, first: int, last: int) -> Tensor:
    """Return which bit each flip changes, one-hot, of shape ``(seeds, last − first + 1, flipping)``.

    Flip 0 is the random initial state.
    """
    flips = torch.arange(max(first, 1), last + 1)
    which = words(seeds[:, None], Purpose.TASK, flips, 1).squeeze(-1) * flipping >> 32
    changes = torch.nn.functional.one_hot(which, flipping)
    if first > 0:
        return changes
    return torch.cat((_bits(words(seeds[:, None], Purpose.TASK, torch.zeros(1).long(), flipping)), changes), 1)


@lru_cache(maxsize=4096)
def _after_blocks(seed: int, flipping: int, blocks: int) -> Tensor:
    """Return the slow bits of a seed before block ``blocks`` of its flips, of shape ``(flipping,)``; zeros for block 0."""
    if blocks == 0:
        return torch.zeros(flipping, dtype=torch.long)
    first = (blocks - 1) * _FLIPS_AT_ONCE
    changes = _changes(torch.tensor([seed]), flipping, first, first + _FLIPS_AT_ONCE - 1)
    return (_after_blocks(seed, flipping, blocks - 1) + changes[0].sum(0)) % 2
