"""Random permutations: bijections, uniform, and the same in pieces."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from upgd.streams import shuffle
from upgd.streams.shuffle import permutations, sample_order


def orders(size: int, seeds: int) -> Tensor:
    """The first pass over a data set for many seeds: ``(seeds, size)``."""
    return sample_order(torch.arange(seeds), 0, size, size, size)


def task_permutations(size: int, seeds: int) -> Tensor:
    return permutations(torch.arange(seeds), torch.tensor(0), size)


def uniform(observed: Tensor, expected: Tensor | float) -> float:
    """Return the probability of counts at least as uneven as these."""
    statistic = ((observed.double() - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(float(statistic), observed.numel() - 1))


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), number=st.integers(0, 2**40))
def test_an_order_is_a_bijection(size: int, seed: int, number: int) -> None:
    order = sample_order(torch.tensor([seed]), number * size, size, size, size)[0]
    assert torch.equal(order.sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [60_000, 98_148, 112_800, 50_000, 2**16 + 1])
def test_an_order_of_a_large_set_is_a_bijection(size: int) -> None:
    order = sample_order(torch.tensor([17]), 0, size, size, size)[0]
    assert torch.equal(order.sort().values, torch.arange(size))


@pytest.mark.parametrize("draw", [orders, task_permutations])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_are_equally_likely(draw, size: int) -> None:
    seeds = 50 * math.factorial(size)
    code = draw(size, seeds) @ size ** torch.arange(size)
    every = torch.tensor(list(itertools.permutations(range(size)))) @ size ** torch.arange(size)
    assert uniform(torch.bincount(code, minlength=size**size)[every], 50) > 1e-3


@pytest.mark.parametrize("draw", [orders, task_permutations])
@pytest.mark.parametrize("size", [7, 10, 47])
def test_all_pairs_are_equally_likely_at_all_pairs_of_positions(draw, size: int) -> None:
    drawn = draw(size, 10_000)
    different = ~torch.eye(size, dtype=torch.bool)
    positions = itertools.combinations(range(size), 2) if size < 20 else [(0, 1), (0, 8), (5, 40), (12, 20), (45, 46)]
    chances = [
        uniform(
            torch.bincount(drawn[:, i] * size + drawn[:, j], minlength=size**2).view(size, size)[different],
            10_000 / (size * (size - 1)),
        )
        for i, j in positions
    ]
    assert min(chances) > 1e-3 / len(chances)


@pytest.mark.parametrize("size", [1797, 60_000, 98_148])
def test_orders_of_large_sets_have_no_pattern(size: int) -> None:
    drawn = sample_order(torch.arange(2000), 0, 100, size, size)
    bins = 64

    def chance(values: Tensor, possible: int) -> float:
        expected = torch.bincount(torch.arange(possible) * bins // possible).double() * values.numel() / possible
        return uniform(torch.bincount(values.flatten() * bins // possible, minlength=bins), expected)

    high, low, _ = shuffle._plan(size)
    gaps = (1, 2, low % 100, high % 100)  # a pattern would show where the digits of positions are equal
    tasks = sample_order(torch.arange(200), 0, 100 * 10, 100, size).view(200, 10, 100)
    chances = [
        chance(drawn, size),
        *(chance((drawn[:, gap:] - drawn[:, :-gap]) % size - 1, size - 1) for gap in gaps),
        chance((drawn[1:] - drawn[:-1]) % size, size),  # neighbouring seeds
        chance((tasks[:, 1:] - tasks[:, :-1]) % size, size),  # neighbouring tasks
    ]
    assert min(chances) > 1e-3 / len(chances)


def test_permutations_of_pixels_are_uniform_over_tasks_and_seeds() -> None:
    drawn = permutations(torch.arange(50)[:, None], torch.arange(100), 784)
    assert drawn.shape == (50, 100, 784)
    where = torch.bincount(drawn[..., :20].flatten(), minlength=784)
    assert uniform(where, 50 * 100 * 20 / 784) > 1e-3
    fixed = (drawn == torch.arange(784)).sum(-1).double()  # Poisson with mean 1
    assert abs(float(fixed.mean()) - 1) < 4 / math.sqrt(50 * 100)
    assert abs(float(fixed.var()) - 1) < 0.1


def test_equal_keys_are_sorted_by_index(monkeypatch) -> None:
    monkeypatch.setattr(shuffle, "words", lambda seeds, purpose, step, count: torch.arange(count) // 2 % 3)
    # The entries 0 … 7 get the keys 0, 1, 2, 0, 1, 2, 0, 1 (in both words).
    assert permutations(torch.tensor(0), torch.tensor(0), 8).tolist() == [0, 3, 6, 1, 4, 7, 2, 5]


@given(
    size=st.integers(1, 50),
    task_length=st.integers(1, 120),
    start=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_pieces_make_the_whole(size: int, task_length: int, start: int, lengths: list[int]) -> None:
    seeds = torch.tensor([3, 2**50])
    whole = sample_order(seeds, start, sum(lengths), task_length, size)
    starts = [start + sum(lengths[:i]) for i in range(len(lengths))]
    pieces = [sample_order(seeds, s, n, task_length, size) for s, n in zip(starts, lengths, strict=True)]
    assert torch.equal(torch.cat(pieces, 1), whole)
