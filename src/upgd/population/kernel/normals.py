"""The learners' noise in registers: :func:`upgd.noise.learner_normals` with polynomials for logarithm, sine and cosine.

Each polynomial is the best of its degree in the sense of the largest error (below 10⁻⁷, about the last bit of a float32).
"""

import math
from typing import Any

import numpy as np

from upgd.noise import MIXERS, Purpose
from upgd.population.kernel.machine import (
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
    minus,
    number,
    shifted_down,
    shifted_left,
    shifted_right,
    times,
    vectorised,
    xor,
)

__all__ = ["fill_normals", "step_keys"]

_f: Any = np.float32
_u: Any = np.uint32
_FIRST, _RADIUS, _ANGLE = (_u(m) for m in MIXERS)
_NOISE = np.uint64(int(Purpose.NOISE))
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

#: The bits of √½, which a mantissa is kept above: so ln near 1 has no cancellation.
_ROOT_HALF = _u(0x3F3504F3)
_MANTISSA = _u(0x007FFFFF)
_ROOT_HALF_OF_2_31 = _u(0x3F3504F3 + (31 << 23))
_MINUS_2_LN_2 = _f(-2 * math.log(2))


@compiled
def step_keys(seed: int, step: int) -> tuple[int, int, int, int]:
    """Philox 4×32-10 of (seed, step): the four keys of a step's noise, the second and the fourth made odd."""
    c0, c1, c2, c3 = np.uint64(0), np.uint64(step) & _WORD, np.uint64(step) >> _HALF, _NOISE
    k0, k1 = np.uint64(seed) & _WORD, np.uint64(seed) >> _HALF
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> _HALF) ^ c1 ^ k0, right & _WORD
        c2, c3 = (left >> _HALF) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
    return _u(c0), _u(c1 | np.uint64(1)), _u(c2), _u(c3 | np.uint64(1))


@inlined
def _radius(word: int) -> float:
    """√(−2 ln u) for u = (word≫1 | 1)·2⁻³¹: the exponent and a polynomial for the mantissa in [√½, √2)."""
    bits = minus(bits_of(number(either(shifted_right(word, _u(1)), _u(1)))), _ROOT_HALF_OF_2_31)
    exponent = number(shifted_down(bits, _u(23)))
    m = float_of(add(both(bits, _MANTISSA), _ROOT_HALF)) - _f(1)
    p = _f(0.20238398)
    p = fused(p, m, _f(-0.32819915))
    p = fused(p, m, _f(0.3464682))
    p = fused(p, m, _f(-0.39748859))
    p = fused(p, m, _f(0.49920987))
    p = fused(p, m, _f(-0.66672228))
    p = fused(p, m, _f(1.00001265))
    p = fused(p, m, _f(-1.99999965))
    # A uniform of exactly 1 may give −10⁻⁸ by rounding; its root must not be nan.
    return _f(math.sqrt(larger(fused(p, m, exponent * _MINUS_2_LN_2), _f(0))))


@compiled
def fill_normals(out: Pointer, first_pair: int, pairs: int, keys: tuple[int, int, int, int]) -> None:
    """Write the entries 2·first_pair, 2·first_pair + 1, … of a step's noise to the beginning of ``out``."""
    vectorised()
    k0, step0, k2, step2 = keys
    x0 = add(k0, times(_u(first_pair), step0))
    x2 = add(k2, times(_u(first_pair), step2))
    for j in range(pairs):
        s = times(xor(x0, shifted_right(x0, _u(16))), _FIRST)
        s = xor(s, shifted_right(s, _u(15)))
        radius_word = times(s, _RADIUS)
        radius_word = xor(radius_word, shifted_right(radius_word, _u(15)))
        angle_word = times(xor(s, x2), _ANGLE)
        angle_word = xor(angle_word, shifted_right(angle_word, _u(16)))

        radius = _radius(radius_word)
        t = number(angle_word) * _f(2.0**-32)  # θ/π
        z = t * t
        cosine = _f(0.2196968)
        cosine = fused(cosine, z, _f(-1.33188016))
        cosine = fused(cosine, z, _f(4.05841192))
        cosine = fused(cosine, z, _f(-4.93479286))
        cosine = fused(cosine, z, _f(0.99999995))
        sine = _f(0.07724063)
        sine = fused(sine, z, _f(-0.59805749))
        sine = fused(sine, z, _f(2.55003391))
        sine = fused(sine, z, _f(-5.16770708))
        sine = fused(sine, z, _f(3.14159259))
        out[2 * j] = float_of(xor(bits_of(radius * cosine), shifted_left(angle_word, _u(31))))
        out[2 * j + 1] = radius * sine * t
        x0 = add(x0, step0)
        x2 = add(x2, step2)
