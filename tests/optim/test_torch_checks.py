"""torch's descriptions of optimizers for its tests, applied to ours.

torch ships the descriptions (``OptimizerInfo``, its inputs and error inputs) in ``torch.testing._internal``, but not the
test cases; the behaviours that torch tests with them are re-created here in our own words.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_checks import interpreted
from torch import nn
from torch.testing._internal import common_optimizers as torchs
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
)

import upgd
from upgd.optim import _fused

CPU = torch.device("cpu")


def _inputs(base: dict[str, Any], extra: list[dict[str, Any]]) -> Callable[..., list[OptimizerInput]]:
    common: list[dict[str, Any]] = [
        {},
        {"lr": 0.02},
        {"lr": torch.tensor(0.01)},
        {"maximize": True},
        {"capturable": True},
    ]

    def inputs(device: torch.device, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        return [OptimizerInput(None, {**base, **more}, desc=str(more)) for more in common + extra]

    return inputs


def _errors(*own: tuple[dict[str, Any], str]) -> Callable[..., list[ErrorOptimizerInput]]:
    def errors(device: torch.device, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        cases = torchs.get_error_inputs_for_all_optims(device, dtype)
        for kwargs, message in own:
            cases.append(
                ErrorOptimizerInput(
                    OptimizerInput(None, kwargs, str(kwargs)), error_type=ValueError, error_regex=message
                )
            )
        return cases

    return errors


GATED = [
    {"beta_utility": 0.0},
    {"scaling": "local"},
    {"noise": "anticorrelated", "sigma": 0.01},
]
COMMON = {"supported_impls": ("foreach",), "supports_complex": False, "has_capturable_arg": True}
BAD_GATED = [({"beta_utility": 1.0}, "beta_utility"), ({"scaling": "none"}, "scaling"), ({"sigma": -1.0}, "sigma")]

INFOS = [
    OptimizerInfo(
        upgd.UPGD,
        optim_inputs_func=_inputs({"sigma": 0.0}, [*GATED, {"protect_gradient": False}, {"weight_decay": 0.1}]),
        optim_error_inputs_func=_errors(*BAD_GATED, ({"weight_decay": -1}, "weight_decay"), ({"lr": -1.0}, "lr")),
        **COMMON,
    ),
    OptimizerInfo(
        upgd.AdaUPGD,
        optim_inputs_func=_inputs(
            {"lr": 0.01, "sigma": 0.0},
            [*GATED, {"protect_gradient": False}, {"weight_decay": 0.1}, {"betas": (0.0, 0.9)}, {"eps": 1e-3}],
        ),
        optim_error_inputs_func=_errors(*BAD_GATED, ({"betas": (1.0, 0.999)}, "betas"), ({"eps": 0.0}, "eps")),
        **COMMON,
    ),
    OptimizerInfo(
        upgd.UPS,
        optim_inputs_func=_inputs({"sigma": 0.0}, GATED),
        optim_error_inputs_func=_errors(*BAD_GATED),
        **COMMON,
    ),
    OptimizerInfo(
        upgd.PGD,
        optim_inputs_func=_inputs({"lr": 0.01, "sigma": 0.0}, [{"weight_decay": 0.1}, {"noise": "anticorrelated"}]),
        optim_error_inputs_func=_errors(({"lr": 0.1, "sigma": 0.0, "noise": "loud"}, "noise")),
        **COMMON,
    ),
    OptimizerInfo(
        upgd.ShrinkAndPerturb,
        optim_inputs_func=_inputs({"lr": 0.01, "sigma": 0.0, "weight_decay": 0.1}, []),
        optim_error_inputs_func=_errors(({"lr": 0.1, "sigma": 0.0, "weight_decay": -1}, "weight_decay")),
        **COMMON,
    ),
]
REQUIRED = {
    upgd.PGD: {"lr": 0.01, "sigma": 0.0},
    upgd.ShrinkAndPerturb: {"lr": 0.01, "sigma": 0.0, "weight_decay": 0.1},
}


def every_input() -> list[Any]:
    return [
        pytest.param(info, case, id=f"{info.name}: {case.desc}")
        for info in INFOS
        for case in torchs._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    ]


every_configuration = pytest.mark.parametrize(("info", "case"), every_input())


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=dtype) * 0.5)
    x = torch.randn(20, 6, generator=generator, dtype=dtype)
    y = x[:, :1].sin() + x[:, 1:2]
    return model, lambda: nn.functional.mse_loss(model(x), y)


def advance(model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss().backward()
        optimizer.step()


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_errors(info: OptimizerInfo) -> None:
    cases = info.optim_error_inputs_func(device=CPU, dtype=torch.float32)
    assert len(cases) > 6
    for case in cases:
        assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        given = case.optimizer_error_input
        params = [nn.Parameter(torch.ones(2, 2))] if given.params is None else given.params
        kwargs = {**REQUIRED.get(info.optim_cls, {}), **given.kwargs}
        if issubclass(case.error_type, Warning):
            with pytest.warns(case.error_type, match=case.error_regex):
                info.optim_cls(params, **kwargs)
        else:
            with warnings.catch_warnings(), pytest.raises(case.error_type, match=case.error_regex):
                info.optim_cls(params, **kwargs)


@every_configuration
def test_direction(info: OptimizerInfo, case: OptimizerInput) -> None:
    """Every configuration that descends makes the loss smaller, or larger where it maximizes; search alone stays put
    while it has no noise."""
    model, loss = problem()
    before = loss().item()
    advance(model, loss, info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs)), 100)
    after = loss().item()
    if info.optim_cls is upgd.UPS:
        assert (after == before) == (case.kwargs["sigma"] == 0)
    elif case.kwargs.get("maximize"):
        assert after > 1.5 * before
    else:
        assert after < 0.7 * before


@every_configuration
def test_with_schedulers(info: OptimizerInfo, case: OptimizerInput) -> None:
    for schedulers in info.scheduler_inputs:
        model, loss = problem()
        optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs))
        made = [schedule(optimizer) for schedule in schedulers]
        for _ in range(12):
            advance(model, loss, optimizer, 1)
            for scheduler in made:
                metric = [loss().item()] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []
                scheduler.step(*metric)
        start = case.kwargs.get("lr", optimizer.defaults["lr"])
        assert float(optimizer.param_groups[0]["lr"]) < float(start) or isinstance(start, torch.Tensor)
        assert all(param.isfinite().all() for param in model.parameters())


@every_configuration
def test_foreach_matches_forloop(info: OptimizerInfo, case: OptimizerInput) -> None:
    finals = []
    for foreach in (False, True):
        model, loss = problem()
        optimizer = info.optim_cls(model.parameters(), **{**copy.deepcopy(case.kwargs), "foreach": foreach})
        advance(model, loss, optimizer, 7)
        finals.append((list(model.parameters()), [optimizer.state[p] for p in model.parameters()]))
    torch.testing.assert_close(finals[0][0], finals[1][0])
    torch.testing.assert_close(finals[0][1], finals[1][1])


@pytest.mark.parametrize(
    ("package", "steps"),
    [
        pytest.param("numba", 7, marks=pytest.mark.slow),  # it compiles a dozen kernels
        pytest.param("triton", 2, marks=pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")),
    ],
    ids=["numba", "triton"],
)
@every_configuration
def test_fused_matches_forloop(
    info: OptimizerInfo, case: OptimizerInput, package: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numba's kernels, and with those for GPUs in Triton's interpreter."""
    if package == "triton":
        monkeypatch.setitem(_fused._KINDS, "cpu", _fused._KINDS["cuda"])
    finals = []
    for options in ({"foreach": False}, {"fused": True}):
        model, loss = problem(torch.float32)
        kwargs = {**copy.deepcopy(case.kwargs), "foreach": None, "seed": 1, **options}
        optimizer = info.optim_cls(model.parameters(), **kwargs)
        advance(model, loss, optimizer, steps)
        finals.append((list(model.parameters()), [optimizer.state[p] for p in model.parameters()]))
    torch.testing.assert_close(finals[0][0], finals[1][0])
    torch.testing.assert_close(finals[0][1], finals[1][1], rtol=1e-4, atol=1e-6)


@every_configuration
def test_state_dict_roundtrip(info: OptimizerInfo, case: OptimizerInput) -> None:
    model, loss = problem()
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs))
    advance(model, loss, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    again = info.optim_cls(twin.parameters(), **copy.deepcopy(case.kwargs))
    again.load_state_dict(saved)
    assert str(again.state_dict()["param_groups"]) == str(saved["param_groups"])
    torch.testing.assert_close(again.state_dict()["state"], saved["state"], rtol=0, atol=0)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        own.grad = torch.ones_like(own)
        other.grad = torch.ones_like(other)
    torch.manual_seed(0)
    optimizer.step()
    torch.manual_seed(0)
    again.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0)


@every_configuration
def test_step_is_a_no_op_without_gradients(info: OptimizerInfo, case: OptimizerInput) -> None:
    model, _ = problem()
    before = copy.deepcopy(list(model.parameters()))
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs))
    optimizer.step()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


@every_configuration
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_any_default_dtype(info: OptimizerInfo, case: OptimizerInput, default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        model, loss = problem(torch.float32)
        optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs))
        advance(model, loss, optimizer, 3)
        assert all(param.dtype == torch.float32 and param.isfinite().all() for param in model.parameters())
        again = info.optim_cls(model.parameters(), **copy.deepcopy(case.kwargs))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        advance(model, loss, again, 2)
    finally:
        torch.set_default_dtype(torch.float32)


@every_configuration
def test_printing(info: OptimizerInfo, case: OptimizerInput) -> None:
    shown = repr(info.optim_cls([nn.Parameter(torch.ones(2))], **copy.deepcopy(case.kwargs)))
    assert shown.startswith(f"{info.name} (")
    for option in case.kwargs:
        assert f"    {option}: " in shown
