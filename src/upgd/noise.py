"""Random numbers: torch's generators for the optimizers, and a counter-based generator for reproducible experiments.

By default, the optimizers draw from torch's generators, as torch users expect (:func:`white_`). With a seed, sharded or
fused, they use :func:`parameter_normals`, which any process can compute for its shard. Experiments need more: initial
weights, task permutations, sample order and noise must depend only on (seed, purpose, step, index), so that a learner gives
the same results alone or in a population, after a resume, and on any number of workers. The counter-based generator Philox
4×32-10 provides this (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). It maps 128 bits of counter and
64 bits of key to 128 random bits and has no state. All backends use the same layout::

    key      seed (low word), seed (high word)
    counter  index // 4, step (low word), step (high word), purpose        → words for index 4·(index // 4) + {0, 1, 2, 3}

Pairs of words are converted to standard normals by the Box–Muller transform; see :func:`box_muller`.

The noise of learners, one normal per parameter and step, dominates the cost of a population, so it uses a cheaper
generator, for which Philox only provides the keys of a step; see :func:`learner_normals`. The noise of an optimizer's
parameters (:func:`parameter_normals`) is generated in the same way, from keys for each parameter.
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
    "rounding_words",
    "uniforms",
    "uniforms_at",
    "white_",
    "words",
]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a random number is used for. Different purposes have independent random numbers."""

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
    ROUNDING = 12


def white_(out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill ``out`` with standard normals and return it.

    The generator may be on another device than ``out``. The numbers are then drawn on that device and copied, so a CPU
    generator gives the same noise for parameters on any device.
    """
    if generator is None or generator.device.type == out.device.type:
        return out.normal_(generator=generator)
    return out.copy_(torch.empty_like(out, device=generator.device).normal_(generator=generator))


def anticorrelated(current: Tensor, previous: Tensor) -> Tensor:
    """Return ``ξ_t = ζ_t − ζ_{t−1}`` for two consecutive white draws. With ``ζ_0 = 0``, the sum of all ξ is the last ζ."""
    return current - previous


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, ...]:
    """Apply Philox 4×32: map four counter words and two key words to four random words.

    All words are int64 tensors with values in [0, 2³²) that broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The int64 products overflow, but their bits equal those of the unsigned product.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) & _MASK ^ c1 ^ k0, right & _MASK, (left >> 32) & _MASK ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return random 32-bit words for the indices 0 … count − 1, as int64 in [0, 2³²).

    ``seed`` and ``step`` are integers or integer tensors that broadcast against each other. The result has the shape
    ``(*shape, count)``, where ``shape`` is their common shape.
    """
    if device is None:
        device = next((value.device for value in (seed, step) if isinstance(value, Tensor)), None)
    seed, step = (torch.as_tensor(value, device=device).long().unsqueeze(-1) for value in (seed, step))
    block = torch.arange((count + 3) // 4, device=seed.device)
    counter = (block, step & _MASK, (step >> 32) & _MASK, torch.full_like(step, int(purpose)))
    # After ten rounds, every word depends on block, step and seed, so all four words have their common shape.
    drawn = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(drawn, -1).flatten(-2)[..., :count]


def uniforms(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return uniform float64 numbers in (0, 1): the midpoints ``(word + ½) / 2³²``. See :func:`words` for the arguments."""
    return (words(seed, purpose, step, count, device=device).double() + 0.5) * 2.0**-32


def box_muller(uniform: Tensor) -> Tensor:
    """Convert uniforms, an even number along the last dimension, to standard normals: each pair (a, b) becomes
    ``√(−2 ln a)·(cos 2πb, sin 2πb)``."""
    a, b = uniform[..., 0::2], uniform[..., 1::2]
    radius, angle = torch.sqrt(-2 * torch.log(a)), 2 * torch.pi * b
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1).flatten(-2)


def normals(
    seed: Tensor | int, purpose: Purpose, step: Tensor | int, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return standard normals, float64. See :func:`words` for the arguments."""
    return box_muller(uniforms(seed, purpose, step, count + count % 2, device=device))[..., :count]


#: Multipliers of the learners' noise: first round, radius, angle. The first two are the best 32-bit mixers found by a
#: search (Wellons, hash-prospector); the third comes from the same search.
MIXERS = (0x21F0AAAD, 0xD35A2D97, 0x846CA68B)


def learner_words(
    seed: Tensor | int, step: Tensor | int, pairs: int, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return two random words, *radius* and *angle*, for each of the pairs 0 … pairs − 1 of normals; int32, read as unsigned.

    Philox maps (seed, step) to four keys ``k₀ … k₃ = words(seed, Purpose.NOISE, step, 4)``. Two arithmetic sequences over
    the pairs j, with odd increments given by the keys, are mixed by multiplications (all modulo 2³²)::

        x = k₀ + j·(k₁ | 1)     x ← (x ⊕ x≫16)·0x21F0AAAD     s = x ⊕ x≫15
        r = s·0xD35A2D97                              radius = r ⊕ r≫15
        a = (s ⊕ (k₂ + j·(k₃ | 1)))·0x846CA68B        angle  = a ⊕ a≫16

    See :func:`words` for ``seed`` and ``step``; the results have the shape ``(*shape, pairs)``.
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
    """Return the update noise ζ of learners: standard normals for the parameter entries 0 … count − 1, at step t = 1, 2, ….

    This definition applies to every backend. The index of an entry counts through the learner's parameters, flattened in
    the order of ``model.parameters()``. The words of :func:`learner_words` for pair j give the entries 2j and 2j + 1::

        u = float32(radius≫1 | 1) · 2⁻³¹        in (0, 1]; the rounding to float32 is part of the definition
        θ = π · int32(angle) · 2⁻³²             in [−π/2, π/2)
        ζ₂ⱼ = ±√(−2 ln u)·cos θ     ζ₂ⱼ₊₁ = √(−2 ln u)·sin θ      minus where the angle word is odd

    The tails reach √(62 ln 2) = 6.55 standard deviations. Values in float32 and float64 differ only by rounding. See
    docs/noise.md for the statistical tests of the generator.

    Args:
        seed: The learners' seeds, an integer or an integer tensor.
        step: The steps, an integer or an integer tensor that broadcasts against ``seed``.
        count: Number of entries per learner.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: Device of the result. Default: that of the tensors.

    Returns:
        A tensor of shape ``(*shape, count)``, where ``shape`` is the common shape of ``seed`` and ``step``.

    Example:
        >>> learner_normals(seed=7, step=1, count=4).shape
        torch.Size([4])
        >>> learner_normals(torch.arange(20), step=1, count=282_160).shape
        torch.Size([20, 282160])
    """
    return _normals_of(*learner_words(seed, step, (count + 1) // 2, device=device), dtype)[..., :count]


def _normals_of(radius_word: Tensor, angle_word: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the words of pairs to normals, two per pair."""
    uniform = _shifted(radius_word, 1).bitwise_or_(1).to(torch.float32).mul_(2.0**-31)
    radius = uniform.to(dtype).log_().mul_(-2).sqrt_()
    angle = angle_word.to(dtype).mul_(torch.pi * 2.0**-32)
    sign = 1 - 2 * (angle_word & 1)
    return torch.stack((torch.cos(angle).mul_(radius).mul_(sign), angle.sin_().mul_(radius)), -1).flatten(-2)


def learner_keys(seed: Tensor | int, step: Tensor | int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the four keys of :func:`learner_words`, int32. See :func:`words` for ``seed`` and ``step``."""
    return words(seed, Purpose.NOISE, step, 4, device=device).to(torch.int32)


def learner_normals_at(keys: Tensor, index: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return some entries of :func:`learner_normals`, each computed independently. This doubles the work, but a compiler
    can fuse it with the code that uses the numbers.

    Args:
        keys: The result of :func:`learner_keys` for the learners and one step, ``(learners, 4)``.
        index: int32, the indices of the entries, of any shape.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        A tensor of shape ``(learners, *index.shape)``.
    """
    k0, k1, k2, k3 = (key.view(-1, *(1,) * index.ndim) for key in keys.unbind(-1))
    radius_word, angle_word = _mixed(k0, k1, k2, k3, index >> 1)
    uniform = (_shifted(radius_word, 1) | 1).to(torch.float32) * 2.0**-31
    half_turns = angle_word.to(dtype) * 2.0**-32
    # cos πy = sin π(½ − |y|) for |y| ≤ ½: one function for both entries of a pair.
    size = _radius(uniform.to(dtype)) * _sine(torch.where((index & 1) == 1, half_turns, 0.5 - half_turns.abs()))
    return torch.where((angle_word & ~index & 1) == 1, -size, size)


def parameter_keys(
    seed: Tensor | int,
    step: Tensor | int,
    number: Tensor | int,
    *,
    purpose: int = Purpose.PARAMETER,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the four keys of a parameter's noise at a step, int32: Philox with the seed as key and the counter (number, step
    low, step high, purpose).

    Args:
        seed: The optimizer's seed, an integer or an integer tensor.
        step: Number of steps of the parameter, including this one; an integer, an integer tensor, or a float tensor, as
            stored by optimizers.
        number: Index of the parameter among all parameters of the optimizer, from 0; an integer or an integer tensor.
        purpose: Purpose of the keys; each tensor that is rounded has one of its own.
        device: Device of the result. Default: that of the tensors.

    Returns:
        A tensor of shape ``(*shape, 4)``, where ``shape`` is the common shape of the arguments.
    """
    if type(seed) is type(step) is type(number) is int:
        return torch.tensor(_plain_keys(seed, step, number, int(purpose)), dtype=torch.int32, device=device)
    if device is None:
        device = next((value.device for value in (seed, step, number) if isinstance(value, Tensor)), None)
    seed, step, number = (torch.as_tensor(value, device=device).long() for value in (seed, step, number))
    counter = (number & _MASK, step & _MASK, (step >> 32) & _MASK, torch.full_like(step, purpose))
    return torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), -1).to(torch.int32)


def _plain_keys(seed: int, step: int, number: int, purpose: int) -> list[int]:
    """:func:`parameter_keys` of Python numbers, which takes a hundredth of the time of the same operations on tensors."""
    c0, c1, c2, c3 = number & _MASK, step & _MASK, (step >> 32) & _MASK, purpose
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [_as_int32(word) for word in (c0, c1, c2, c3)]


#: Number of normals that :func:`parameter_normals` generates at once: on the CPU, as many as stay in the cache; on other
#: devices, a bound on the temporaries.
_AT_ONCE = {"cpu": 1 << 16}
_AT_ONCE_ELSEWHERE = 1 << 22


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
    """Return the noise ζ of an optimizer's parameter: standard normals for its entries start … start + count − 1.

    This definition applies to every device, kernel and number of processes. The index of an entry counts through the whole
    parameter in row-major order, even if a process holds only a shard of it. The entries 2j and 2j + 1 are computed from
    the keys of :func:`parameter_keys` in the same way as in :func:`learner_normals`.

    Args:
        seed, step, number: See :func:`parameter_keys`; without dimensions.
        start: Index of the first entry.
        count: Number of entries.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: Device of the result. Default: that of the tensors.

    Example:
        >>> whole = parameter_normals(seed=7, step=1, number=0, start=0, count=10)
        >>> torch.equal(parameter_normals(7, 1, 0, start=3, count=5), whole[3:8])
        True
    """
    keys = parameter_keys(seed, step, number, device=device)
    return parameter_normals_within(keys, (start + count,), (start,), (count,), dtype=dtype)


def parameter_normals_together(
    keys: Tensor, counts: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the first entries of :func:`parameter_normals` of several parameters.

    Args:
        keys: The result of :func:`parameter_keys` for the parameters, ``(parameters, 4)``.
        counts: Number of entries of each parameter.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        One tensor per parameter; they share memory.
    """
    pairs = [(count + 1) // 2 for count in counts]
    lengths = torch.tensor(pairs, device=keys.device)
    owner = torch.repeat_interleave(lengths, output_size=sum(pairs))
    first = (lengths.cumsum(0) - lengths)[owner]
    own = torch.arange(sum(pairs), device=keys.device) - first
    k0, k1, k2, k3 = keys.T[:, owner].unbind(0)
    normals = _normals_of(*_mixed(k0, k1, k2, k3, own.to(torch.int32)), dtype)
    parts = torch.split(normals, [2 * pair for pair in pairs])
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def parameter_normals_within(
    keys: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the entries of :func:`parameter_normals` in a box within a parameter, such as a shard.

    Args:
        keys: The result of :func:`parameter_keys` for one parameter and step.
        shape: The shape of the parameter.
        offset: The first index of the box in each dimension.
        size: The size of the box in each dimension.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        A tensor of shape ``size``.
    """
    out = torch.empty(tuple(size), dtype=dtype, device=keys.device)
    if not out.numel():
        return out
    # The box is contiguous after the last dimension that it covers only partly; it consists of runs of `run` entries.
    split = max((dim for dim, length in enumerate(shape) if size[dim] < length), default=0)
    run = math.prod(size[split:])
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(begin * step for begin, step in zip(offset, stride, strict=True))
    starts = torch.full((1,), start, device=keys.device)
    for dim in range(split):
        starts = (starts[:, None] + torch.arange(size[dim], device=keys.device) * stride[dim]).flatten()
    # A run that starts at an odd entry begins with the second normal of a pair.
    odd = (starts & 1).bool()[:, None] if any(step % 2 for step in stride[:split]) else bool(start % 2)
    # Without blocks when compiling, because the compiler fuses everything into one loop.
    at_once = _AT_ONCE.get(keys.device.type, _AT_ONCE_ELSEWHERE) if not torch.compiler.is_compiling() else out.numel()
    pieces = out.view(-1, run)
    k0, k1, k2, k3 = keys.unbind(-1)
    for first in range(0, run, at_once):
        length = min(at_once, run - first)
        pairs = torch.arange(first // 2, first // 2 + length // 2 + 1, device=keys.device)
        rows = max(1, at_once // length)
        for row in range(0, len(starts), rows):
            block = slice(row, row + rows)
            # Only the low 32 bits of a pair's index matter.
            words = _mixed(k0, k1, k2, k3, (starts[block, None] // 2 + pairs).to(torch.int32))
            normals = _normals_of(*words, dtype)
            even, shifted = normals[:, :length], normals[:, 1 : length + 1]
            pieces[block, first : first + length] = (
                torch.where(odd[block], shifted, even) if isinstance(odd, Tensor) else shifted if odd else even
            )
    return out


def rounding_words(keys: Tensor, index: Tensor) -> Tensor:
    """Return a random word, int32, for each index, from the keys of :func:`parameter_keys`; see :func:`learner_words`."""
    k0, k1, k2, k3 = keys.unbind(-1)
    return _mixed(k0, k1, k2, k3, index.to(torch.int32))[0]


def uniforms_at(keys: Tensor, index: Tensor) -> Tensor:
    """Return uniform float32 numbers in (0, 1], computed independently from four keys; see :func:`learner_normals_at`."""
    k0, k1, k2, k3 = (key.view(-1, *(1,) * index.ndim) for key in keys.unbind(-1))
    radius_word, _ = _mixed(k0, k1, k2, k3, index)
    return (_shifted(radius_word, 1) | 1).to(torch.float32) * 2.0**-31


def _radius(uniform: Tensor) -> Tensor:
    """Return √(−2 ln u)."""
    squared = -2 * torch.log(uniform)
    if squared.dtype == torch.float64:
        return torch.sqrt(squared)
    # GPUs have an instruction for 1/√, whereas the exact root takes about ten.
    return squared * torch.rsqrt(squared.clamp(min=1e-30))


def _sine(half_turns: Tensor) -> Tensor:
    """Return sin πy for |y| ≤ ½; in float32 by a polynomial with an error of 3·10⁻⁹, faster than torch's function."""
    if half_turns.dtype == torch.float64:
        return torch.sin(torch.pi * half_turns)
    squared = half_turns**2
    result = squared * 0.07722012892599801 - 0.598045174108941
    for coefficient in (2.5500313772784837, -5.1677068789262925, 3.1415925800447253):
        result = result * squared + coefficient
    return result * half_turns


def _mixed(k0: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Return the radius and angle words of :func:`learner_words` for pairs j, from the four keys."""
    first, radius, angle = (_as_int32(m) for m in MIXERS)
    # int32 products and sums overflow, but their bits equal those of unsigned arithmetic.
    mixed = _fold_(_fold_(k0 + j * (k1 | 1), 16).mul_(first), 15)
    counted = k2 + j * (k3 | 1)
    return _fold_(mixed * radius, 15), _fold_(counted.bitwise_xor_(mixed).mul_(angle), 16)


def _as_int32(word: int) -> int:
    """Return the signed number with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int32 words; torch's right shift is arithmetic."""
    return (word >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _fold_(word: Tensor, bits: int) -> Tensor:
    """Compute ``x ⊕ x≫bits`` in place, which spreads the well-mixed high bits of a product to the low bits."""
    return word.bitwise_xor_(_shifted(word, bits))
