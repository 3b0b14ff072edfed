"""Checks of fused steps on any device: plain functions, so that they also run without pytest."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from optimizer_cases import Example
from torch import Tensor, nn

import upgd
from upgd.methods import METHODS, Method
from upgd.optim import _fused
from upgd.optim.from_method import MethodOptimizer

SHAPES = [(7, 33), (33,), (), (5, 3, 3, 3), (1,)]
#: The largest tensor: several blocks. Triton's interpreter needs milliseconds for each row.
LARGEST = {"cpu": (3, 1100), "cuda": (130, 70)}

Build = Callable[..., torch.optim.Optimizer]


class Masks(Method):
    """Truth values in a sum, a limit that is infinite, and the hyperbolic tangent of small numbers."""

    name = "example-masks"

    def update(self, w: Any, g: Any, h: Any) -> Any:
        chosen = torch.where((g == 0) | (w > 0.5) & ~(g > 1), torch.clamp(g, -1, float("inf")), 0.5 * g)
        return w - h.lr * (chosen + 0.1 * (g != 0) * w + 1000 * torch.tanh(g / 1000))


def interpreted() -> bool:
    """Whether kernels for GPUs run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _fused._installed("triton")


def of_method(method: Any) -> Build:
    return lambda params, **options: MethodOptimizer(params, method, **options)


#: name → optimizer and options, all of which fused steps must treat like the for-loop.
CASES: dict[str, tuple[Build, dict[str, Any]]] = {
    "UPGD": (upgd.UPGD, {"lr": 0.05}),
    "UPGD with noise": (upgd.UPGD, {"lr": 0.05, "sigma": 0.1}),
    "UPGD, everything": (
        upgd.UPGD,
        {
            "lr": 0.05,
            "sigma": 0.1,
            "noise": "anticorrelated",
            "weight_decay": 0.1,
            "maximize": True,
            "scaling": "local",
        },
    ),
    "UPGD, everything but noise": (
        upgd.UPGD,
        {"lr": 0.05, "weight_decay": 0.1, "maximize": True, "scaling": "local", "protect_gradient": False},
    ),
    "UPGD, nonprotecting": (upgd.UPGD, {"lr": 0.05, "sigma": 0.1, "protect_gradient": False, "beta_utility": 0.0}),
    "AdaUPGD": (upgd.AdaUPGD, {"lr": 0.01, "weight_decay": 0.1}),
    "AdaUPGD, local, with noise": (upgd.AdaUPGD, {"lr": 0.01, "sigma": 0.1, "scaling": "local"}),
    "UPS": (upgd.UPS, {"lr": 1.0, "sigma": 0.1}),
    "PGD": (upgd.PGD, {"lr": 0.05}),
    "Anti-PGD": (upgd.PGD, {"lr": 0.05, "sigma": 0.1, "noise": "anticorrelated"}),
    "ShrinkAndPerturb": (upgd.ShrinkAndPerturb, {"lr": 0.05, "sigma": 0.1, "weight_decay": 0.1}),
    "a method's own reductions": (of_method(Example), {"lr": 0.05, "sigma": 0.1}),
    "a method's reductions over units": (of_method(Example), {"lr": 0.05, "scaling": "local"}),
    "AdamW's rule": (of_method(METHODS["adamw"]), {"lr": 0.01}),
    "a method of truth values": (of_method(Masks), {"lr": 0.01}),
}


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return tensors of many shapes, some of them not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in (*SHAPES, LARGEST[torch.device(device).type])]
    tensors.append(torch.randn(6, 4, generator=generator).t())
    tensors.append(torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last))
    return [nn.Parameter(tensor.to(device, dtype)) for tensor in tensors]


def put_gradients(params: Iterable[Tensor], step: int, keep: bool = False) -> None:
    """Set gradients in new memory, or in that of the previous gradients."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        gradient = (torch.randn(param.shape, generator=generator) * 0.3).to(param.device, param.dtype)
        if keep and param.grad is not None:
            param.grad.copy_(gradient)
        else:
            param.grad = gradient


def without_fusing(build: Build, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return the plain form of the optimizer."""
    return build(params, **options, **({"foreach": False} if isinstance(build, type) else {"fused": False}))


def built(case: str, params: Any, fused: bool, **more: Any) -> torch.optim.Optimizer:
    build, options = CASES[case]
    options = {**({"sigma": 0.0} if isinstance(build, type) else {}), "seed": 3, **options, **more}
    return build(params, fused=True, **options) if fused else without_fusing(build, params, **options)


def assert_close(fused: Iterable[Tensor], plain: Iterable[Tensor], ulps: float, dtype: torch.dtype) -> None:
    """Compare relative to the largest entry, because differences of large numbers have their rounding errors."""
    for one, other in zip(fused, plain, strict=True):
        distance = (
            one.detach().double() - other.detach().double()
        ).abs().max() / other.detach().double().abs().max().clamp(min=0.1)
        assert float(distance) <= ulps * torch.finfo(dtype).eps, (tuple(one.shape), float(distance))


def check_equals_the_for_loop(case: str, device: str, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Some parameters have a separate group, and one has no gradient in some steps."""
    trained = []
    for fused in (True, False):
        params = parameters(device, dtype)
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
        optimizer = built(case, groups, fused)
        for step in range(steps):
            put_gradients(params, step, keep=step % 3 == 1)
            if step % 4 == 2:
                params[0].grad = None
            optimizer.step()
        trained.append([*params, *(value for p in params for value in optimizer.state[p].values())])
    assert_close(*trained, ulps=60 if has_noise(case) else 20, dtype=dtype)


def has_noise(case: str) -> bool:
    return "sigma" in CASES[case][1]


def check_lower_precision(device: str, dtype: torch.dtype, steps: int) -> None:
    """Traces have 32 bits; parameters may differ by rounding."""
    trained = []
    for fused in (True, False):
        params = parameters(device, dtype)
        optimizer = built("AdaUPGD", params, fused, sigma=0.1)
        for step in range(steps):
            put_gradients(params, step)
            optimizer.step()
        assert all(optimizer.state[p]["utility"].dtype == torch.float32 for p in params)
        trained.append(params)
    assert_close(*trained, ulps=4, dtype=dtype)


#: Options with which 8-bit traces are compared.
CODED: dict[str, tuple[Build, dict[str, Any]]] = {
    "UPGD": (upgd.UPGD, {"sigma": 0.1}),
    "UPGD, local": (upgd.UPGD, {"sigma": 0.1, "noise": "anticorrelated", "scaling": "local", "weight_decay": 0.1}),
    "AdaUPGD": (upgd.AdaUPGD, {"sigma": 0.0, "maximize": True}),
}


CODED_SHAPES = [(70, 77), (9, 300, 2), (5, 7), (30,), (2, 2500), (20, 512)]


def check_coded_state(
    case: str, device: str, dtype: torch.dtype, steps: int, shapes: list[tuple[int, ...]] = CODED_SHAPES
) -> None:
    """Equal to the for-loop, except where the last bit determines the rounding. Some rows have an odd number of entries, and
    some end within a block of 256; small parameters keep 32 bits."""
    build, options = CODED[case]
    finals = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
        more = {"state_dtype": torch.uint8, "stochastic_rounding": dtype == torch.bfloat16, "seed": 4}
        optimizer = build(params, lr=0.01, **({"fused": True} if fused else {"foreach": False}), **options, **more)
        for step in range(steps):
            put_gradients(params, step)
            optimizer.step()
        states = [value for p in params for value in optimizer.state[p].values()]
        assert sum(value.dtype == torch.uint8 for value in states) == 4 * (3 if build is upgd.AdaUPGD else 1)
        finals.append((params, states))
    (own, own_states), (plain, plain_states) = finals
    for one, other in zip(own_states, plain_states, strict=True):
        if one.dtype == torch.uint8:
            assert float((one != other).double().mean()) < 0.002
        elif one.ndim:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for param, same in zip(own, plain, strict=True):
        difference = (param - same).detach().abs().double()
        assert float(difference.mean()) < (1e-6 if dtype == torch.float32 else 1e-4)
        assert float(difference.max()) < 0.02


def check_gated_and_local_groups(device: str, steps: int) -> None:
    """One maximum over all groups with gates, including those that do not use it."""
    trained = []
    for fused in (True, False):
        params = parameters(device)
        groups = [
            {"params": params[:2], "scaling": "local"},
            {"params": params[2:4], "gated": False},
            {"params": params[4:]},
        ]
        optimizer = built("UPGD", groups, fused)
        for step in range(steps):
            put_gradients(params, step)
            optimizer.step()
        trained.append(params)
    assert_close(*trained, ulps=20, dtype=torch.float32)


def check_accidents_stay_where_they_are(device: str) -> None:
    for accident in (float("nan"), float("inf"), float("-inf")):
        trained = []
        for options in ({"fused": True}, {"foreach": False}):
            torch.manual_seed(0)
            spoilt, sound = (nn.Parameter(torch.rand(30, 40).to(device) + 0.1) for _ in range(2))
            for param in (spoilt, sound):
                param.grad = torch.randn(30, 40).to(device)
            spoilt.grad[3, 4] = accident
            optimizer = upgd.UPGD([spoilt, sound], sigma=0.0, **options)
            optimizer.step()
            optimizer.step()
            assert bool(sound.isfinite().all())
            trained.append([sound])
        assert_close(*trained, ulps=4, dtype=torch.float32)


def check_gradient_scaling(device: str) -> None:
    """Scaled gradients are unscaled, and a step with an infinite gradient is skipped."""
    plain, scaled = parameters(device), parameters(device)
    ours, scaling = built("AdaUPGD", plain, True, sigma=0.1), built("AdaUPGD", scaled, True, sigma=0.1)
    assert getattr(scaling, "_step_supports_amp_scaling")  # noqa: B009  # as torch.amp.GradScaler asks
    scaling.grad_scale = torch.tensor(64.0, device=device)
    scaling.found_inf = torch.tensor(0.0, device=device)
    for step in range(4):
        if step == 2:
            before = [param.detach().clone() for param in scaled]
            put_gradients(scaled, 99)
            scaled[0].grad.fill_(float("inf"))
            scaling.found_inf.fill_(1.0)
            scaling.step()
            assert all(torch.equal(a, b) for a, b in zip(before, scaled, strict=True))
            scaling.found_inf.fill_(0.0)
        put_gradients(plain, step)
        put_gradients(scaled, step)
        for param in scaled:
            param.grad.mul_(64.0)
        ours.step()
        scaling.step()
    assert_close(scaled, plain, ulps=4, dtype=torch.float32)
    assert [float(scaling.state[p]["step"]) for p in scaled] == [4.0] * len(scaled)


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)


def check_overlap(device: str, steps: int) -> None:
    """Overlapping has no effect on results, regardless of what happens between backward and step."""
    trained = []
    for overlap in (True, False):
        model = network(device)
        optimizer = upgd.UPGD(model.parameters(), 0.05, sigma=0.1, seed=1, fused=True, overlap=overlap)
        early = 0
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(1 + step % 2):  # with and without accumulation
                x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + part)).to(device)
                model(x).square().mean().backward()
            if step % 5 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step % 5 == 4:
                model[0].bias.grad.add_(1.0)
            seen = optimizer._repeated
            early += seen is not None and len(seen._seen) == 4
            optimizer.step()
        assert early == (steps - 1 if overlap else 0)
        trained.append(list(model.parameters()))
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)
