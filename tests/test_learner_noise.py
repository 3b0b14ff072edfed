"""The noise of learners: the definition, number by number, and its quality on 10⁸ draws."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from upgd.noise import Purpose, learner_normals, learner_words, words

WORD = 2**32
FIRST = [
    [0.2683123, -0.5216204, 0.9376338, 1.8415214, -1.202536],
    [0.8017918, 0.0040338, -0.6241795, -0.0209219, -1.5195935],
]


def plain_words(seed: int, step: int, pair: int) -> tuple[int, int]:
    """The definition with Python's integers."""
    k0, k1, k2, k3 = words(seed, Purpose.NOISE, step, 4).tolist()
    x = (k0 + pair * (k1 | 1)) % WORD
    x = (x ^ (x >> 16)) * 0x21F0AAAD % WORD
    s = x ^ (x >> 15)
    radius = s * 0xD35A2D97 % WORD
    angle = (s ^ (k2 + pair * (k3 | 1)) % WORD) * 0x846CA68B % WORD
    return radius ^ (radius >> 15), angle ^ (angle >> 16)


def plain_pair(radius: int, angle: int) -> tuple[float, float]:
    uniform = torch.tensor(radius >> 1 | 1, dtype=torch.int32).to(torch.float32).item() * 2.0**-31
    length = math.sqrt(-2 * math.log(uniform))
    theta = math.pi * (angle - WORD if angle >= WORD // 2 else angle) / WORD
    return (-1) ** (angle & 1) * length * math.cos(theta), length * math.sin(theta)


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40), st.integers(1, 40))
def test_words_and_normals_follow_the_definition(seed: int, step: int, pairs: int) -> None:
    radius, angle = learner_words(seed, step, pairs)
    drawn = [(r % WORD, a % WORD) for r, a in zip(radius.tolist(), angle.tolist(), strict=True)]
    assert drawn == [plain_words(seed, step, j) for j in range(pairs)]
    expected = torch.tensor([z for pair in drawn for z in plain_pair(*pair)], dtype=torch.float64)
    normals = learner_normals(seed, step, 2 * pairs, dtype=torch.float64)
    torch.testing.assert_close(normals, expected, rtol=1e-12, atol=1e-14)


def test_the_first_numbers_never_change() -> None:
    """Stored results depend on these numbers."""
    drawn = learner_normals(torch.tensor([0, 1]), 1, 5, dtype=torch.float64)
    expected = torch.tensor(FIRST, dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=5e-7)


def test_float32_differs_by_rounding_alone() -> None:
    exact = learner_normals(torch.arange(4), 3, 100_000, dtype=torch.float64)
    assert (learner_normals(torch.arange(4), 3, 100_000).double() - exact).abs().max() < 2e-6


def test_entries_are_independent_of_other_entries_learners_and_steps() -> None:
    many = learner_normals(torch.tensor([[3], [9]]), torch.tensor([1, 2, 1000]), 101)
    assert many.shape == (2, 3, 101)
    assert torch.equal(many[1, 2, :50], learner_normals(9, 1000, 50))
    assert torch.equal(many[0, 1, :7], learner_normals(3, 2, 7))


def test_seed_or_step_alone_says_where_to_compute() -> None:
    there = torch.arange(3, device="meta")
    for seed, step in ((there, 5), (5, there)):
        assert learner_normals(seed, step, 4).device == there.device
    assert learner_normals(there, 5, 4).shape == (3, 4)
    assert learner_normals(7, 5, 4, device="meta").device == there.device


def test_the_tails_are_there() -> None:
    """The shortest uniform gives 6.55 standard deviations, the longest gives 0; nothing is ever infinite."""
    assert math.sqrt(-2 * math.log(2.0**-31)) == pytest.approx(6.555, abs=1e-3)
    assert plain_pair(0, 0)[0] == pytest.approx(6.555, abs=1e-3)
    assert plain_pair(WORD - 1, 0)[0] == 0
    assert 4.9 < learner_normals(torch.arange(10), 1, 1_000_000).abs().max() < 6.555


SEEDS, STEPS, ENTRIES = 20, 18, 282_160


def one_step_at_a_time() -> Iterator[Tensor]:
    for step in range(1, STEPS + 1):
        yield learner_normals(torch.arange(SEEDS), step, ENTRIES).double()


def mean_of_products(a: Tensor, b: Tensor) -> float:
    """A sum of products, standardised: N(0, 1) if they are independent standard normals."""
    return (a * b).sum().item() / math.sqrt(a.numel())


def counts_below(z: Tensor, edges: Tensor) -> Tensor:
    counts = torch.bincount(torch.bucketize(z.flatten(), edges), minlength=len(edges) + 1)
    return counts.cumsum(0)[: len(edges)].double()


@pytest.mark.slow
def test_ten_to_the_eight_draws_are_standard_normal() -> None:
    """Moments to the 4th order, Kolmogorov–Smirnov and tails, each within 4.5 standard errors."""
    count = SEEDS * STEPS * ENTRIES
    assert count > 10**8
    edges = torch.linspace(-6.5, 6.5, 13_001, dtype=torch.float64)
    below = torch.zeros(len(edges), dtype=torch.float64)
    sums = torch.zeros(4, dtype=torch.float64)
    beyond = torch.zeros(5, dtype=torch.float64)
    for z in one_step_at_a_time():
        sums += torch.stack([(z**k).sum() for k in (1, 2, 3, 4)])
        below += counts_below(z, edges)
        beyond += torch.stack([(z.abs() > k).sum() for k in (1, 2, 3, 4, 5)])
    expected, variance = (0, 1, 0, 3), (1, 2, 15, 96)
    for k in range(4):
        assert abs(sums[k].item() / count - expected[k]) < 4.5 * math.sqrt(variance[k] / count), f"moment {k + 1}"
    cdf = 0.5 * torch.erfc(-edges / math.sqrt(2))
    assert (below / count - cdf).abs().max() * math.sqrt(count) < 1.95  # Kolmogorov–Smirnov at 0.1%
    for k, seen in enumerate(beyond.tolist(), start=1):
        tail = count * math.erfc(k / math.sqrt(2))
        assert abs(seen - tail) < 4.5 * math.sqrt(tail), f"beyond {k} standard deviations"


@pytest.mark.slow
def test_ten_to_the_eight_draws_are_uncorrelated() -> None:
    """Neighbours in index, step and seed: products of the values, of their squares, and of cubes with values."""
    lags = (1, 2, 3, 4, 8, 16, 32, 784)
    scores: dict[str, float] = {}

    def add(name: str, a: Tensor, b: Tensor) -> None:
        for power, (f, g) in {
            "z·z": (a, b),
            "z²·z²": ((a**2 - 1) / math.sqrt(2), (b**2 - 1) / math.sqrt(2)),
            "z³·z": ((a**3 - 3 * a) / math.sqrt(6), b),
        }.items():
            key = f"{name} {power}"
            scores[key] = scores.get(key, 0.0) + mean_of_products(f, g)

    previous = None
    for z in one_step_at_a_time():
        for lag in lags:
            add(f"index {lag}", z[:, lag:], z[:, :-lag])
        add("seed", z[1:], z[:-1])
        if previous is not None:
            add("step", z, previous)
        previous = z
    scores = {name: score / math.sqrt(STEPS) for name, score in scores.items()}
    assert {name: round(score, 2) for name, score in scores.items() if abs(score) > 4.5} == {}
