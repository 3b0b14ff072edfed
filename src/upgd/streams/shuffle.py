"""Random permutations as functions: of a task, all at once; of a data set, only where one looks."""

import math
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from upgd.noise import Purpose, words

__all__ = ["permutations", "sample_order"]

_MASK = 0xFFFFFFFF

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


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


def sample_order(
    seeds: Tensor,
    start: int,
    length: int,
    task_length: int,
    size: int,
    device: torch.device | str = "cpu",
    *,
    purpose: Purpose = Purpose.SAMPLE_ORDER,
) -> Tensor:
    """Which sample comes at each step: without replacement within a task.

    A task that is longer than the data set passes over it again and again, each time in a new order. The order of a pass
    is a random permutation, a function of (seed, number of the pass), that is evaluated only at the positions wanted:
    nobody shuffles 60 000 samples to use 5 000 of them.

    Args:
        seeds: int64 ``(seeds,)``, on the CPU.
        start: the first step.
        length: how many steps.
        task_length: steps per task.
        size: the number of samples.
        device: where to compute the order.
        purpose: what the order is for; orders for different purposes are independent.

    Returns:
        int64 ``(seeds, length)``, in [0, size).
    """
    passes_per_task = math.ceil(task_length / size)

    def number_of_pass(step: IntOrTensor) -> IntOrTensor:
        return step // task_length * passes_per_task + step % task_length // size

    steps = torch.arange(start, start + length, device=device)
    first, last = number_of_pass(start), number_of_pass(start + length - 1)
    high, low, rounds = _plan(size)
    # A few numbers for each pass: many small operations, which a GPU would take longer to start than a CPU to finish.
    keys = words(seeds[:, None], purpose, torch.arange(first, last + 1), rounds).movedim(-1, 0).to(device)
    if first < last:
        keys = keys[..., number_of_pass(steps) - first]
    place = _feistel(steps % task_length % size, keys, high, low)
    # Cycle walking: who lands beyond the data set walks on until inside, so that the result is a permutation again.
    while high * low > size and bool((outside := place >= size).any()):
        place = torch.where(outside, _feistel(place, keys, high, low), place)
    return place


def _feistel(position: Tensor, keys: Tensor, high: int, low: int) -> Tensor:
    """A permutation of 0 … high·low − 1, evaluated at the positions: the generalised Feistel network of Black and Rogaway.

    A position is a pair of digits, ``a·low + b``. Each round turns one of them by a random amount that depends on the
    other one and on the round's key, which can be undone: so the whole is a bijection whatever the amounts are.
    """
    a, b = position // low, position % low
    for key_a, key_b in zip(keys[0::2], keys[1::2], strict=True):
        a = _turned(a, _mixed(b ^ key_a), high)
        b = _turned(b, _mixed(a ^ key_b), low)
    return a * low + b


def _turned(digit: Tensor, word: Tensor, base: int) -> Tensor:
    """``digit`` plus an amount in [0, base) that a random 32-bit word gives, modulo ``base``."""
    turned = digit + (word * base >> 32)
    return torch.where(turned >= base, turned - base, turned)


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit word well mixed: the function lowbias32 of C. Wellons, which was found by search for the least bias."""
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    return word ^ word >> 16


@lru_cache
def _plan(size: int) -> tuple[int, int, int]:
    """Two bases of about √size whose product reaches ``size`` and hardly exceeds it, and how many rounds to go.

    Two positions that share a digit keep sharing it for another two rounds with a chance of 1/base; there are as many
    rounds as it takes to make that chance 2⁻²⁴ in all. The first base is even, since turns of odd bases alone make even
    permutations only.
    """
    root = math.isqrt(size - 1) + 1
    even = root + root % 2
    high = min(range(even, even + root // 8 + 1, 2), key=lambda base: base * math.ceil(size / base))
    low = math.ceil(size / high)
    return high, low, 2 * max(4, math.ceil(24 / math.log2(max(low, 2))))
