"""Random permutations as functions: of a task, all at once; of a data set, only where one looks."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from upgd.noise import Purpose, words

__all__ = ["permutations", "sample_order"]

_MASK = 0xFFFFFFFF
_ROUNDS = 12


def permutations(seeds: Tensor, tasks: Tensor, size: int) -> Tensor:
    """A uniformly random permutation of 0 … size − 1 for every (seed, task).

    It sorts 64-bit random keys, two words of (seed, ``Purpose.TASK``, step = task) for each entry. The sort is stable,
    so that even equal keys, one case in 10¹³ for 784 entries, have one answer on every device.

    Args:
        seeds: int64, any shape that broadcasts against ``tasks``.
        tasks: int64.
        size: the number of entries.

    Returns:
        int64 ``(*shape, size)``.
    """
    pairs = words(seeds, Purpose.TASK, tasks.to(seeds.device), 2 * size)
    keys = pairs[..., 0::2] << 32 | pairs[..., 1::2]
    return keys.argsort(dim=-1, stable=True)


def sample_order(seeds: Tensor, steps: Tensor, task_length: int, size: int) -> Tensor:
    """Which sample comes at each step: without replacement within a task.

    A task that is longer than the data set passes over it again and again, each time in a new order.

    Args:
        seeds: int64 ``(seeds,)``.
        steps: int64 ``(steps,)``, consecutive and ascending.
        task_length: steps per task.
        size: the number of samples.

    Returns:
        int64 ``(seeds, steps)``, in [0, size).
    """
    task, within = steps // task_length, steps % task_length
    lap, position = within // size, within % size
    laps, which = torch.unique_consecutive(task << 32 | lap, return_inverse=True)
    keys = words(seeds[:, None], Purpose.SAMPLE_ORDER, laps, _ROUNDS)
    return _shuffled(position, keys[:, which].unbind(-1), size)


def _shuffled(position: Tensor, keys: tuple[Tensor, ...], size: int) -> Tensor:
    high, low = _factors(size)
    place = _feistel(position, keys, high, low)
    if high * low > size:
        # Cycle walking: whoever lands outside goes on until it is inside; the result is a permutation again.
        while bool((outside := place >= size).any()):
            place = torch.where(outside, _feistel(place, keys, high, low), place)
    return place


def _feistel(position: Tensor, keys: tuple[Tensor, ...], high: int, low: int) -> Tensor:
    a, b = position // low, position % low
    for i in range(0, len(keys), 2):
        a = _rotated(a, _mixed(b ^ keys[i]), high)
        b = _rotated(b, _mixed(a ^ keys[i + 1]), low)
    return a * low + b


def _rotated(value: Tensor, word: Tensor, modulus: int) -> Tensor:
    moved = value + (word * modulus >> 32)
    return torch.where(moved >= modulus, moved - modulus, moved)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    return word ^ word >> 16


@lru_cache
def _factors(size: int) -> tuple[int, int]:
    """Two numbers of about √size with a product of at least ``size``, and as close to it as they can be."""
    root = math.isqrt(size - 1) + 1
    high = min(range(root, root + root // 4 + 1), key=lambda h: h * -(-size // h))
    return high, -(-size // high)
