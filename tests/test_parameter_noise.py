"""The noise of an optimizer's parameters: the definition, number by number, and parts of a parameter."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, tensor

from upgd.noise import (
    Purpose,
    parameter_keys,
    parameter_normals,
    parameter_normals_together,
    parameter_normals_within,
    philox,
)

WORD = 2**32
FIRST = [0.8433921, 0.3806935, 0.5929651, -0.7951217, 1.5153973]


def plain_normal(seed: int, step: int, number: int, entry: int) -> float:
    """docs/noise.md with Python's integers."""
    counter = tuple(map(tensor, (number, step % WORD, step // WORD, int(Purpose.PARAMETER))))
    k0, k1, k2, k3 = map(int, philox(counter, (tensor(seed % WORD), tensor(seed // WORD))))
    j = entry // 2
    x = (k0 + j * (k1 | 1)) % WORD
    x = (x ^ (x >> 16)) * 0x21F0AAAD % WORD
    s = x ^ (x >> 15)
    r = s * 0xD35A2D97 % WORD
    a = (s ^ (k2 + j * (k3 | 1)) % WORD) * 0x846CA68B % WORD
    radius, angle = r ^ (r >> 15), a ^ (a >> 16)
    uniform = tensor(radius >> 1 | 1, dtype=torch.int32).to(torch.float32).item() * 2.0**-31
    length = math.sqrt(-2 * math.log(uniform))
    theta = math.pi * (angle - WORD if angle >= WORD // 2 else angle) / WORD
    return length * math.sin(theta) if entry % 2 else (-1) ** (angle & 1) * length * math.cos(theta)


@settings(max_examples=50)
@given(
    st.integers(0, 2**63 - 1), st.integers(1, 2**40), st.integers(0, 2**20), st.integers(0, 2**33), st.integers(0, 9)
)
def test_normals_follow_the_definition(seed: int, step: int, number: int, start: int, count: int) -> None:
    drawn = parameter_normals(seed, step, number, start, count, dtype=torch.float64)
    expected = [plain_normal(seed, step, number, entry) for entry in range(start, start + count)]
    torch.testing.assert_close(drawn, tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_the_first_numbers_never_change() -> None:
    """A checkpoint contains the seed and the step, and training continues from these."""
    first = parameter_normals(7, 1, 0, 0, 5)
    torch.testing.assert_close(first, tensor(FIRST), rtol=0, atol=2e-6)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    offset = [draw(st.integers(0, length)) for length in shape]
    size = [draw(st.integers(0, length - begin)) for length, begin in zip(shape, offset, strict=True)]
    return shape, offset, size


@given(boxes(), st.sampled_from([2, 4, 10, 1 << 16]))
def test_a_box_has_its_part_of_the_whole(box: tuple[list[int], list[int], list[int]], at_once: int) -> None:
    from upgd import noise

    shape, offset, size = box
    whole = parameter_normals(3, 5, 1, 0, math.prod(shape)).view(shape)
    before, noise._AT_ONCE["cpu"] = noise._AT_ONCE["cpu"], at_once
    try:
        part = parameter_normals_within(parameter_keys(3, 5, 1), shape, offset, size)
    finally:
        noise._AT_ONCE["cpu"] = before
    assert torch.equal(part, whole[tuple(slice(b, b + n) for b, n in zip(offset, size, strict=True))])


def test_steps_may_be_the_tensors_that_optimizers_count_in() -> None:
    drawn = parameter_normals(tensor(7), tensor(12.0), 3, 0, 100)
    assert torch.equal(drawn, parameter_normals(7, 12, 3, 0, 100))


@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**33), st.sampled_from([11, 12, 3 << 8])
)
def test_keys_of_numbers_are_those_of_tensors(seed: int, step: int, number: int, purpose: int) -> None:
    keys = parameter_keys(seed, step, number, purpose=purpose)
    assert keys.dtype == torch.int32
    assert torch.equal(keys, parameter_keys(tensor(seed), tensor(step), tensor(number), purpose=purpose))


def draws(seed: int, step: int, number: int) -> Tensor:
    return parameter_normals(seed, step, number, 0, 200_000, dtype=torch.float64)


def test_parameters_steps_and_seeds_share_no_noise() -> None:
    one = draws(1, 1, 0)
    assert stats.kstest(one.numpy(), "norm").pvalue > 1e-4
    for other in (draws(1, 1, 1), draws(1, 2, 0), draws(2, 1, 0)):
        assert abs(float((one * other).mean())) < 4.5 / math.sqrt(len(one))
        assert abs(float((one[1:] * other[:-1]).mean())) < 4.5 / math.sqrt(len(one))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**20), st.integers(0, 70)), min_size=1, max_size=6))
def test_parameters_drawn_together_have_the_noise_of_each(parameters: list[tuple[int, int, int]]) -> None:
    steps, numbers, counts = zip(*parameters, strict=True)
    for dtype in (torch.float32, torch.float64):
        drawn = parameter_normals_together(parameter_keys(3, tensor(steps), tensor(numbers)), counts, dtype=dtype)
        for own, (step, number, count) in zip(drawn, parameters, strict=True):
            assert torch.equal(own, parameter_normals(3, step, number, 0, count, dtype=dtype))
