"""Noise: from torch's generators for the optimizers, from a counter for everything that must be repeatable anywhere.

The optimizers draw with torch's own generators, as torch users expect (:func:`white_`). Experiments need more: initial
weights, task permutations, sample order and noise that depend on nothing but (seed, purpose, step, index), so that a
learner runs the same alone or among five hundred others, resumed after a crash, on one worker or ten. That is what the
counter-based generator Philox 4×32-10 gives (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 bits
of counter and 64 bits of key in, 128 random bits out, no state. The layout, the same for every backend::

    key      seed (low word), seed (high word)
    counter  index // 4, step (low word), step (high word), purpose        → words for index 4·(index // 4) + {0, 1, 2, 3}

Words become standard normals in pairs by the Box–Muller transform; see :func:`box_muller`.
"""

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Purpose", "anticorrelated", "box_muller", "normals", "philox", "uniforms", "white_", "words"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a random number is for; different purposes never share one."""

    INITIAL_WEIGHTS = 0
    NOISE = 1
    TASK = 2
    SAMPLE_ORDER = 3
    INPUTS = 4


def white_(out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill ``out`` with standard normals and return it.

    A generator may live on another device than ``out``: the numbers are then drawn there and copied, so that one CPU
    generator gives the same noise wherever the parameters are.
    """
    if generator is None or generator.device.type == out.device.type:
        return out.normal_(generator=generator)
    return out.copy_(torch.empty_like(out, device=generator.device).normal_(generator=generator))


def anticorrelated(current: Tensor, previous: Tensor) -> Tensor:
    """The noise ``ξ_t = ζ_t − ζ_{t−1}`` from two successive white draws; ``ζ_0 = 0``, so the sum of all ξ is the last ζ."""
    return current - previous


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, ...]:
    """Philox 4×32: four counter words and two key words to four random words.

    All words are int64 tensors that hold values in [0, 2³²) and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The products wrap around in int64; their bits are those of the unsigned product all the same.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) & _MASK ^ c1 ^ k0, right & _MASK, (left >> 32) & _MASK ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Random 32-bit words for the indices 0 … count − 1, as int64 in [0, 2³²).

    ``seed`` and ``step`` are integers or integer tensors that broadcast against each other; their common shape comes first
    in the result, ``(*shape, count)``.
    """
    seed, step = torch.broadcast_tensors(torch.as_tensor(seed, device=device), torch.as_tensor(step, device=device))
    seed, step = seed.long().unsqueeze(-1), step.long().unsqueeze(-1)
    block = torch.arange((count + 3) // 4, device=seed.device)
    counter = (block, step & _MASK, (step >> 32) & _MASK, torch.full_like(step, int(purpose)))
    drawn = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(torch.broadcast_tensors(*drawn), -1).flatten(-2)[..., :count]


def uniforms(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Uniform numbers in (0, 1), float64: the midpoints ``(word + ½) / 2³²``. Arguments as for :func:`words`."""
    return (words(seed, purpose, step, count, device=device).double() + 0.5) * 2.0**-32


def box_muller(uniform: Tensor) -> Tensor:
    """Turn uniforms, an even number along the last dimension, into standard normals: each pair (a, b) becomes
    ``√(−2 ln a)·(cos 2πb, sin 2πb)``."""
    a, b = uniform[..., 0::2], uniform[..., 1::2]
    radius, angle = torch.sqrt(-2 * torch.log(a)), 2 * torch.pi * b
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1).flatten(-2)


def normals(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Standard normals, float64. Arguments as for :func:`words`."""
    return box_muller(uniforms(seed, purpose, step, count + count % 2, device=device))[..., :count]
