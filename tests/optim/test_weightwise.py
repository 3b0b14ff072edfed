"""The weight-wise optimizers: groups, identities, extreme values, memory."""

import math
from typing import Any

import pytest
import torch
from optimizer_cases import backward, network, parameters, train
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import upgd
from upgd import rules
from upgd.optim import _foreach

both = pytest.mark.parametrize("foreach", [False, True])


def random_parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=dtype)
    return params


def assert_finite(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for param in params:
        assert param.isfinite().all()
        for value in optimizer.state[param].values():
            assert value.isfinite().all()


class TestGroups:
    @both
    def test_groups_have_their_own_settings_and_share_the_global_maximum(self, foreach: bool) -> None:
        a, b = random_parameters((3, 2), (4,))
        before = [a.detach().clone(), b.detach().clone()]
        groups = [{"params": [a], "lr": 0.1, "beta_utility": 0.5}, {"params": [b], "weight_decay": 0.3}]
        optimizer = upgd.UPGD(groups, lr=0.2, beta_utility=0.9, sigma=0.0, foreach=foreach)
        optimizer.step()
        # At the first step, the unbiased utility is −g·w for any β.
        utilities = [-a.grad * before[0], -b.grad * before[1]]
        eta = max(float(u.max()) for u in utilities)
        assert eta > 0
        keep = [1 - torch.sigmoid(u / eta) for u in utilities]
        torch.testing.assert_close(a.data, before[0] - 0.1 * a.grad * keep[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(b.data, (1 - 0.2 * 0.3) * before[1] - 0.2 * b.grad * keep[1], rtol=1e-12, atol=0)

    @both
    def test_groups_that_differ_in_nothing_are_one_group(self, foreach: bool) -> None:
        models = network(torch.float64), network(torch.float64)
        split = [{"params": list(models[1][0].parameters())}, {"params": list(models[1][3:].parameters())}]
        for model, params in zip(models, (models[0].parameters(), split), strict=True):
            optimizer = upgd.UPGD(params, sigma=0.01, foreach=foreach)
            torch.manual_seed(0)
            train(model, optimizer, 10)
        for a, b in zip(parameters(models[0]), parameters(models[1]), strict=True):
            assert torch.equal(a, b)

    @both
    def test_a_parameter_that_joins_late_has_its_own_bias_correction(self, foreach: bool) -> None:
        a, b = random_parameters((3,), (3,))
        optimizer = upgd.UPGD([a, b], lr=0.0, beta_utility=0.9, sigma=0.0, foreach=foreach)
        late, b.grad = b.grad, None
        optimizer.step()
        optimizer.step()
        b.grad = late
        optimizer.step()
        assert (optimizer.state[a]["step"], optimizer.state[b]["step"]) == (3, 1)
        # Nothing changes (lr = 0), so every unbiased utility is −g·w.
        utilities = {a: -a.grad * a.data, b: -b.grad * b.data}
        eta = rules.global_scale(utilities.values())
        for param, gate in optimizer.gates().items():
            torch.testing.assert_close(gate, rules.gate(utilities[param], eta), rtol=1e-12, atol=0)

    def test_a_group_added_later_takes_part_and_is_checked(self) -> None:
        a, b = random_parameters((3,), (3,))
        optimizer = upgd.UPGD([a])
        with pytest.raises(ValueError, match=r"lr must be a number of at least 0, but it is -1"):
            optimizer.add_param_group({"params": [b], "lr": -1})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [b], "scaling": "local"})
        optimizer.step()
        assert set(optimizer.gates()) == {a, b}

    @both
    @pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    @pytest.mark.parametrize("cls", [upgd.UPGD, upgd.AdaUPGD, upgd.PGD])
    def test_a_group_may_have_several_dtypes(self, foreach: bool, dtypes: list[torch.dtype], cls: Any) -> None:
        """Every parameter changes as in 64 bits, up to its own precision."""
        exact = random_parameters((3, 4), (3,))
        mixed = [nn.Parameter(param.detach().to(dtype)) for param, dtype in zip(exact, dtypes, strict=True)]
        for param, twin in zip(exact, mixed, strict=True):
            twin.grad = param.grad.to(twin.dtype)
        for params in (exact, mixed):
            cls(params, 0.5, sigma=0.0, foreach=foreach).step()
        for param, twin in zip(exact, mixed, strict=True):
            torch.testing.assert_close(twin.to(torch.float64), param, rtol=0.02, atol=0.02)

    def test_named_parameters(self) -> None:
        model = network()
        optimizer = upgd.UPGD(model.named_parameters())
        train(model, optimizer, 2)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
        upgd.UPGD(network().named_parameters()).load_state_dict(saved)

    @pytest.mark.parametrize(("params", "error"), [([], ValueError), (torch.ones(3), TypeError), (["w"], TypeError)])
    def test_invalid_params_are_refused(self, params: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            upgd.UPGD(params)


class TestIdentities:
    @both
    def test_with_all_gates_at_zero_upgd_is_pgd(self, foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = (random_parameters((3, 4), (3,)) for _ in range(2))
        if foreach:
            monkeypatch.setattr(torch, "_foreach_sigmoid_", lambda tensors: [t.fill_(1.0) for t in tensors])
        else:
            monkeypatch.setattr(rules, "gate", lambda utility, scale: torch.zeros_like(utility))
        for params, optimizer in (
            (ours, upgd.UPGD(ours, 0.1, sigma=0.3, weight_decay=0.2, foreach=foreach)),
            (theirs, upgd.PGD(theirs, 0.1, sigma=0.3, weight_decay=0.2, foreach=foreach)),
        ):
            torch.manual_seed(0)
            for _ in range(20):
                optimizer.step()
            assert_finite(params, optimizer)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)

    @both
    def test_without_noise_pgd_is_gradient_descent(self, foreach: bool) -> None:
        """… with decoupled weight decay, which for plain gradient descent is torch's coupled one."""
        models = network(torch.float64), network(torch.float64)
        optimizers = (
            upgd.PGD(models[0].parameters(), 0.1, sigma=0.0, weight_decay=0.2, foreach=foreach),
            torch.optim.SGD(models[1].parameters(), 0.1, weight_decay=0.2),
        )
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 20)
        for a, b in zip(parameters(models[0]), parameters(models[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    @both
    def test_anticorrelated_noise_sums_to_its_last_draw(self, foreach: bool) -> None:
        (param,) = random_parameters((50,))
        param.grad.zero_()
        before = param.detach().clone()
        optimizer = upgd.PGD([param], 1.0, sigma=0.5, noise="anticorrelated", foreach=foreach)
        for _ in range(30):
            optimizer.step()
        drawn = optimizer.state[param]["previous_noise"]
        torch.testing.assert_close(before - param.data, 0.5 * drawn, rtol=1e-10, atol=1e-12)

    def test_noise_has_the_asked_for_spread(self) -> None:
        (param,) = random_parameters((100_000,))
        param.grad.zero_()
        before = param.detach().clone()
        upgd.PGD([param], 0.1, sigma=0.5).step()
        moved = param.detach() - before
        assert abs(float(moved.mean())) < 5 * 0.05 / math.sqrt(1e5)
        assert float(moved.std()) == pytest.approx(0.05, rel=0.01)

    @pytest.mark.parametrize("scaling", ["global", "local"])
    def test_gates_equal_those_of_the_next_update(self, scaling: str) -> None:
        (param,) = random_parameters((4, 5))
        optimizer = upgd.UPGD([param], 0.1, sigma=0.0, scaling=scaling)
        before = param.detach().clone()
        optimizer.step()
        used = 1 - (before - param.detach()) / (0.1 * param.grad)
        torch.testing.assert_close(optimizer.gates()[param], used, rtol=1e-9, atol=1e-12)


@both
class TestNumbersAtTheEdge:
    @pytest.mark.parametrize("scaling", ["global", "local"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    def test_all_zero_gradients_at_the_first_step(self, foreach: bool, scaling: str, dtype: torch.dtype) -> None:
        params = random_parameters((3, 4), (3,), (), dtype=dtype)
        for param in params:
            param.grad.zero_()
        optimizer = upgd.UPGD(params, scaling=scaling, foreach=foreach)
        optimizer.step()
        assert_finite(params, optimizer)
        assert all((gate == 0.5).all() for gate in optimizer.gates().values())

    def test_negative_utilities_protect_nothing(self, foreach: bool) -> None:
        params = random_parameters((3, 4), (3,))
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = param.detach().clone()
        optimizer = upgd.UPGD(params, 0.1, sigma=0.0, foreach=foreach)
        optimizer.step()
        for param, start in zip(params, before, strict=True):
            torch.testing.assert_close(param.data, 0.9 * start, rtol=1e-12, atol=0)

    def test_the_scale_is_positive_in_every_dtype_without_positive_utilities(self, foreach: bool) -> None:
        params = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64)]
        for param in params:
            param.grad = param.new_tensor([0.0, 1.0])
        optimizer = upgd.UPGD(params, 0.1, sigma=0.0, foreach=foreach)
        optimizer.step()
        for param in params:
            torch.testing.assert_close(param.detach(), param.new_tensor([1.0, 0.9]))
            assert optimizer.gates()[param].tolist() == [0.5, 0.0]

    @pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e-38, 1e-42, 1e30, 1e38])
    @pytest.mark.parametrize("scaling", ["global", "local"])
    @pytest.mark.parametrize("beta", [0.0, 0.9999])
    def test_tiny_and_huge_utilities(self, foreach: bool, scale: float, scaling: str, beta: float) -> None:
        params = random_parameters((3, 4), (3,), dtype=torch.float32)
        for param in params:
            param.grad *= scale / 10
        # Where the utilities themselves are huge, a step would take the weights out of range by itself.
        lr = 1e-3 if scale < 1 else 0.0
        optimizer = upgd.UPGD(params, lr, beta_utility=beta, scaling=scaling, foreach=foreach)
        for _ in range(3):
            optimizer.step()
            assert_finite(params, optimizer)
            for gate in optimizer.gates().values():
                assert ((gate >= 0) & (gate <= 1)).all()

    @pytest.mark.parametrize(
        ("scaling", "scale"), [("global", 1e-20), ("global", 1e18), ("local", 1e-15), ("local", 1e18)]
    )
    def test_gates_do_not_depend_on_the_unit_of_the_loss(self, foreach: bool, scale: float, scaling: str) -> None:
        params = random_parameters((3, 4), (3,), dtype=torch.float32)
        reference = upgd.UPGD(random_parameters((3, 4), (3,), dtype=torch.float32), lr=0.0, scaling=scaling)
        optimizer = upgd.UPGD(params, lr=0.0, sigma=0.0, scaling=scaling, foreach=foreach)
        for param in params:
            param.grad *= scale
        optimizer.step()
        reference.step()
        for ours, theirs in zip(optimizer.gates().values(), reference.gates().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("scale", [1e-24, 1e-26, 1e-30, 1e-36])
    @pytest.mark.parametrize("beta", [0.0, 0.999])
    def test_utilities_whose_squares_vanish_have_gates_of_one_half(
        self, foreach: bool, scale: float, beta: float
    ) -> None:
        (param,) = random_parameters((3, 4), dtype=torch.float32)
        assert param.grad is not None
        param.grad *= scale
        before = param.detach().clone()
        optimizer = upgd.UPGD([param], 0.1 / scale, beta_utility=beta, sigma=0.0, scaling="local", foreach=foreach)
        optimizer.step()
        torch.testing.assert_close(before - param.detach(), 0.05 / scale * param.grad, rtol=1e-3, atol=0)

    @pytest.mark.parametrize("accident", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("scaling", ["global", "local"])
    def test_a_non_finite_value_stays_in_its_parameter(self, foreach: bool, accident: float, scaling: str) -> None:
        spoilt, sound = random_parameters((3, 4), (3, 4), dtype=torch.float32)
        spoilt.grad[1, 2] = accident
        optimizer = upgd.UPGD([spoilt, sound], scaling=scaling, foreach=foreach)
        for _ in range(3):
            optimizer.step()
        assert_finite([sound], optimizer)
        elsewhere = torch.ones(3, 4, dtype=torch.bool)
        elsewhere[1, :] = False
        assert spoilt[elsewhere].isfinite().all()
        assert not spoilt[1, 2].isfinite()

    def test_curvature_must_know_the_parameter(self, foreach: bool) -> None:
        class Wrong:
            def diagonal(self, param: Tensor) -> Tensor:
                return torch.ones(7)

        params = random_parameters((3, 4))
        with pytest.raises(ValueError, match=r"shape \(3, 4\), but it gave shape \(7,\)"):
            upgd.UPGD(params, curvature=Wrong(), foreach=foreach).step()

    def test_a_step_without_curvature_changes_nothing(self, foreach: bool) -> None:
        class Partial:
            def diagonal(self, param: Tensor) -> Tensor:
                if param is params[1]:
                    raise RuntimeError("no diagonal")
                return torch.ones_like(param)

        params = random_parameters((3, 4), (2,))
        groups = [{"params": [param]} for param in params]
        optimizer = upgd.UPGD(groups, curvature=Partial(), foreach=foreach)
        with pytest.raises(RuntimeError, match="no diagonal"):
            optimizer.step()
        assert not optimizer.state

    def test_search_does_not_multiply_infinite_gradients_by_zero(self, foreach: bool) -> None:
        (param,) = random_parameters((3, 4), dtype=torch.float32)
        param.grad[1, 2] = math.inf
        upgd.UPS([param], foreach=foreach).step()
        assert param.isfinite().all()


def test_an_object_without_diagonal_is_no_curvature() -> None:
    with pytest.raises(TypeError, match=r"curvature must have a method diagonal.*HesScale"):
        upgd.UPGD(random_parameters((2,)), curvature="hesscale")


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are still in memory; a view keeps its base."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self.alive = {pointer: kept for pointer, kept in self.alive.items() if not kept[0].expired()}
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known | self.alive.keys():
                storage = made.untyped_storage()
                self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("noise", ["white", "anticorrelated"])
@pytest.mark.parametrize("shapes", [[(3000, 1000)], [(500, 1000), (10,)] * 6, [(100, 1000)] * 30])
@pytest.mark.parametrize("scaling", ["global", "local"])
@pytest.mark.parametrize(("cls", "averages", "temporaries"), [(upgd.UPGD, 1, 1), (upgd.AdaUPGD, 3, 2)])
def test_memory(
    noise: str, shapes: list[tuple[int, ...]], scaling: str, cls: Any, averages: int, temporaries: int
) -> None:
    """One tensor of state per parameter and average (one more with anticorrelated noise); one temporary the size of the
    largest parameter, and besides no more than a few blocks."""
    params = random_parameters(*shapes, dtype=torch.float32)
    size = sum(param.nbytes for param in params)
    optimizer = cls(params, sigma=0.1, scaling=scaling, noise=noise, foreach=True)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1)
    assert kept == size * (averages + (noise == "anticorrelated"))
    with LiveMemory() as memory:
        optimizer.step()
    block = 4 * _foreach._BLOCK_ENTRIES["cpu"]
    scales = 2 * 4 * sum(shape[0] for shape in shapes)  # one number per unit, and its negative
    largest = max(param.nbytes for param in params)
    blocks = temporaries + (noise == "anticorrelated")
    assert largest <= memory.peak <= max(largest, block) + blocks * block + scales + 1000  # some numbers


@pytest.mark.parametrize("sigma", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"scaling": "local"}], ids=str)
@pytest.mark.parametrize("cls", [upgd.UPGD, upgd.AdaUPGD])
def test_memory_on_other_devices(
    sigma: float, options: dict[str, Any], cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All temporaries together have the size of the largest parameter, or a sixteenth more with noise; and there are few
    blocks."""
    monkeypatch.delitem(_foreach._BLOCK_ENTRIES, "cpu")
    monkeypatch.setattr(_foreach, "_LEAST_BLOCK_ENTRIES", 1)
    shapes = [(3000, 100), *[(100, 100), (100,)] * 60]
    params = random_parameters(*shapes, dtype=torch.float32)
    optimizer = cls(params, sigma=sigma, foreach=True, **options)
    optimizer.step()
    calls = 0
    sigmoid = torch._foreach_sigmoid_

    def counted(tensors: list[Tensor]) -> None:
        nonlocal calls
        calls += 1
        sigmoid(tensors)

    monkeypatch.setattr(torch, "_foreach_sigmoid_", counted)
    with LiveMemory() as memory:
        optimizer.step()
    largest = max(param.nbytes for param in params)
    numbers = 8 * len(params) + 8 * sum(shape[0] for shape in shapes)  # scales, one per parameter or unit
    assert 0.2 * largest <= memory.peak <= (1 + 1 / 16 if sigma else 1) * largest + numbers + 1000
    temporaries = 1 + ("weight_decay" in options) + 2 * (cls is upgd.AdaUPGD)
    size = sum(param.nbytes for param in params)
    assert calls <= 2 * size / largest * temporaries * (20 if sigma else 1)


def test_backward_after_a_step_sees_the_new_parameters() -> None:
    """Autograd's version counter detects in-place updates: using a stale graph is an error."""
    model = network()
    optimizer = upgd.UPGD(model.parameters())
    x = torch.randn(2, 1, 6, 6)
    stale = model(x).square().sum()
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def _two_groups(**options: float) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2))], **options} for _ in range(2)]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (upgd.PGD, {"lr": 0.1, "sigma": 0.5}),
        (upgd.ShrinkAndPerturb, {"lr": 0.1, "sigma": 0.5, "weight_decay": 0.25}),
    ],
)
def test_groups_may_set_options_without_defaults(optimizer: Any, options: dict[str, float]) -> None:
    built = optimizer(_two_groups(**options))
    assert [{name: group[name] for name in options} for group in built.param_groups] == [options, options]
    mixed = optimizer([*_two_groups(), *_two_groups(lr=0.2)], **options)
    assert [group["lr"] for group in mixed.param_groups] == [0.1, 0.1, 0.2, 0.2]
    for missing in options:
        rest = {name: value for name, value in options.items() if name != missing}
        with pytest.raises(ValueError, match=f"no default for {missing}, .* pass {missing}=... to the optimizer or in"):
            optimizer([*_two_groups(**options), *_two_groups(**rest)])
        with pytest.raises(ValueError, match=f"no default for {missing}"):
            optimizer([nn.Parameter(torch.ones(2))], **rest)
