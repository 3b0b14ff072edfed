"""Functions for rules, as polynomials that compile to vector instructions."""

import math
from typing import Any

import numpy as np

from upgd.kernels.machine import add, bits_of, float_of, fused, inlined, larger, shifted_left, smaller
from upgd.kernels.polynomials import TANH

__all__ = ["complement", "exp", "flushed", "sign", "tanh"]

_f: Any = np.float32
_u: Any = np.uint32
#: Smaller numbers are flushed to zero, because arithmetic with subnormal numbers is slow.
_SMALL = _f(1e-37)
#: 1.5·2²³: adding it rounds a number to an integer, which is then in the last bits of the sum.
_ROUNDING = _f(12582912)


@inlined
def flushed(x: float) -> float:
    """Return the number, or zero if it is tiny."""
    return _f(0) if abs(x) < _SMALL else x


@inlined
def exp(x: float) -> float:
    """Return eˣ = 2ᵗ, where t = x·log₂e is split into an integer and a rest in [−½, ½]; clamped to [2⁻¹²⁶, 2¹²⁷]."""
    t = smaller(larger(_f(math.log2(math.e)) * x, _f(-126)), _f(127))
    shifted = t + _ROUNDING
    rest = t - (shifted - _ROUNDING)
    p = _f(0.0013390863)
    p = fused(p, rest, _f(0.009618129))
    p = fused(p, rest, _f(0.05550411))
    p = fused(p, rest, _f(0.24022651))
    p = fused(p, rest, _f(0.6931472))
    p = fused(p, rest, _f(1.0))
    return float_of(add(bits_of(p), shifted_left(bits_of(shifted), _u(23))))


@inlined
def complement(x: float) -> float:
    """Return 1 − eˣ; near zero, where the difference would lose digits, from the series."""
    p = fused(x, _f(1 / 120), _f(1 / 24))
    p = fused(x, p, _f(1 / 6))
    p = fused(x, p, _f(0.5))
    p = fused(x, p, _f(1))
    return -x * p if abs(x) < _f(0.0625) else _f(1) - exp(x)


@inlined
def tanh(x: float) -> float:
    """Return 1 − 2/(1 + e²ˣ), or near zero, where that would lose digits, a polynomial."""
    y = x * x
    p = _f(TANH[0])
    p = fused(p, y, _f(TANH[1]))
    p = fused(p, y, _f(TANH[2]))
    p = fused(p, y, _f(TANH[3]))
    p = fused(p, y, _f(TANH[4]))
    near = fused(p * y, x, x)
    far = _f(1) - _f(2) / (_f(1) + exp(x + x))
    return near if not abs(x) >= _f(0.5) else far  # NaN counts as near, because exp would lose it


@inlined
def sign(x: float) -> float:
    """Return −1, 0 or 1."""
    return _f(1) if x > _f(0) else (_f(-1) if x < _f(0) else _f(0))
