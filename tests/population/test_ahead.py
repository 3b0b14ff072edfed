"""Scalars of generated rules, evaluated ahead of the steps that need them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upgd.methods._scalars import Scalars
from upgd.population.cuda.ahead import Ahead

CPU = torch.device("cpu")


def _ahead() -> tuple[Ahead, dict[str, torch.Tensor]]:
    """β and 1 − βᵗ of three learners."""
    values = {"beta": torch.tensor([[0.9], [0.99], [0.9999]], dtype=torch.float64)}
    h = Scalars(values, lambda scalar: torch.empty(0))
    return Ahead((h.beta, 1 - h.beta**h.step), values, 3, CPU), values


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(1, 5_000)), min_size=1, max_size=5))
def test_the_scalars_of_any_block(blocks: list[tuple[int, int]]) -> None:
    ahead, values = _ahead()
    beta = values["beta"]
    for start, length in blocks:
        steps = torch.arange(start + 1, start + length + 1, dtype=torch.float64)
        wanted = torch.stack([beta.expand(3, length), 1 - beta**steps], -1).float()
        assert torch.equal(ahead.table(start, length), wanted)


@pytest.mark.parametrize("length", [16, 200])
def test_short_blocks_share_an_evaluation(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    ahead, _ = _ahead()
    evaluated, real = [], ahead._evaluated
    monkeypatch.setattr(ahead, "_evaluated", lambda *where: evaluated.append(where) or real(*where))
    for start in range(0, Ahead.STEPS - length + 1, length):
        ahead.table(start, length)
    assert evaluated == [(0, Ahead.STEPS)]
    monkeypatch.setattr(Ahead, "BYTES", 0)
    ahead.table(Ahead.STEPS, length)
    assert evaluated[1:] == [(Ahead.STEPS, length)]
