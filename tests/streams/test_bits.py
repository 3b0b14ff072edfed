"""Slowly changing regression: one bit at a time, and a target computed by hand."""

import pytest
import torch

from upgd.streams import BitFlipping, bits


def test_one_slow_bit_flips_at_a_time_and_each_gets_its_turn() -> None:
    stream = BitFlipping(task_length=10)
    slow = stream.chunk([1, 2], 0, 2_000).dense[:, :, :15].view(2, 200, 10, 15)
    assert torch.equal(slow, slow[:, :, :1].expand_as(slow))  # constant within a task
    flips = (slow[:, 1:, 0] != slow[:, :-1, 0]).long()
    assert torch.equal(flips.sum(-1), torch.ones(2, 199).long())
    assert flips.sum(1).min() >= 3  # 13 on average
    assert (flips[0] != flips[1]).any()


def test_the_other_bits_are_fair() -> None:
    fast = BitFlipping().chunk(range(10), 0, 2_000).dense[:, :, 15:].double()
    assert abs(float(fast.mean()) - 0.5) < 4 * 0.5 / fast.numel() ** 0.5
    assert set(fast.unique().tolist()) == {0, 1}


@pytest.mark.parametrize(("beta", "target"), [(-1.0, "all"), (1.0, "none")])
def test_the_target_where_all_or_no_units_are_active(beta: float, target: str) -> None:
    """No unit can have more than all of its inputs agree, and every one has more than −1 of them."""
    y = BitFlipping(beta=beta, units=8).chunk([3, 4], 0, 50).targets
    assert len(y[0].unique()) == len(y[1].unique()) == 1
    assert int(y[0, 0]) % 2 == (1 if target == "none" else 8 + 1) % 2
    if target == "none":
        assert y.abs().max() == 1  # only the bias


def test_where_the_bits_stand_does_not_depend_on_what_is_remembered(monkeypatch) -> None:
    stream = BitFlipping(bits=6, flipping=4, task_length=3)
    whole = stream.chunk([5, 2**40], 0, 300)
    monkeypatch.setattr(bits, "_FLIPS_AT_ONCE", 7)
    bits._after_blocks.cache_clear()
    try:
        for start in (0, 19, 20, 21, 100, 200):
            piece = stream.chunk([2**40, 5], start, 100)
            assert torch.equal(piece.dense, whole.dense[[1, 0], start : start + 100])
            assert torch.equal(piece.targets, whole.targets[[1, 0], start : start + 100])
    finally:
        bits._after_blocks.cache_clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits must be an integer from 1 to 10,000, not 0"),
        ({"flipping": 21}, "flipping must be an integer from 1 to 20, not 21"),
        ({"units": True}, "units must be an integer from 1 to 10,000, not True"),
        ({"beta": float("nan")}, "beta must be a finite number, such as 0.7, not nan"),
        ({"task_length": 0}, "task_length must be a positive number of steps, not 0"),
    ],
)
def test_mistakes_are_named(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BitFlipping(**options)


def test_too_many_flips_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16,777,216 flips, not 16,777,216; use a larger task_length"):
        BitFlipping(task_length=1).chunk([0], 1 << 24, 1)
