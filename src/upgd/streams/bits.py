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

#: Where the slow bits stand is remembered after every so many flips, and there are no more flips than that many times 512:
#: the bits are the sum of all flips before.
_FLIPS_AT_ONCE = 1 << 15
_MOST_FLIPS = 512 * _FLIPS_AT_ONCE


class BitFlipping:
    """Regression on bits of which some flip slowly; the target, a fixed random network, is too rich for the learner.

    The slowly changing regression problem of Dohare et al. ("Continual backprop", 2021; "Loss of plasticity in deep
    continual learning", 2024). The first ``flipping`` of the ``bits`` inputs stay as they are for ``task_length`` steps, then
    one of them, at random, flips. The other bits are random at every step. The target is the output of ``units`` linear
    threshold units with weights ±1, biases included: a unit is 1 if more than the share ``beta`` of its inputs and its bias
    agree with the signs of their weights, else 0, and the output is the sum of the units times ±1, plus a bias of ±1.

    Args:
        bits: m, how many inputs.
        flipping: f, how many of them flip slowly; 1 or more.
        task_length: T, how many steps pass from one flip to the next.
        units: how many threshold units the target has.
        beta: β, how many of a unit's inputs must agree.
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
        """The samples of ``seeds`` at the steps ``start … start + length − 1``."""
        of_seeds, steps = seed_tensor(seeds), step_tensor(start, length, device)
        first = start // self.task_length
        task = steps // self.task_length - first
        slow = self._slow_bits(of_seeds, first, (start + length - 1) // self.task_length).to(steps.device)[:, task]
        fast = _bits(words(of_seeds.to(steps.device)[:, None], Purpose.INPUTS, steps, self.bits - self.flipping))
        inputs = torch.cat((slow, fast), -1).float()
        return Chunk(start=start, targets=self._targets(of_seeds, inputs), dense=inputs, task=task)

    def _slow_bits(self, seeds: Tensor, first: int, last: int) -> Tensor:
        """``(seeds, last − first + 1, flipping)``: the slow bits after ``first`` to ``last`` flips."""
        if last >= _MOST_FLIPS:
            raise ValueError(
                f"bit-flipping counts {_MOST_FLIPS:,} flips at most, fewer than {last:,}; use a larger task_length"
            )
        block = first // _FLIPS_AT_ONCE
        before = torch.stack([_after_blocks(int(seed), self.flipping, block) for seed in seeds])
        changes = _changes(seeds, self.flipping, block * _FLIPS_AT_ONCE, last)
        return (before[:, None] + changes.cumsum(1))[:, first - block * _FLIPS_AT_ONCE :] % 2

    def _targets(self, seeds: Tensor, inputs: Tensor) -> Tensor:
        """``(seeds, length, 1)``. All sums are of a few integers, so that every device gives the same."""
        inner = words(seeds[:, None], Purpose.TARGET, torch.arange(self.units), self.bits + 1)
        outer = words(seeds, Purpose.TARGET, self.units, self.units + 1)
        inner, outer = (_bits(drawn).to(inputs) * 2 - 1 for drawn in (inner, outer))
        # An input agrees with a weight of 1 if it is 1, and with one of −1 if it is 0; the bias' input is always 1.
        agreeing = inputs @ inner[..., :-1].mT + (inner < 0).sum(-1)[:, None] + inner[:, None, :, -1]
        active = (agreeing.double() > self.beta * (self.bits + 1)).to(inputs)
        return active @ outer[:, :-1, None] + outer[:, None, -1:]


def _bits(drawn: Tensor) -> Tensor:
    """Random bits from random words."""
    return drawn >> 31


def _changes(seeds: Tensor, flipping: int, first: int, last: int) -> Tensor:
    """``(seeds, last − first + 1, flipping)``: 1 for what each of these flips flips. Number 0 is where the bits begin."""
    flips = torch.arange(max(first, 1), last + 1)
    which = words(seeds[:, None], Purpose.TASK, flips, 1).squeeze(-1) * flipping >> 32
    changes = torch.nn.functional.one_hot(which, flipping)
    if first > 0:
        return changes
    return torch.cat((_bits(words(seeds[:, None], Purpose.TASK, torch.zeros(1).long(), flipping)), changes), 1)


@lru_cache(maxsize=4096)
def _after_blocks(seed: int, flipping: int, blocks: int) -> Tensor:
    """``(flipping,)``: the slow bits of a seed before block number ``blocks`` of its flips; 0 before the first."""
    if blocks == 0:
        return torch.zeros(flipping, dtype=torch.long)
    first = (blocks - 1) * _FLIPS_AT_ONCE
    changes = _changes(torch.tensor([seed]), flipping, first, first + _FLIPS_AT_ONCE - 1)
    return (_after_blocks(seed, flipping, blocks - 1) + changes[0].sum(0)) % 2
