"""AdaUPGD: numbers derived by hand, its relations to AdamW and UPGD, extreme values."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import network, parameters, train
from torch import Tensor, nn

import upgd
from upgd import rules

both = pytest.mark.parametrize("foreach", [False, True])


def force_gates(monkeypatch: pytest.MonkeyPatch, gate: float) -> None:
    """For any utilities, in both implementations."""
    monkeypatch.setattr(torch, "_foreach_sigmoid_", lambda tensors: [t.fill_(1 - gate) for t in tensors])
    monkeypatch.setattr(rules, "gate", lambda utility, scale: torch.full_like(utility, gate))


def twins(make: Callable[[Any], torch.optim.Optimizer], other: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Two optimizers must change two equal networks in the same way."""
    models = network(torch.float64), network(torch.float64)
    for model, build in zip(models, (make, other), strict=True):
        torch.manual_seed(7)
        train(model, build(model.parameters()), 30)
    for ours, theirs in zip(*(parameters(model) for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@both
def test_two_steps_on_paper(foreach: bool) -> None:
    """Two weights; β₁ = ½, β₂ = ¾, ε = ½, β = ½, lr = 0.1, wd = 0.2, no noise."""
    param = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    optimizer = upgd.AdaUPGD(
        [param], 0.1, betas=(0.5, 0.75), eps=0.5, beta_utility=0.5, sigma=0.0, weight_decay=0.2, foreach=foreach
    )
    # Step 1: averages are the gradient and its square; utilities −g·w are 1 and −¼; the larger is the scale.
    param.grad = torch.tensor([-0.5, -0.25], dtype=torch.float64)
    optimizer.step()
    kept = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-0.25))]
    w = [1.96 + 0.1 * (0.5 / 1.0) * kept[0], -0.98 + 0.1 * (0.25 / 0.75) * kept[1]]
    assert param.tolist() == pytest.approx(w, rel=1e-13)
    assert w == pytest.approx([1.9734470710684998, -0.9612607833038067], rel=1e-13)

    # Step 2: the corrections are ¾ for β₁ and for β, 1 − 9/16 = 7/16 for β₂.
    param.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)
    optimizer.step()
    first = [(0.5 * -0.25 + 0.5 * 1.0) / 0.75, 0.5 * -0.125 / 0.75]
    second = [(0.75 * 0.0625 + 0.25 * 1.0) * 16 / 7, 0.75 * 0.015625 * 16 / 7]
    utility = [(0.5 * 0.5 + 0.5 * -w[0]) / 0.75, 0.5 * -0.125 / 0.75]
    assert max(utility) < 0  # nothing is useful: both gates are 0
    expected = [0.98 * w[i] - 0.1 * first[i] / (math.sqrt(second[i]) + 0.5) for i in (0, 1)]
    assert param.tolist() == pytest.approx(expected, rel=1e-13)


@both
class TestRelations:
    def test_without_protection_and_noise_it_equals_adamw(self, foreach: bool) -> None:
        shared: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        twins(
            lambda params: upgd.AdaUPGD(params, **shared, sigma=0.0, protect_gradient=False, foreach=foreach),
            lambda params: torch.optim.AdamW(params, **shared),
        )

    def test_with_all_gates_open_it_is_adamw(self, foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        force_gates(monkeypatch, 0.0)
        twins(
            lambda params: upgd.AdaUPGD(params, 0.01, sigma=0.0, weight_decay=0.1, foreach=foreach),
            lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
        )

    def test_with_all_gates_half_open_it_is_adamw_at_half_the_rate(
        self, foreach: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        force_gates(monkeypatch, 0.5)
        twins(
            lambda params: upgd.AdaUPGD(params, 0.02, sigma=0.0, weight_decay=0.05, foreach=foreach),
            lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
        )

    @pytest.mark.parametrize("scaling", ["global", "local"])
    def test_weights_at_zero_have_no_utility_and_take_half_of_adamws_step(self, foreach: bool, scaling: str) -> None:
        ours, theirs = (nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)) for _ in range(2))
        ours.grad = theirs.grad = torch.randn(3, 4, dtype=torch.float64)
        upgd.AdaUPGD([ours], 0.02, sigma=0.0, scaling=scaling, foreach=foreach).step()
        torch.optim.AdamW([theirs], 0.01).step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("noise", ["white", "anticorrelated"])
    def test_with_a_large_epsilon_it_is_upgd(self, foreach: bool, noise: str) -> None:
        """With a large ε, g / (|g| + ε) is g / ε; a learning rate ε times as large compensates for it."""
        large = 1e12
        shared: dict[str, Any] = {"beta_utility": 0.9, "noise": noise, "foreach": foreach}
        twins(
            lambda params: upgd.AdaUPGD(
                params, 0.01 * large, betas=(0.0, 0.0), eps=large, sigma=0.1 / large, weight_decay=0.2 / large, **shared
            ),
            lambda params: upgd.UPGD(params, 0.01, sigma=0.1, weight_decay=0.2, **shared),
        )

    def test_maximize_is_adamws(self, foreach: bool) -> None:
        twins(
            lambda params: upgd.AdaUPGD(
                params, 0.01, sigma=0.0, protect_gradient=False, maximize=True, foreach=foreach
            ),
            lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.0, maximize=True),
        )


@both
class TestTakingOver:
    """Load the checkpoint of another optimizer during training."""

    def test_adamws_averages_and_steps_are_kept(self, foreach: bool) -> None:
        shared: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        ours, theirs = network(torch.float64), network(torch.float64)
        adamw = torch.optim.AdamW(theirs.parameters(), **shared)
        train(theirs, adamw, 5)
        ours.load_state_dict(theirs.state_dict())
        optimizer = upgd.AdaUPGD(ours.parameters(), 1.0, sigma=0.0, protect_gradient=False, foreach=foreach)
        optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
        assert optimizer.param_groups[0]["lr"] == 0.01
        train(theirs, adamw, 5)
        train(ours, optimizer, 5)
        assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}
        for one, other in zip(parameters(ours), parameters(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    def test_utility_begins_then(self, foreach: bool) -> None:
        """With lr = 0 nothing changes, and the gates equal those of an optimizer without earlier steps."""
        params, others = case([(3, 4), (3,)], 0), case([(3, 4), (3,)], 0)
        adamw = torch.optim.AdamW(params, 0.0)
        for step in range(100):
            put_gradients(params, step)
            adamw.step()
        optimizer, fresh = (upgd.AdaUPGD(each, 0.0, sigma=0.0, foreach=foreach) for each in (params, others))
        optimizer.load_state_dict(adamw.state_dict())
        for step in range(3):
            for each in (params, others):
                put_gradients(each, step)
            optimizer.step()
            fresh.step()
            for one, other in zip(optimizer.gates().values(), fresh.gates().values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=0)

    def test_utility_of_upgd_is_restored_and_adams_averages_start_at_zero(self, foreach: bool) -> None:
        params, others = case([(3, 4), (3,)], 0), case([(3, 4), (3,)], 0)
        shared: dict[str, Any] = {"sigma": 0.0, "beta_utility": 0.5, "foreach": foreach}
        first, second = upgd.UPGD(params, 0.0, **shared), upgd.UPGD(others, 0.0, **shared)
        for step in range(4):
            for each, own in ((params, first), (others, second)):
                put_gradients(each, step)
                own.step()
        optimizer = upgd.AdaUPGD(params, 0.0, **shared)
        optimizer.load_state_dict(first.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        put_gradients(params, 9)
        put_gradients(others, 9)
        optimizer.step()
        second.step()
        for one, other in zip(params, others, strict=True):
            gate = second.gates()[other]
            torch.testing.assert_close(optimizer.gates()[one], gate, rtol=1e-9, atol=0)
            # Adam's first step has the length of the rate.
            assert other.grad is not None
            torch.testing.assert_close(
                one.detach(), other.detach() - 0.1 * other.grad.sign() * (1 - gate), atol=1e-6, rtol=0
            )

    def test_half_of_adams_averages_are_none(self, foreach: bool) -> None:
        """Adamax also has an average of the gradient, but not of its square."""
        (param,) = case([(3,)], 0)
        other = torch.optim.Adamax([param], 0.0)
        put_gradients([param], 0)
        other.step()
        optimizer = upgd.AdaUPGD([param], 0.0, foreach=foreach)
        optimizer.load_state_dict(other.state_dict())
        put_gradients([param], 1)
        optimizer.step()
        assert param.grad is not None
        assert float(optimizer.state[param]["step"]) == 1
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.1 * param.grad)


def case(draw_shapes: list[tuple[int, ...]], seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in draw_shapes]


def put_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3)
options = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 0.5),
        "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        "eps": st.sampled_from([1e-16, 1e-8, 1e-4, 0.1]),
        "weight_decay": st.floats(0, 1),
    }
)
utility_options = st.fixed_dictionaries(
    {
        "beta_utility": st.floats(0, 0.9999),
        "scaling": st.sampled_from(["global", "local"]),
        "foreach": st.booleans(),
        "maximize": st.booleans(),
    }
)


class TestForAllSettings:
    @settings(max_examples=60)
    @given(shapes, options, utility_options, st.integers(0, 2**31))
    def test_a_step_is_adamws_scaled_by_the_gates(
        self, drawn: list[tuple[int, ...]], shared: dict[str, Any], own: dict[str, Any], seed: int
    ) -> None:
        """Each step is that of AdamW with the same gradients, scaled by ``gates()``."""
        ours, theirs = case(drawn, seed), case(drawn, seed)
        optimizer = upgd.AdaUPGD(ours, **shared, **own, sigma=0.0)
        adamw = torch.optim.AdamW(theirs, **{**shared, "weight_decay": 0.0}, maximize=own["maximize"])
        for step in range(4):
            put_gradients(ours, seed + step)
            put_gradients(theirs, seed + step)
            before = [param.detach().clone() for param in ours]
            origin = [param.detach().clone() for param in theirs]
            optimizer.step()
            adamw.step()
            gates = optimizer.gates()
            for param, start, other, other_start in zip(ours, before, theirs, origin, strict=True):
                assert ((gates[param] >= 0) & (gates[param] <= 1)).all()
                decayed = (1 - shared["lr"] * shared["weight_decay"]) * start
                expected = decayed + (other.detach() - other_start) * (1 - gates[param])
                torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-12)

    @settings(max_examples=40)
    @given(shapes, utility_options, st.integers(0, 2**31), st.integers(-20, 20))
    def test_the_unit_of_the_loss_does_not_matter(
        self, drawn: list[tuple[int, ...]], own: dict[str, Any], seed: int, power: int
    ) -> None:
        """Directions and gates are ratios: with a tiny ε, gradients a million times larger take the same steps."""
        results = []
        for scale in (1.0, 2.0**power):
            params = case(drawn, seed)
            optimizer = upgd.AdaUPGD(params, 0.1, eps=1e-30, sigma=0.0, **own)
            for step in range(4):
                put_gradients(params, seed + step, scale)
                optimizer.step()
            results.append(params)
        for plain, scaled in zip(*results, strict=True):
            torch.testing.assert_close(plain, scaled, rtol=1e-9, atol=1e-12)


@both
class TestNumbersAtTheEdge:
    @pytest.mark.parametrize("scaling", ["global", "local"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    def test_gradients_that_are_all_zero(self, foreach: bool, scaling: str, dtype: torch.dtype) -> None:
        param = nn.Parameter(torch.ones(3, 4, dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer = upgd.AdaUPGD([param], sigma=0.0, eps=1e-30, scaling=scaling, foreach=foreach)
        optimizer.step()
        assert torch.equal(param.detach(), torch.ones(3, 4, dtype=dtype))

    @pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-20, 1e15, 1e30])
    @pytest.mark.parametrize("betas", [(0.0, 0.5), (0.9, 0.9999)])
    def test_tiny_and_huge_gradients(self, foreach: bool, scale: float, betas: tuple[float, float]) -> None:
        param = nn.Parameter(torch.randn(3, 4))
        before = param.detach().clone()
        optimizer = upgd.AdaUPGD([param], 0.1, betas=betas, sigma=0.0, foreach=foreach)
        for _ in range(3):
            param.grad = scale * torch.randn(3, 4)
            optimizer.step()
        assert param.isfinite().all()
        assert ((param - before).abs() < 1.0).all()  # a few times the learning rate, for any gradient

    @pytest.mark.parametrize("accident", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("scaling", ["global", "local"])
    def test_a_non_finite_value_stays_in_its_parameter(self, foreach: bool, accident: float, scaling: str) -> None:
        spoilt, sound = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
        spoilt.grad, sound.grad = torch.randn(3, 4), torch.randn(3, 4)
        spoilt.grad[1, 2] = accident
        optimizer = upgd.AdaUPGD([spoilt, sound], scaling=scaling, foreach=foreach)
        for _ in range(3):
            optimizer.step()
        for value in (sound, *optimizer.state[sound].values()):
            assert value.isfinite().all()
        assert spoilt[[0, 2]].isfinite().all()

    def test_averages_of_16_bit_parameters_have_32(self, foreach: bool) -> None:
        """(1 − 0.999)·g² of an ordinary gradient underflows in 16 bits."""
        param = nn.Parameter(torch.ones(4, dtype=torch.float16))
        param.grad = torch.full_like(param, 1e-3)
        optimizer = upgd.AdaUPGD([param], 0.25, sigma=0.0, protect_gradient=False, foreach=foreach)
        optimizer.step()
        state = optimizer.state[param]
        assert {state[name].dtype for name in ("utility", "exp_avg", "exp_avg_sq")} == {torch.float32}
        torch.testing.assert_close(param.detach(), torch.full_like(param, 0.75), rtol=1e-3, atol=0)


@both
def test_groups_have_their_own_averages_and_share_the_scale(foreach: bool) -> None:
    a, b = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (1.0, -2.0))
    a.grad, b.grad = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    groups = [{"params": [a], "eps": 1.0}, {"params": [b], "betas": [0.0, 0.5], "lr": 0.2}]
    upgd.AdaUPGD(groups, 0.1, eps=2.0, sigma=0.0, foreach=foreach).step()
    # Utilities −g·w are 1 and 4, so the scale is 4; directions are −1/(1 + 1) and 2/(2 + 2).
    assert a.item() == pytest.approx(1.0 + 0.1 * 0.5 / (1 + math.exp(0.25)), rel=1e-13)
    assert b.item() == pytest.approx(-2.0 - 0.2 * 0.5 / (1 + math.exp(1.0)), rel=1e-13)


@both
def test_noise_has_the_asked_for_spread(foreach: bool) -> None:
    """Weights without gradient and utility get half of it."""
    param = nn.Parameter(torch.ones(100_000, dtype=torch.float64))
    param.grad = torch.zeros_like(param)
    upgd.AdaUPGD([param], 0.1, sigma=0.5, foreach=foreach, generator=torch.Generator().manual_seed(0)).step()
    moved: Tensor = param.detach() - 1
    assert abs(float(moved.mean())) < 5 * 0.025 / math.sqrt(1e5)
    assert float(moved.std()) == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("betas", 0.9),
        ("betas", (0.9, 1.0)),
        ("betas", (0.5, 0.9, 0.99)),
        ("betas", (0.9, "x")),
        ("betas", None),
        ("eps", 0.0),
        ("eps", -1.0),
        ("eps", 1e-45),
        ("eps", math.nan),
        ("eps", "small"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be .*; try {option}=") as error:
        upgd.AdaUPGD([nn.Parameter(torch.ones(2))], **{option: value})
    assert f"it is {value!r};" in str(error.value)


def test_numbers_of_numpy_become_pythons() -> None:
    betas, eps = np.array([0.5, 0.75], dtype=np.float32), np.float32(1e-6)
    group = upgd.AdaUPGD([nn.Parameter(torch.ones(2))], betas=(betas[0], betas[1]), eps=eps).param_groups[0]
    assert group["betas"] == (0.5, 0.75)
    assert [type(number) for number in (*group["betas"], group["eps"])] == [float] * 3
