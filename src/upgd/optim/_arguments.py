"""Validation of optimizer arguments; every error is one sentence with the argument, the value and the remedy."""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_NUMBERS = ("lr", "sigma", "weight_decay", "beta_utility", "betas", "eps")
CHOICES = {"scaling": ("global", "local"), "noise": ("white", "anticorrelated")}


def check_group(group: dict[str, Any]) -> None:
    """Check the options of a parameter group, or the defaults, as far as they are present."""
    if "lr" in group:
        check_lr(group["lr"])
    for name in ("sigma", "weight_decay"):
        if name in group:
            check_at_least_zero(name, group[name])
    if "beta_utility" in group:
        beta = group["beta_utility"]
        if not _is_number(beta) or not 0 <= beta < 1:
            raise ValueError(f"beta_utility must be in [0, 1), but it is {beta!r}; try beta_utility=0.99")
    if "betas" in group:
        check_betas(group["betas"])
    if "eps" in group:
        check_eps(group["eps"])
    check_gated(group)
    for name, choices in CHOICES.items():
        if name in group and group[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but it is {group[name]!r}")


def check_gated(group: dict[str, Any]) -> None:
    if not isinstance(group.get("gated", True), bool):
        raise ValueError(
            f"gated must be True or False, but it is {group['gated']!r}; give the parameters of layers without gates to a "
            "group of their own with gated=False"
        )


def check_complete(group: dict[str, Any], names: Iterable[str], optimizer: Optimizer) -> None:
    """Check that a parameter group has the options for which the optimizer has no default."""
    for name in names:
        if name not in group:
            raise ValueError(
                f"{type(optimizer).__name__} has no default for {name}, and a parameter group does not set it; pass "
                f"{name}=... to the optimizer or in every group"
            )


def with_plain_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Convert NumPy numbers to Python numbers, as torch's kernels and ``torch.load`` require."""
    plain = {name: _plain(value) if name in _NUMBERS else value for name, value in group.items()}
    return with_plain_seed(plain)


def with_plain_seed(group: dict[str, Any]) -> dict[str, Any]:
    """Convert the seed to a Python integer; raise ValueError for an invalid seed or dtype."""
    check_memory(group)
    seed = group.get("seed")
    if seed is None:
        return dict(group)
    whole = int(seed) if not isinstance(seed, bool) and isinstance(seed, Integral) else -1
    if not 0 <= whole < 2**63:
        raise ValueError(
            f"seed must be an integer from 0 to 2**63 - 1, but it is {seed!r}; try seed=0, or leave it out"
        )
    return {**group, "seed": whole}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return float(value) if _is_number(value) and type(value) not in (int, float) else value


def check_memory(group: dict[str, Any]) -> None:
    """Check the options for reduced precision."""
    if (dtype := group.get("state_dtype")) not in (None, torch.float32, torch.bfloat16, torch.uint8):
        raise ValueError(
            f"state_dtype must be torch.float32, torch.bfloat16 or torch.uint8, but it is {dtype!r}; "
            "leave it out for 32 bits"
        )
    if not isinstance(rounding := group.get("stochastic_rounding", False), bool):
        raise ValueError(f"stochastic_rounding must be True or False, but it is {rounding!r}")


def check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but it has {lr.numel()} elements; try torch.tensor(0.01)")
    if not (isinstance(lr, Tensor) or _is_number(lr)) or not lr >= 0:
        raise ValueError(f"lr must be a number of at least 0, but it is {lr!r}; try lr=0.01")


def check_at_least_zero(name: str, value: Any) -> None:
    if not _is_number(value) or not value >= 0:
        raise ValueError(f"{name} must be a number of at least 0, but it is {value!r}; use {name}=0.0 to do without")


def check_betas(betas: Any) -> None:
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), but it is {betas!r}; try betas=(0.9, 0.999)")


def check_eps(eps: Any) -> None:
    # 0 would give 0 / 0 for a gradient that has always been zero; smaller values would make 1 / eps infinite in float32.
    if not _is_number(eps) or not eps >= 1e-30:
        raise ValueError(f"eps must be a number of at least 1e-30, but it is {eps!r}; try eps=1e-8")


def check_curvature(curvature: Any) -> None:
    if curvature is not None and not callable(getattr(curvature, "diagonal", None)):
        raise TypeError(
            f"curvature must have a method diagonal(param) -> tensor, but it is {curvature!r}; "
            "pass upgd.HesScale(model, criterion), or leave it out for first-order utility"
        )


def check_parameter(param: Tensor) -> None:
    if param.is_complex():
        raise TypeError(
            f"params must be real, but one of shape {tuple(param.shape)} is {param.dtype}: utility has no meaning for "
            "complex numbers; optimize torch.view_as_real(param) instead"
        )


def check_dense(param: Tensor, optimizer: Optimizer) -> None:
    if param.grad is not None and param.grad.is_sparse:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not support sparse gradients, but a parameter of shape "
            f"{tuple(param.shape)} has one; build the layer with sparse=False"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
