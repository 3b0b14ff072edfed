"""Functions that rules may call."""

import math

import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from upgd.kernels import functions


@numba.njit
def exp(x):
    return functions.exp(x)


@given(st.floats(-87, 88, width=32))
def test_exp(x: float) -> None:
    found, exact = float(exp(np.float32(x))), float(np.exp(np.float64(x)))
    # The error of the polynomial, and of the rounded product with log₂e.
    assert abs(found / exact - 1) < 3.7e-6 + 1.2e-7 * abs(x)


@pytest.mark.parametrize(
    ("x", "value"), [(0.0, 1.0), (-200.0, 2.0**-126), (-np.inf, 2.0**-126), (200.0, 2.0**127), (np.inf, 2.0**127)]
)
def test_exp_of_large_numbers(x: float, value: float) -> None:
    assert float(exp(np.float32(x))) == value


@numba.njit
def complement(x):
    return functions.complement(x)


@given(st.floats(-80, 5, width=32))
@example(-0.0625)
@example(0.0625)
def test_complement(x: float) -> None:
    found, exact = float(complement(np.float32(x))), -math.expm1(x)
    # Near zero, the relative error of the series; elsewhere, the absolute error of exp and of the difference.
    assert abs(found - exact) <= (3e-7 * abs(exact) if abs(x) < 0.0625 else 4.3e-6 * max(1, math.exp(x)) + 1e-7)


@numba.njit
def tanh(x):
    return functions.tanh(x)


@given(st.floats(-100, 100, width=32))
@example(1e-3)
@example(1e-30)
@example(0.49)
@example(-0.5)
def test_tanh(x: float) -> None:
    """Near zero, the relative error is that of a few roundings; elsewhere, it is that of exp."""
    assert (
        abs(float(tanh(np.float32(x))) - math.tanh(x)) <= (3e-7 if abs(x) < 0.5 else 4e-6) * abs(math.tanh(x)) + 1e-42
    )


def test_tanh_of_what_is_no_finite_number() -> None:
    assert math.isnan(tanh(np.float32(np.nan)))
    assert [float(tanh(np.float32(x))) for x in (-np.inf, np.inf)] == [-1, 1]


@numba.njit
def flushed(x):
    return functions.flushed(x)


def test_flushed() -> None:
    given_, wanted = (1e-38, -1e-38, 1e-36, -2.0, np.inf), (0.0, 0.0, 1e-36, -2.0, np.inf)
    assert [flushed(np.float32(x)) for x in given_] == [np.float32(x) for x in wanted]
    assert math.isnan(flushed(np.float32(np.nan)))  # as on the torch backend
