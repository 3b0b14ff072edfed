"""Noise in registers: :func:`upgd.noise.learner_normals` with polynomials for logarithm, sine and cosine."""

import math
from typing import Any

import numpy as np

from upgd.kernels.machine import (
    Pointer,
    add,
    bits_of,
    both,
    compiled,
    either,
    float_of,
    fused,
    inlined,
    larger,
    least,
    minus,
    number,
    room_for,
    shifted_down,
    shifted_left,
    shifted_right,
    skip,
    times,
    vectorised,
    xor,
)
from upgd.kernels.polynomials import COSINE, LOGARITHM, SINE
from upgd.noise import MIXERS, Purpose

__all__ = ["fill_normals", "fresh_keys", "parameter_keys", "step_keys", "uniform", "unit_keys"]

_f: Any = np.float32
_u: Any = np.uint32
_FIRST, _RADIUS, _ANGLE = (_u(m) for m in MIXERS)
_NOISE, _PARAMETER = np.uint64(int(Purpose.NOISE)), np.uint64(int(Purpose.PARAMETER))
_RESET, _UNITS = np.uint64(int(Purpose.RESET)), np.uint64(int(Purpose.UNITS))
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

#: The bits of √½, the lower bound of the mantissa; avoids cancellation of ln near 1.
_ROOT_HALF = _u(0x3F3504F3)
_MANTISSA = _u(0x007FFFFF)
_ROOT_HALF_OF_2_31 = _u(0x3F3504F3 + (31 << 23))
_MINUS_2_LN_2 = _f(-2 * math.log(2))
#: Number of pairs that are computed at once: few enough for the L1 cache.
_PART = 1024
_room_for_radii, _room_for_angles = room_for(_PART), room_for(_PART)


@compiled
def step_keys(seed: int, step: int) -> tuple[int, int, int, int]:
    """Return the four keys of a learner's noise at a step; see :func:`upgd.noise.learner_keys`."""
    return _keys(seed, np.uint64(0), step, _NOISE)


@compiled
def parameter_keys(seed: int, step: int, number: int) -> tuple[int, int, int, int]:
    """Return the four keys of a parameter's noise at a step; see :func:`upgd.noise.parameter_keys`."""
    return _keys(seed, np.uint64(number), step, _PARAMETER)


@compiled
def fresh_keys(seed: int, step: int, layer: int) -> tuple[int, int, int, int]:
    """Return the four keys of the new weights of a hidden layer's units that are reset at a step."""
    return _keys(seed, np.uint64(layer), step, _RESET)


@compiled
def unit_keys(seed: int, step: int, layer: int) -> tuple[int, int, int, int]:
    """Return the four keys of the random numbers of a hidden layer's units at a step."""
    return _keys(seed, np.uint64(layer), step, _UNITS)


@inlined
def uniform(index: int, keys: tuple[int, int, int, int]) -> float:
    """Return a uniform number in (0, 1]; see :func:`upgd.noise.uniforms_at`."""
    x = add(keys[0], times(_u(index), keys[1]))
    s = times(xor(x, shifted_right(x, _u(16))), _FIRST)
    word = times(xor(s, shifted_right(s, _u(15))), _RADIUS)
    word = xor(word, shifted_right(word, _u(15)))
    return number(either(shifted_right(word, _u(1)), _u(1))) * _f(2.0**-31)


@compiled
def _keys(seed: int, index: Any, step: int, purpose: Any) -> tuple[int, int, int, int]:
    """Return Philox 4×32-10 with the second and the fourth word made odd."""
    c0, c1, c2, c3 = index, np.uint64(step) & _WORD, np.uint64(step) >> _HALF, purpose
    k0, k1 = np.uint64(seed) & _WORD, np.uint64(seed) >> _HALF
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> _HALF) ^ c1 ^ k0, right & _WORD
        c2, c3 = (left >> _HALF) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
    return _u(c0), _u(c1 | np.uint64(1)), _u(c2), _u(c3 | np.uint64(1))


@inlined
def _radius(word: int) -> float:
    """Return √(−2 ln u) for u = (word≫1 | 1)·2⁻³¹, from the exponent and a polynomial for the mantissa in [√½, √2)."""
    bits = minus(bits_of(number(either(shifted_right(word, _u(1)), _u(1)))), _ROOT_HALF_OF_2_31)
    exponent = number(shifted_down(bits, _u(23)))
    m = float_of(add(both(bits, _MANTISSA), _ROOT_HALF)) - _f(1)
    p = _f(LOGARITHM[0])
    p = fused(p, m, _f(LOGARITHM[1]))
    p = fused(p, m, _f(LOGARITHM[2]))
    p = fused(p, m, _f(LOGARITHM[3]))
    p = fused(p, m, _f(LOGARITHM[4]))
    p = fused(p, m, _f(LOGARITHM[5]))
    p = fused(p, m, _f(LOGARITHM[6]))
    p = fused(p, m, _f(LOGARITHM[7]))
    # For a uniform of exactly 1, rounding may give −10⁻⁸; its square root must not be NaN.
    return _f(math.sqrt(larger(fused(p, m, exponent * _MINUS_2_LN_2), _f(0))))


@compiled
def fill_normals(out: Pointer, first_pair: int, pairs: int, keys: tuple[int, int, int, int]) -> None:
    """Write the entries 2·first_pair, 2·first_pair + 1, … of a step's noise to the start of ``out``.

    Three short loops are faster than one: processors wait for the results of fewer instructions at a time.
    """
    radii, angles = _room_for_radii(), _room_for_angles()
    for begin in range(0, pairs, _PART):
        count = least(_PART, pairs - begin)
        # Whole vectors, because the space is there and the remaining entries of a vector are slow one by one.
        whole = (count + 15) // 16 * 16
        _draw(radii, angles, whole, first_pair + begin, keys)
        _to_radii(radii, whole)
        _to_normals(radii, angles, count, skip(out, 2 * begin))


@compiled
def _draw(radii: Pointer, angles: Pointer, count: int, first_pair: int, keys: tuple[int, int, int, int]) -> None:
    """Write the random words of the radii and angles."""
    vectorised()
    k0, step0, k2, step2 = keys
    x0 = add(k0, times(_u(first_pair), step0))
    x2 = add(k2, times(_u(first_pair), step2))
    for j in range(count):
        s = times(xor(x0, shifted_right(x0, _u(16))), _FIRST)
        s = xor(s, shifted_right(s, _u(15)))
        radius = times(s, _RADIUS)
        angle = times(xor(s, x2), _ANGLE)
        radii[j] = float_of(xor(radius, shifted_right(radius, _u(15))))
        angles[j] = float_of(xor(angle, shifted_right(angle, _u(16))))
        x0 = add(x0, step0)
        x2 = add(x2, step2)


@compiled
def _to_radii(radii: Pointer, count: int) -> None:
    vectorised()
    for j in range(count):
        radii[j] = _radius(bits_of(radii[j]))


@compiled
def _to_normals(radii: Pointer, angles: Pointer, count: int, out: Pointer) -> None:
    """Write the cosine and the sine of every angle θ, multiplied by the radius."""
    vectorised()
    for j in range(count):
        radius, angle = radii[j], bits_of(angles[j])
        t = number(angle) * _f(2.0**-32)  # θ/π
        z = t * t
        cosine = _f(COSINE[0])
        cosine = fused(cosine, z, _f(COSINE[1]))
        cosine = fused(cosine, z, _f(COSINE[2]))
        cosine = fused(cosine, z, _f(COSINE[3]))
        cosine = fused(cosine, z, _f(COSINE[4]))
        sine = _f(SINE[0])
        sine = fused(sine, z, _f(SINE[1]))
        sine = fused(sine, z, _f(SINE[2]))
        sine = fused(sine, z, _f(SINE[3]))
        sine = fused(sine, z, _f(SINE[4]))
        out[2 * j] = float_of(xor(bits_of(radius * cosine), shifted_left(angle, _u(31))))
        out[2 * j + 1] = radius * sine * t
