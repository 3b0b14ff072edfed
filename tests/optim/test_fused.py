"""Fused steps: numba's on the CPU, and the GPU's kernels in Triton's interpreter."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fused_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import upgd
from upgd import noise
from upgd.methods import METHODS
from upgd.optim import _fused, _narrow
from upgd.optim.from_method import MethodOptimizer

triton = pytest.mark.skipif(not checks.interpreted(), reason="needs Triton's interpreter")


@pytest.fixture(params=["numba", pytest.param("triton", marks=triton)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    return request.param


#: numba needs seconds to compile each case. These consist of parts of the others.
COMBINED = ("UPGD, nonprotecting", "Anti-PGD", "ShrinkAndPerturb")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in COMBINED else case for case in checks.CASES]
)
def test_numba_equals_the_for_loop(case: str) -> None:
    checks.check_equals_the_for_loop(case, "cpu", steps=200)


@triton
@pytest.mark.parametrize("case", checks.CASES)
def test_triton_equals_the_for_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    checks.check_equals_the_for_loop(case, "cpu", steps=3)


@triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", checks.CODED)
def test_traces_in_8_bits(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    monkeypatch.setattr(_narrow, "LEAST", 500)
    checks.check_coded_state(case, "cpu", dtype, 2, [(7, 77), (2, 300, 2), (5, 7), (30,), (2, 700), (2, 512)])


def test_one_maximum_over_groups_with_and_without_gates(engine: str) -> None:
    checks.check_gated_and_local_groups("cpu", steps=20 if engine == "numba" else 2)


def test_non_finite_values_stay_where_they_are(engine: str) -> None:
    checks.check_accidents_stay_where_they_are("cpu")


def test_truth_values_limits_and_small_arguments(engine: str) -> None:
    trained = []
    for options in ({"fused": True}, {"fused": False}):
        torch.manual_seed(0)
        param = nn.Parameter(torch.rand(7, 33))
        optimizer = MethodOptimizer([param], checks.Masks, lr=0.1, **options)
        for step in range(3):
            torch.manual_seed(step)
            param.grad = torch.randn(7, 33).clamp(min=0)
            optimizer.step()
        trained.append(param.detach())
    torch.testing.assert_close(*trained, rtol=2e-6, atol=2e-7)


def test_nan_in_the_state_stays() -> None:
    """Its page is not lost to the maximum, in which NaN does not count."""
    trained = []
    for options in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        param = nn.Parameter(torch.rand(40, 50) + 0.1)
        optimizer = upgd.UPGD([param], lr=0.1, sigma=0.0, **options)
        for step in range(3):
            param.grad = torch.randn(40, 50)
            if step == 0:
                param.grad[3, 4] = float("nan")
            optimizer.step()
        trained.append(optimizer.state[param]["utility"])
    assert [int(utility.isnan().sum()) for utility in trained] == [1, 1]
    torch.testing.assert_close(*trained, equal_nan=True)


def test_gradient_scaling(engine: str) -> None:
    checks.check_gradient_scaling("cpu")


@triton
def test_overlap_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    checks.check_overlap("cpu", steps=6)


class Launches:
    """Wraps a kernel and counts its launches."""

    def __init__(self, name: str, kernel: Any, launched: list[str]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(self._name)
        return self._kernel[grid]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of launched kernels, in Triton's interpreter."""
    from upgd.kernels import cuda_layout

    names: list[str] = []
    real = cuda_layout.kernels

    def counting(*arguments: Any) -> SimpleNamespace:
        module = real(*arguments)
        kinds = ("prepare", "observe", "combine", "conclude", "update")
        return SimpleNamespace(**{name: Launches(name, getattr(module, name), names) for name in kinds})

    monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    monkeypatch.setattr(cuda_layout, "kernels", counting)
    return names


#: The launches of a step, for each group and for the maximum.
LAUNCHES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "UPGD": (upgd.UPGD, {}, ["observe", "conclude", "update"]),
    "UPGD, learning rate on the device": (upgd.UPGD, {"lr": torch.tensor(0.1)}, ["observe", "conclude", "update"]),
    "AdaUPGD": (upgd.AdaUPGD, {"weight_decay": 0.1}, ["observe", "conclude", "update"]),
    "UPS": (upgd.UPS, {"noise": "anticorrelated"}, ["observe", "conclude", "update"]),
    "local": (upgd.UPGD, {"scaling": "local"}, ["observe", "update"]),
    "PGD": (upgd.PGD, {"lr": 0.1, "sigma": 0.1}, ["prepare", "update"]),
}


@triton
@pytest.mark.parametrize("case", LAUNCHES)
def test_two_launches_per_group_and_one_for_the_maximum(case: str, launched: list[str]) -> None:
    build, options, expected = LAUNCHES[case]
    params = [nn.Parameter(torch.ones(3, 4)) for _ in range(4)]
    for groups in (1, 2):
        half = len(params) // groups
        optimizer = build([{"params": params[n * half : (n + 1) * half]} for n in range(groups)], fused=True, **options)
        for step in range(3):
            launched.clear()
            checks.put_gradients(params, step)
            if not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        assert sorted(launched) == sorted(name for name in expected for _ in range(1 if name == "conclude" else groups))


@triton
def test_launches_with_a_gradient_scaler_and_overlapped(launched: list[str]) -> None:
    model = checks.network("cpu")
    optimizer = upgd.UPGD(model.parameters(), fused=True, overlap=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        during_backward = list(launched)
        launched.clear()
        optimizer.step()
        in_step = list(launched)
        launched.clear()
    assert during_backward == ["observe"] * 4
    assert in_step == ["observe", "conclude", "update"]  # this observe has no blocks
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    optimizer.step()
    assert launched == ["observe", "conclude", "update"]


def test_the_maximum_of_a_step_ignores_earlier_steps(engine: str) -> None:
    trained = []
    for options in ({"fused": True}, {"foreach": False}):
        params = [nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))]
        optimizer = upgd.UPGD(params, 0.1, sigma=0.0, beta_utility=0.0, **options)
        for size in (10.0, 0.1):
            params[0].grad = size * torch.linspace(-1, 2, 12).reshape(3, 4)
            optimizer.step()
        trained.append(params)
    checks.assert_close(*trained, ulps=20, dtype=torch.float32)


def spike(params: list[nn.Parameter], step: int) -> None:
    """Set gradients that put the largest utility at another place in every step."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
        place = int(torch.randint(param.numel(), (), generator=generator))
        param.grad.view(-1)[place] = -(3.0 if step % 5 else 30.0) * param.detach().view(-1)[place].sign()


@pytest.mark.parametrize("modified", [False, True])
def test_the_maximum_is_found_in_any_page(modified: bool) -> None:
    """The first pass on the CPU does not read pages that cannot contain the maximum."""
    trained = []
    for options in ({"fused": True}, {"foreach": False}):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(70, 1001), (3000,), (5,)]]
        optimizer = upgd.UPGD(params, 0.01, sigma=0.0, beta_utility=0.8, **options)
        for step in range(30):
            spike(params, step)
            if modified and step == 12:
                optimizer.state[params[0]]["utility"][69, 900] = 50.0
            optimizer.step()
        trained.append(params)
    checks.assert_close(*trained, ulps=20, dtype=torch.float32)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 3000) | st.integers(1, 400_000), min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    beta=st.sampled_from([0.3, 0.9, 0.999]),
)
def test_pages_that_are_not_read_change_nothing(sizes: list[int], seed: int, beta: float) -> None:
    trained = []
    for every_page in (False, True):
        generator = torch.Generator().manual_seed(seed)
        params = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        optimizer = upgd.UPGD(params, 0.1, sigma=0.0, beta_utility=beta, fused=True)
        for _ in range(6):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
                if every_page and param in optimizer.state:
                    optimizer.state[param]["utility"].mul_(1)  # modified elsewhere, so its largest entries are unknown
            optimizer.step()
        trained.append([tensor for param in params for tensor in (param, optimizer.state[param]["utility"])])
    assert all(map(torch.equal, *trained))


def test_a_modified_step_count_is_used(engine: str) -> None:
    trained = []
    for options in ({"fused": True}, {"foreach": False}):
        params = [nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2)]
        optimizer = upgd.UPGD(params, 0.1, sigma=0.0, beta_utility=0.9, **options)
        for step in range(6):
            checks.put_gradients(params, step)
            if step == 3:
                optimizer.state[params[0]]["step"].fill_(50)
            optimizer.step()
        trained.append(params)
    checks.assert_close(*trained, ulps=50, dtype=torch.float32)


@triton
@pytest.mark.parametrize("name", ["UPGD", "AdaUPGD", "MethodOptimizer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_narrow_state(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to steps without kernels, except where the last bit determines the rounding; checkpoints work with both."""
    monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    builds = {"UPGD": upgd.UPGD, "AdaUPGD": upgd.AdaUPGD, "MethodOptimizer": checks.of_method(METHODS["adaupgd"])}
    finals, states = [], []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((70, 41), (33,))]
        options = {"lr": 0.01, "sigma": 0.1, "seed": 1, "state_dtype": torch.bfloat16, "stochastic_rounding": True}
        build = builds[name]
        optimizer = build(params, fused=True, **options) if fused else checks.without_fusing(build, params, **options)
        for step in range(4):
            checks.put_gradients(params, step)
            optimizer.step()
        finals.append(params)
        states.append([value for p in params for value in optimizer.state[p].values()])
        assert all(optimizer.state[p]["utility"].dtype == torch.bfloat16 for p in params)
    agree = torch.cat([(a == b).flatten() for a, b in zip(*states, strict=True)]).double().mean()
    assert agree > 0.95
    for one, other in zip(finals[0] + states[0], finals[1] + states[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


def test_requirements_of_overlap() -> None:
    model = checks.network("cpu")
    model(torch.randn(5, 8)).sum().backward()
    with pytest.raises(ValueError, match="overlap=True needs fused steps; pass fused=True"):
        upgd.UPGD(model.parameters(), overlap=True).step()
    with pytest.raises(RuntimeError, match="overlap=True is not possible, because the parameters are not on a GPU"):
        upgd.UPGD(model.parameters(), overlap=True, fused=True).step()


def test_reasons_against_fused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"fused=True is not possible, because a parameter is torch.float64 on cpu"):
        upgd.UPGD([param], fused=True).step()
    with pytest.raises(ValueError, match="fused=True must hold for all parameter groups"):
        upgd.UPGD([param], fused=True, foreach=True).step()
    single = nn.Parameter(torch.ones(3))
    single.grad = torch.ones(3)
    reason = "the kernels for cpu do not support state_dtype and stochastic_rounding"
    for dtype in (torch.uint8, torch.bfloat16):
        with pytest.raises(RuntimeError, match=f"fused=True is not possible, because {reason}; leave fused out"):
            upgd.UPGD([single], fused=True, state_dtype=dtype).step()
        upgd.UPGD([single], state_dtype=dtype).step()  # the default uses another implementation
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

    @pytest.mark.parametrize("own", [False, True], ids=["torch.manual_seed", "generator"])
    def test_a_generator_seeds_it(self, own: bool) -> None:
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(0 if own else seed)
            generator = torch.Generator().manual_seed(seed) if own else None
            params = [nn.Parameter(torch.zeros(50))]
            found.append(drawn(upgd.PGD(params, 1.0, sigma=1.0, fused=True, generator=generator), params)[0])
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


def test_plans_are_made_anew_where_something_changed() -> None:
    """Changes of settings, state, parameters with gradients, and memory of parameters."""
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
    """Training can continue from a checkpoint with another implementation."""
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


def test_a_compiled_step_is_fused(engine: str) -> None:
    trained = []
    for compiled in (False, True):
        torch._dynamo.reset()
        params = [nn.Parameter(torch.ones(3, 4))]
        optimizer = upgd.UPGD(params, seed=1, fused=True, capturable=compiled)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for n in range(3):
            checks.put_gradients(params, n)
            step()
        assert optimizer._repeated is not None
        trained.append(params)
    assert torch.equal(trained[0][0], trained[1][0])


def test_terms_multiplied_by_zero_are_removed() -> None:
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


@pytest.mark.skipif(not _fused._installed("triton"), reason="needs Triton")
def test_kernels_can_be_compiled_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" kernels") > len(checks.CASES)
