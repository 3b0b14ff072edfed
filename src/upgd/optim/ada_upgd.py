"""Utility-based perturbed gradient descent along Adam's direction."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import Curvature, WeightwiseOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AdaUPGD(WeightwiseOptimizer):
    """UPGD with Adam's step sizes: protects useful weights and perturbs the others.

    For every weight ``w`` with gradient ``g``, at step ``t``::

        a ← β₁·a + (1−β₁)·g,    â = a / (1 − β₁ᵗ)           average of the gradient
        v ← β₂·v + (1−β₂)·g²,   v̂ = v / (1 − β₂ᵗ)           average of its square
        m  = −g·w   (+ ½·h·w² with curvature h)             utility on this sample
        u ← β·u + (1−β)·m,      û = u / (1 − βᵗ)            running average, without initial bias
        ū  = sigmoid(û / scale)                             gate
        w ← w − lr·[(â / (√v̂ + ε) + σ·ξ)·(1 − ū) + λ·w]     ξ ~ N(0, 1)

    The utility is computed from the gradient itself, as in :class:`upgd.UPGD`, not from Adam's averages. With ū = 0 and
    without noise, this is :class:`torch.optim.AdamW`. Averages of 16-bit parameters are kept in 32 bits.

    Training can continue from a checkpoint of AdamW: ``load_state_dict`` restores its averages, its step count and its
    options; utilities start at zero. The step count ``t`` then includes AdamW's steps, and û is too small at first, but by
    the same factor for all parameters with the same number of steps, so the gates are not affected. From a checkpoint of
    UPGD, utilities are restored and Adam's averages start at zero.

    All other arguments are those of :class:`upgd.UPGD`.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. Most gates are close to ½ and halve the step, so use about
            twice the learning rate of AdamW.
        betas: β₁ and β₂, the decay rates of the averages of the gradient and of its square.
        eps: ε, added to the denominator for numerical stability; at least 1e-30.
        beta_utility: β, the decay rate of the running average of utility.
        sigma: σ, the standard deviation of the perturbation. Adam's steps have a size of about ``lr``, so this is the size
            of the noise relative to them.
        weight_decay: λ, decoupled weight decay.
        protect_gradient: ``False`` gates the noise only: ``w ← w − lr·[â / (√v̂ + ε) + σ·ξ·(1−ū) + λ·w]``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = upgd.AdaUPGD(model.parameters(), lr=0.001, sigma=0.01)
        >>> torch.nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    _gated = True
    _adaptive = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        beta_utility: float = 0.99,
        sigma: float = 1e-3,
        weight_decay: float = 0.0,
        scaling: str = "global",
        protect_gradient: bool = True,
        noise: str = "white",
        curvature: Curvature | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        overlap: bool = False,
        capturable: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "weight_decay": weight_decay,
            "scaling": scaling,
            "protect_gradient": protect_gradient,
            "noise": noise,
            "gated": True,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "overlap": overlap,
            "capturable": capturable,
            "seed": seed,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, curvature=curvature, generator=generator, process_group=process_group)
