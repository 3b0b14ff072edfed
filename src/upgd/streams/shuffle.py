"""Random permutations as pure functions, including one that can be evaluated at single positions."""

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
    """Return a uniformly random permutation of 0 … size − 1 for every (seed, task).

    The permutation sorts 64-bit random keys, each made of two words of (seed, ``Purpose.TASK``, step = task). The sort is
    stable, so even ties between keys (probability 10⁻¹³ for 784 entries) are resolved the same way on every device.

    Args:
        seeds: int64, any shape that broadcasts against ``tasks``.
        tasks: int64.
        size: number of entries.

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
    """Return the index of the sample at each step, drawn without replacement within a task.

    A task longer than the data set makes several passes over it, each in a new order. The order of a pass is a random
    permutation, a function of (seed, pass number), and is evaluated only at the requested positions: using 5,000 of
    60,000 samples does not shuffle all of them.

    Args:
        seeds: int64 ``(seeds,)``, on the CPU.
        start: the first step.
        length: number of steps.
        task_length: number of steps per task.
        size: number of samples in the data set.
        device: device of the result.
        purpose: random stream of the order; orders with different purposes are independent.

    Returns:
        int64 ``(seeds, length)``, in [0, size).
    """
    passes_per_task = math.ceil(task_length / size)

    def number_of_pass(step: IntOrTensor) -> IntOrTensor:
        return step // task_length * passes_per_task + step % task_length // size

    steps = torch.arange(start, start + length, device=device)
    first, last = number_of_pass(start), number_of_pass(start + length - 1)
    high, low, rounds = _plan(size)
    # Many operations on a few numbers per pass: launching them on a GPU would take longer than computing on the CPU.
    keys = words(seeds[:, None], purpose, torch.arange(first, last + 1), rounds).movedim(-1, 0).to(device)
    if first < last:
        keys = keys[..., number_of_pass(steps) - first]
    place = _feistel(steps % task_length % size, keys, high, low)
    # Cycle walking: apply the permutation again to positions outside the data set, which restricts it to 0 … size − 1.
    while high * low > size and bool((outside := place >= size).any()):
        place = torch.where(outside, _feistel(place, keys, high, low), place)
    return place


def _feistel(position: Tensor, keys: Tensor, high: int, low: int) -> Tensor:
    """Evaluate a permutation of 0 … high·low − 1, the generalized Feistel network of Black and Rogaway.

    A position is a pair of digits, ``a·low + b``. Each round rotates one digit by a pseudorandom amount that depends on the
    other digit and the round key. Each round is invertible, so the network is a bijection.
    """
    a, b = position // low, position % low
    for key_a, key_b in zip(keys[0::2], keys[1::2], strict=True):
        a = _turned(a, _mixed(b ^ key_a), high)
        b = _turned(b, _mixed(a ^ key_b), low)
    return a * low + b


def _turned(digit: Tensor, word: Tensor, base: int) -> Tensor:
    """Return ``digit`` plus an amount in [0, base), derived from a random 32-bit word, modulo ``base``."""
    turned = digit + (word * base >> 32)
    return torch.where(turned >= base, turned - base, turned)


def _mixed(word: Tensor) -> Tensor:
    """Mix the bits of a 32-bit word with C. Wellons' lowbias32, a hash function found by searching for low bias."""
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    return word ^ word >> 16


@lru_cache
def _plan(size: int) -> tuple[int, int, int]:
    """Return two bases close to √size whose product is slightly above ``size``, and the number of Feistel rounds.

    Two positions that share a digit still share it after another two rounds with probability 1/base. The number of rounds
    reduces this probability to 2⁻²⁴ in total. The first base is even, because rotations with odd bases alone produce only
    even permutations.
    """
    root = math.isqrt(size - 1) + 1
    even = root + root % 2
    high = min(range(even, even + root // 8 + 1, 2), key=lambda base: base * math.ceil(size / base))
    low = math.ceil(size / high)
    return high, low, 2 * max(4, math.ceil(24 / math.log2(max(low, 2))))
