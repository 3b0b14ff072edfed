"""Noise: from torch's generators for the optimizers, from a counter for everything that must be repeatable anywhere.

The optimizers draw with torch's own generators, as torch users expect (:func:`white_`). With a seed of their own, sharded or
fused, they use :func:`parameter_normals`, which any process can compute for its part. Experiments need more: initial
weights, task permutations, sample order and noise that depend on nothing but (seed, purpose, step, index), so that a
learner runs the same alone or among five hundred others, resumed after a crash, on one worker or ten. That is what the
counter-based generator Philox 4×32-10 gives (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 bits
of counter and 64 bits of key in, 128 random bits out, no state. The layout, the same for every backend::

    key      seed (low word), seed (high word)
    counter  index // 4, step (low word), step (high word), purpose        → words for index 4·(index // 4) + {0, 1, 2, 3}

Words become standard normals in pairs by the Box–Muller transform; see :func:`box_muller`.

The noise of learners, one normal for every parameter at every step, is most of the work of a population, so it has a
cheaper generator: Philox only makes the keys of a step, see :func:`learner_normals`. That of an optimizer's parameters
(:func:`parameter_normals`) is made in the same way, from keys for each parameter.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

__all__ = [
    "Purpose",
    "anticorrelated",
    "box_muller",
    "learner_keys",
    "learner_normals",
    "learner_normals_at",
    "learner_words",
    "normals",
    "parameter_keys",
    "parameter_normals",
    "parameter_normals_within",
    "philox",
    "uniforms",
    "uniforms_at",
    "white_",
    "words",
]

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
    RESET = 5
    UNITS = 6
    TARGET = 7
    LABELS = 8
    SUBSET = 9
    MIXTURE = 10
    PARAMETER = 11


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
    if device is None:
        device = next((value.device for value in (seed, step) if isinstance(value, Tensor)), None)
    seed, step = (torch.as_tensor(value, device=device).long().unsqueeze(-1) for value in (seed, step))
    block = torch.arange((count + 3) // 4, device=seed.device)
    counter = (block, step & _MASK, (step >> 32) & _MASK, torch.full_like(step, int(purpose)))
    # After ten rounds every word depends on block, step and seed, so all four have their common shape.
    drawn = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(drawn, -1).flatten(-2)[..., :count]


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


#: The multipliers of the learners' noise: first round, radius, angle. The first two are the best of a search for 32-bit
#: mixers (Wellons, hash-prospector), the third comes from the same search.
MIXERS = (0x21F0AAAD, 0xD35A2D97, 0x846CA68B)


def learner_words(
    seed: Tensor | int, step: Tensor | int, pairs: int, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Two random words, *radius* and *angle*, for each of the pairs 0 … pairs − 1 of normals; int32, read as unsigned.

    Philox turns (seed, step) into four keys ``k₀ … k₃ = words(seed, Purpose.NOISE, step, 4)``. Two sequences with odd
    steps that the keys choose then count through the pairs j, and multiplications mix them (all modulo 2³²)::

        x = k₀ + j·(k₁ | 1)     x ← (x ⊕ x≫16)·0x21F0AAAD     s = x ⊕ x≫15
        r = s·0xD35A2D97                              radius = r ⊕ r≫15
        a = (s ⊕ (k₂ + j·(k₃ | 1)))·0x846CA68B        angle  = a ⊕ a≫16

    ``seed`` and ``step`` are as for :func:`words`; the results have the shape ``(*shape, pairs)``.
    """
    k0, k1, k2, k3 = learner_keys(seed, step, device=device).unsqueeze(-1).unbind(-2)
    return _mixed(k0, k1, k2, k3, torch.arange(pairs, dtype=torch.int32, device=k0.device))


def learner_normals(
    seed: Tensor | int,
    step: Tensor | int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The update noise ζ of learners: standard normals for the parameter entries 0 … count − 1, at step t = 1, 2, ….

    This is the one definition for every backend. An entry's index counts through the learner's parameters, flattened in
    the order of ``model.parameters()``. The words of :func:`learner_words` for pair j give the entries 2j and 2j + 1::

        u = float32(radius≫1 | 1) · 2⁻³¹        in (0, 1]; the rounding to float32 is part of the definition
        θ = π · int32(angle) · 2⁻³²             in [−π/2, π/2)
        ζ₂ⱼ = ±√(−2 ln u)·cos θ     ζ₂ⱼ₊₁ = √(−2 ln u)·sin θ      minus where the angle word is odd

    The tails reach √(62 ln 2) = 6.55 standard deviations. In float32 the values differ from those in float64 by rounding
    alone. docs/noise.md shows what the generator has been tested for.

    Args:
        seed: The learners' seeds, an integer or an integer tensor.
        step: Steps, likewise; both broadcast against each other.
        count: How many entries a learner has.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: Where to compute; by default where the tensors are.

    Returns:
        A tensor of shape ``(*shape, count)``, where shape is the common shape of ``seed`` and ``step``.

    Example:
        >>> learner_normals(seed=7, step=1, count=4).shape
        torch.Size([4])
        >>> learner_normals(torch.arange(20), step=1, count=282_160).shape
        torch.Size([20, 282160])
    """
    return _normals_of(*learner_words(seed, step, (count + 1) // 2, device=device), dtype)[..., :count]


def _normals_of(radius_word: Tensor, angle_word: Tensor, dtype: torch.dtype) -> Tensor:
    """The normals of pairs, two for each, from their words."""
    uniform = _shifted(radius_word, 1).bitwise_or_(1).to(torch.float32).mul_(2.0**-31)
    radius = uniform.to(dtype).log_().mul_(-2).sqrt_()
    angle = angle_word.to(dtype).mul_(torch.pi * 2.0**-32)
    sign = 1 - 2 * (angle_word & 1)
    return torch.stack((torch.cos(angle).mul_(radius).mul_(sign), angle.sin_().mul_(radius)), -1).flatten(-2)


def learner_keys(seed: Tensor | int, step: Tensor | int, *, device: torch.device | str | None = None) -> Tensor:
    """The four keys of :func:`learner_words`, int32; seeds and steps as for :func:`words`."""
    return words(seed, Purpose.NOISE, step, 4, device=device).to(torch.int32)


def learner_normals_at(keys: Tensor, index: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some entries of :func:`learner_normals`, each computed on its own: twice the work, but nothing that a compiler could
    not fuse with what the numbers are for.

    Args:
        keys: what :func:`learner_keys` gives for the learners and one step, ``(learners, 4)``.
        index: int32, which entries, any shape.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        A tensor of shape ``(learners, *index.shape)``.
    """
    k0, k1, k2, k3 = (key.view(-1, *(1,) * index.ndim) for key in keys.unbind(-1))
    radius_word, angle_word = _mixed(k0, k1, k2, k3, index >> 1)
    uniform = (_shifted(radius_word, 1) | 1).to(torch.float32) * 2.0**-31
    half_turns = angle_word.to(dtype) * 2.0**-32
    # cos πy = sin π(½ − |y|) where |y| ≤ ½: one function for both entries of a pair.
    size = _radius(uniform.to(dtype)) * _sine(torch.where((index & 1) == 1, half_turns, 0.5 - half_turns.abs()))
    return torch.where((angle_word & ~index & 1) == 1, -size, size)


def parameter_keys(
    seed: Tensor | int, step: Tensor | int, number: Tensor | int, *, device: torch.device | str | None = None
) -> Tensor:
    """The four keys of a parameter's noise at a step, int32: Philox with the seed as key and the counter (number, step low,
    step high, ``Purpose.PARAMETER``).

    Args:
        seed: The optimizer's seed, an integer or an integer tensor.
        step: How many steps the parameter has taken, this one included; likewise, or a float tensor as optimizers keep it.
        number: The parameter's place among all parameters of the optimizer, from 0; likewise.
        device: Where to compute; by default where the tensors are.

    Returns:
        A tensor of shape ``(*shape, 4)``, where shape is the common shape of the arguments.
    """
    if device is None:
        device = next((value.device for value in (seed, step, number) if isinstance(value, Tensor)), None)
    seed, step, number = (torch.as_tensor(value, device=device).long() for value in (seed, step, number))
    counter = (number & _MASK, step & _MASK, (step >> 32) & _MASK, torch.full_like(step, int(Purpose.PARAMETER)))
    return torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), -1).to(torch.int32)


#: How many normals :func:`parameter_normals` makes at once: on the CPU what stays in the cache, elsewhere what bounds the
#: temporaries.
_AT_ONCE = {"cpu": 1 << 16}
_AT_ONCE_ELSEWHERE = 1 << 24


def parameter_normals(
    seed: Tensor | int,
    step: Tensor | int,
    number: int,
    start: int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The noise ζ of an optimizer's parameter: standard normals for its entries start … start + count − 1.

    This is the one definition for every device, kernel and number of processes. An entry's index counts through the whole
    parameter in row-major order, also where a process has only a shard of it. The entries 2j and 2j + 1 are computed
    from the keys of :func:`parameter_keys` as :func:`learner_normals` computes those of a learner.

    Args:
        seed, step, number: as for :func:`parameter_keys`, without dimensions.
        start: The first entry.
        count: How many entries.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: Where to compute; by default where the tensors are.

    Example:
        >>> whole = parameter_normals(seed=7, step=1, number=0, start=0, count=10)
        >>> torch.equal(parameter_normals(7, 1, 0, start=3, count=5), whole[3:8])
        True
    """
    keys = parameter_keys(seed, step, number, device=device)
    return parameter_normals_within(keys, (start + count,), (start,), (count,), dtype=dtype)


def parameter_normals_within(
    keys: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The entries of :func:`parameter_normals` in a box within a parameter, such as a shard.

    Args:
        keys: what :func:`parameter_keys` gives for one parameter and step.
        shape: The shape of the parameter.
        offset: The first index of the box along each dimension.
        size: How many entries the box has along each dimension.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        A tensor of shape ``size``.
    """
    out = torch.empty(tuple(size), dtype=dtype, device=keys.device)
    if not out.numel():
        return out
    # The box is in one piece behind the last dimension that it has only part of; the pieces are `run` entries long.
    split = max((dim for dim, length in enumerate(shape) if size[dim] < length), default=0)
    run = math.prod(size[split:])
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(begin * step for begin, step in zip(offset, stride, strict=True))
    starts = torch.full((1,), start, device=keys.device)
    for dim in range(split):
        starts = (starts[:, None] + torch.arange(size[dim], device=keys.device) * stride[dim]).flatten()
    # Where a piece starts at an odd entry, it begins with the second normal of a pair.
    odd = (starts & 1).bool()[:, None] if any(step % 2 for step in stride[:split]) else bool(start % 2)
    # A compiler needs no blocks: it makes one loop of all this.
    at_once = _AT_ONCE.get(keys.device.type, _AT_ONCE_ELSEWHERE) if not torch.compiler.is_compiling() else out.numel()
    pieces = out.view(-1, run)
    k0, k1, k2, k3 = keys.unbind(-1)
    for first in range(0, run, at_once):
        length = min(at_once, run - first)
        pairs = torch.arange(first // 2, first // 2 + length // 2 + 1, device=keys.device)
        rows = max(1, at_once // length)
        for row in range(0, len(starts), rows):
            block = slice(row, row + rows)
            # Only the low 32 bits of a pair's number matter.
            words = _mixed(k0, k1, k2, k3, (starts[block, None] // 2 + pairs).to(torch.int32))
            normals = _normals_of(*words, dtype)
            even, shifted = normals[:, :length], normals[:, 1 : length + 1]
            pieces[block, first : first + length] = (
                torch.where(odd[block], shifted, even) if isinstance(odd, Tensor) else shifted if odd else even
            )
    return out


def uniforms_at(keys: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers in (0, 1], float32, each computed on its own from four keys; see :func:`learner_normals_at`."""
    k0, k1, k2, k3 = (key.view(-1, *(1,) * index.ndim) for key in keys.unbind(-1))
    radius_word, _ = _mixed(k0, k1, k2, k3, index)
    return (_shifted(radius_word, 1) | 1).to(torch.float32) * 2.0**-31


def _radius(uniform: Tensor) -> Tensor:
    """√(−2 ln u)."""
    squared = -2 * torch.log(uniform)
    if squared.dtype == torch.float64:
        return torch.sqrt(squared)
    # A GPU has an instruction for 1/√, and takes ten for the exact root.
    return squared * torch.rsqrt(squared.clamp(min=1e-30))


def _sine(half_turns: Tensor) -> Tensor:
    """sin πy for |y| ≤ ½, in float32 by a polynomial whose own error is 3·10⁻⁹: torch's function has all angles in mind."""
    if half_turns.dtype == torch.float64:
        return torch.sin(torch.pi * half_turns)
    squared = half_turns**2
    result = squared * 0.07722012892599801 - 0.598045174108941
    for coefficient in (2.5500313772784837, -5.1677068789262925, 3.1415925800447253):
        result = result * squared + coefficient
    return result * half_turns


def _mixed(k0: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The radius and angle words of :func:`learner_words` for pairs j, from the four keys."""
    first, radius, angle = (_as_int32(m) for m in MIXERS)
    # Products and sums wrap around in int32; their bits are those of unsigned arithmetic all the same.
    mixed = _fold_(_fold_(k0 + j * (k1 | 1), 16).mul_(first), 15)
    counted = k2 + j * (k3 | 1)
    return _fold_(mixed * radius, 15), _fold_(counted.bitwise_xor_(mixed).mul_(angle), 16)


def _as_int32(word: int) -> int:
    """The signed number with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    """The logical right shift of int32 words, which torch shifts with their sign."""
    return (word >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _fold_(word: Tensor, bits: int) -> Tensor:
    """``x ⊕ x≫bits`` in place: the high bits, which a product mixes well, reach the low ones."""
    return word.bitwise_xor_(_shifted(word, bits))
