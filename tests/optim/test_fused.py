"""Fused steps: numba's on the CPU, and the GPU's kernels in Triton's interpreter."""

import copy
import os

import pytest
import torch
from torch import nn

import upgd
from upgd import noise

pytest.importorskip("numba", reason="fused steps on the CPU need numba")

import fused_checks as checks

from upgd.kernels.cuda_step import CudaStep
from upgd.optim import _fused

triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not _fused._installed("triton"), reason="needs Triton's interpreter"
)


@pytest.fixture(params=["numba", pytest.param("triton", marks=triton)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        monkeypatch.setattr(_fused, "make_engine", CudaStep)
    return request.param


@pytest.mark.parametrize("case", checks.CASES)
def test_fused_equals_the_for_loop(case: str, engine: str) -> None:
    checks.check_equals_the_for_loop(case, "cpu", steps=200 if engine == "numba" else 3)


def test_one_maximum_over_groups_with_and_without_gates(engine: str) -> None:
    checks.check_gated_and_local_groups("cpu", steps=20 if engine == "numba" else 2)


def test_accidents_stay_where_they_are(engine: str) -> None:
    checks.check_accidents_stay_where_they_are("cpu")


def test_gradient_scaling(engine: str) -> None:
    checks.check_gradient_scaling("cpu")


@triton
def test_overlap_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fused, "make_engine", CudaStep)
    checks.check_overlap("cpu", steps=10)


def test_what_overlap_needs() -> None:
    model = checks.network("cpu")
    model(torch.randn(5, 8)).sum().backward()
    with pytest.raises(ValueError, match="overlap=True needs fused steps; pass fused=True"):
        upgd.UPGD(model.parameters(), overlap=True).step()
    with pytest.raises(RuntimeError, match="overlap=True is not possible, because it is for parameters on a GPU"):
        upgd.UPGD(model.parameters(), overlap=True, fused=True).step()


def test_reasons_against_fused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"fused=True is not possible, because a parameter is torch.float64 on cpu"):
        upgd.UPGD([param], fused=True).step()
    with pytest.raises(ValueError, match="fused=True is for all parameter groups together"):
        upgd.UPGD([param], fused=True, foreach=True).step()
    single = nn.Parameter(torch.ones(3))
    single.grad = torch.ones(3)
    monkeypatch.setattr(_fused, "_installed", lambda package: False)
    with pytest.raises(RuntimeError, match="because it needs numba, which is not installed"):
        upgd.UPGD([single], fused=True).step()


def test_on_the_cpu_steps_are_fused_only_where_asked() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = upgd.UPGD([param])
    optimizer.step()
    assert optimizer.param_groups[0]["seed"] is None


def drawn(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[torch.Tensor]:
    """The noise of a step with σ = lr = 1 and no gradient."""
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return [(old - param.detach()).reshape(-1) for old, param in zip(before, params, strict=True)]


class TestNoise:
    def test_it_is_that_of_the_definition(self, engine: str) -> None:
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((5003,), (3, 7), ())]
        optimizer = upgd.PGD(params, 1.0, sigma=1.0, seed=2**40 + 5, fused=True)
        for step in (1, 2):
            for number, found in enumerate(drawn(optimizer, params)):
                expected = noise.parameter_normals(2**40 + 5, step, number, 0, found.numel(), dtype=torch.float64)
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)

    def test_moments_distribution_and_independence(self) -> None:
        from scipy import stats

        params = [nn.Parameter(torch.zeros(200_001)) for _ in range(2)]
        optimizer = upgd.PGD(params, 1.0, sigma=1.0, seed=11, fused=True)
        streams = [one for _ in range(2) for one in drawn(optimizer, params)]
        together = torch.cat(streams).double()
        count = len(together)
        for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(float((together**power).mean()) - expected) < 4 * (variance / count) ** 0.5
        assert stats.kstest(together.numpy(), "norm").pvalue > 1e-3
        correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(4)
        assert float(correlations.abs().max()) < 4.5 / 200_001**0.5  # of steps and of tensors

    def test_the_global_generator_seeds_it(self) -> None:
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            params = [nn.Parameter(torch.zeros(50))]
            found.append(drawn(upgd.PGD(params, 1.0, sigma=1.0, fused=True), params)[0])
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


def test_plans_are_made_anew_where_something_changed() -> None:
    """Settings, state, parameters that get or lose gradients, and parameters in other memory."""
    trained = []
    for options in ({"fused": True}, {"foreach": False}):
        params = checks.parameters("cpu")[:3]
        optimizer = upgd.AdaUPGD(params, 0.01, sigma=0.1, seed=4, **options)
        for step in range(14):
            checks.put_gradients(params, step)
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.02
            elif step == 4:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            elif step == 6:
                params[1].grad = None
            elif step == 8:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif step == 10:
                params[0].data = params[0].data.clone()
            elif step == 12:
                optimizer.state[params[0]]["utility"] = torch.zeros_like(params[0])
            optimizer.step()
        trained.append(params)
    checks.assert_close(*trained, ulps=50, dtype=torch.float32)


def test_state_is_that_of_the_other_implementations() -> None:
    """Training goes on from a checkpoint with another implementation as if nothing had happened."""
    trained = []
    for first, second in (({"fused": True}, {"foreach": True}), ({"foreach": True}, {"fused": True})):
        params = checks.parameters("cpu")
        before, after = (upgd.AdaUPGD(params, 0.01, sigma=0.1, seed=4, **options) for options in (first, second))
        for step in range(3):
            checks.put_gradients(params, step)
            before.step()
        options = after.state_dict()["param_groups"]
        after.load_state_dict({**copy.deepcopy(before.state_dict()), "param_groups": options})
        for step in range(3, 6):
            checks.put_gradients(params, step)
            after.step()
        trained.append(params)
    checks.assert_close(*trained, ulps=50, dtype=torch.float32)


def test_autograd_notices_that_parameters_changed() -> None:
    model = checks.network("cpu")
    optimizer = upgd.UPGD(model.parameters(), fused=True)
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_step_is_fused() -> None:
    trained = []
    for compiled in (False, True):
        params = [nn.Parameter(torch.ones(3, 4))]
        optimizer = upgd.UPGD(params, seed=1, fused=True)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for n in range(3):
            checks.put_gradients(params, n)
            step()
        assert optimizer._repeated is not None
        trained.append(params)
    assert torch.equal(trained[0][0], trained[1][0])


def test_a_rule_loses_what_is_multiplied_by_zero() -> None:
    from upgd.kernels.source import simplified
    from upgd.methods import METHODS
    from upgd.methods.tracing import traced

    rule = traced(METHODS["upgd"]())
    keys = [scalar.key for scalar in rule.scalars]
    known = {
        keys.index(name): value for name, value in (("sigma", 0.0), ("weight_decay", 0.0), ("c", 1.0)) if name in keys
    }
    assert rule.uses("noise")
    short = simplified(rule, known, noise=False)
    assert not short.uses("noise")
    assert len(short.nodes) < len(rule.nodes)
