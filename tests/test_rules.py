"""The rule against numbers derived by hand, and its behaviour with learner dimensions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from upgd import rules

torch.set_default_dtype(torch.float32)
F64 = torch.float64


def close(a: torch.Tensor, b: object, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=rtol, atol=0)


def test_utility_by_hand() -> None:
    w, g, h = tensor([2.0, -3.0], dtype=F64), tensor([0.5, 1.0], dtype=F64), tensor([4.0, 2.0], dtype=F64)
    close(rules.utility(w, g), [-1.0, 3.0])
    close(rules.utility(w, g, h), [-1.0 + 8.0, 3.0 + 9.0])


def test_utility_is_the_loss_of_removal_for_a_quadratic_loss() -> None:
    a, b = tensor([3.0, 0.5], dtype=F64), tensor([-1.0, 2.0], dtype=F64)
    w = tensor([0.7, -1.2], dtype=F64)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (0.5 * a * w**2 + b * w).sum()

    removal = [loss(w * mask) - loss(w) for mask in (tensor([0.0, 1.0], dtype=F64), tensor([1.0, 0.0], dtype=F64))]
    close(rules.utility(w, a * w + b, a), torch.stack(removal))


def test_trace_and_bias_correction_by_hand() -> None:
    u = rules.trace(tensor([0.0], dtype=F64), tensor([4.0], dtype=F64), 0.75)
    close(u, [1.0])
    close(rules.unbiased(u, 0.75, 1), [4.0])
    u = rules.trace(u, tensor([8.0], dtype=F64), 0.75)
    close(u, [2.75])
    close(rules.unbiased(u, 0.75, 2), [2.75 / (1 - 0.75**2)])


def test_a_constant_utility_is_unbiased_at_every_step() -> None:
    u = torch.zeros(1, dtype=F64)
    for t in range(1, 50):
        u = rules.trace(u, tensor([3.0], dtype=F64), 0.99)
        close(rules.unbiased(u, 0.99, t), [3.0])


def test_global_scale_is_the_largest_of_all_parameters() -> None:
    assert rules.global_scale([tensor([1.0, -9.0]), tensor([[3.0, 2.0]]), tensor(0.5)]) == 3.0


@pytest.mark.parametrize("utilities", [[0.0, 0.0], [-1.0, -2.0], [0.0, -1.0], [1e-45, -1.0]])
def test_without_positive_utilities_zero_gives_a_half_and_negative_gives_zero(utilities: list[float]) -> None:
    u = tensor(utilities)
    gate = rules.gate(u, rules.global_scale([u]))
    expected = [0.5 if value >= 0 else 0.0 for value in utilities]
    torch.testing.assert_close(gate, tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("accident", [math.inf, math.nan])
def test_an_undefined_utility_does_not_reach_other_parameters(accident: float) -> None:
    assert rules.global_scale([tensor([accident, 1.0]), tensor([2.0, -1.0])]) == 2.0


def test_local_scale_is_the_norm_over_incoming_weights() -> None:
    close(rules.local_scale(tensor([[3.0, 4.0], [0.0, 5.0]], dtype=F64)), [[5.0], [5.0]])
    close(rules.local_scale(tensor([3.0, 4.0], dtype=F64)), [5.0])
    close(rules.local_scale(tensor(-3.0, dtype=F64)), 3.0)
    filters = torch.arange(24.0, dtype=F64).reshape(2, 3, 2, 2)
    close(
        rules.local_scale(filters).flatten(),
        [math.sqrt(sum(i * i for i in range(12))), math.sqrt(sum(i * i for i in range(12, 24)))],
    )


def test_a_zero_norm_gives_a_gate_of_one_half() -> None:
    u = torch.zeros(2, 3)
    assert (rules.gate(u, rules.local_scale(u)) == 0.5).all()


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=20), st.integers(0, 150))
def test_no_utility_is_above_its_local_scale(values: list[float], halvings: int) -> None:
    """... not even if squares underflow."""
    u = tensor([values], dtype=torch.float32) * 0.5**halvings
    assert (u.abs() <= rules.local_scale(u) * (1 + 1e-6)).all()


def test_a_unit_that_fades_away_has_gates_of_one_half() -> None:
    u = tensor([[3e-19, -2e-19], [1e-25, -1e-30]])
    gates = rules.gate(u, rules.local_scale(u))
    assert (gates[0] > 0.6).tolist() == [True, False]
    close(gates[1], [0.5, 0.5], rtol=1e-6)


def test_update_by_hand() -> None:
    w, g, gate, xi = (tensor([v], dtype=F64) for v in (2.0, 0.5, 0.25, -1.0))
    values = {"lr": 0.1, "sigma": 0.2, "weight_decay": 0.3}
    decayed = (1 - 0.03) * 2.0
    close(rules.update(w, g, gate, xi, **values), [decayed - 0.1 * (0.5 * 0.75 - 0.2 * 0.75)])
    close(rules.update(w, g, gate, xi, **values, p=0), [decayed - 0.1 * (0.5 - 0.2 * 0.75)])
    close(rules.update(w, g, gate, xi, **values, p=0, q=0), [decayed - 0.1 * (0.5 - 0.2)])
    close(rules.update(w, g, gate, xi, **values, c=0), [decayed - 0.1 * (-0.2 * 0.75)])
    close(rules.update(w, g, lr=0.1), [2.0 - 0.05])


def test_a_tiny_decay_is_not_lost() -> None:
    """lr·wd = 1e-8 is less than half a unit in the last place of 1."""
    generator = torch.Generator().manual_seed(0)
    decaying, free = torch.ones(10_000), torch.ones(10_000)
    for _ in range(100):
        g = torch.randn(10_000, generator=generator)
        decaying = rules.update(decaying, g, lr=1e-4, weight_decay=1e-4)
        free = rules.update(free, g, lr=1e-4)
    # Each difference is a few roundings of 6e-8; their mean is the decay.
    assert float((decaying - free).double().mean()) == pytest.approx(-100 * 1e-8, rel=0.05)


@given(st.integers(1, 4), st.sampled_from([(), (3,), (2, 3), (2, 3, 2, 2)]), st.booleans(), st.integers(0, 2**31))
def test_learner_dimensions_do_not_affect_results(
    learners: int, shape: tuple[int, ...], local: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=F64)

    w, g, h, u, xi = (random(learners, *shape) for _ in range(5))
    bias = random(learners, 2)
    beta, lr, sigma, decay, c, p, q = (random(learners).sigmoid() for _ in range(7))
    step = torch.arange(1.0, learners + 1, dtype=F64)

    def one_step(pick: object, dims: int) -> torch.Tensor:
        def of(value: torch.Tensor) -> torch.Tensor:
            return value[pick]

        traced = rules.trace(of(u), rules.utility(of(w), of(g), of(h)), of(beta))
        unbiased = rules.unbiased(traced, of(beta), of(step))
        scale = rules.local_scale(unbiased, dims) if local else rules.global_scale([unbiased, of(bias)], dims)
        gate = rules.gate(unbiased, scale)
        return rules.update(
            of(w), of(g), gate, of(xi), lr=of(lr), sigma=of(sigma), weight_decay=of(decay), c=of(c), p=of(p), q=of(q)
        )

    together = one_step(slice(None), 1)
    for i in range(learners):
        torch.testing.assert_close(together[i], one_step(i, 0), rtol=1e-13, atol=1e-13)
