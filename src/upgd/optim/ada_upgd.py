"""Utility-based perturbed gradient descent along Adam's direction."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import Curvature, WeightwiseOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AdaUPGD(WeightwiseOptimizer):
    """UPGD with Adam's step sizes: protects the weights that are useful, perturbs those that are not.

    For every weight ``w`` with gradient ``g``, at step ``t``::

        a ← β₁·a + (1−β₁)·g,    â = a / (1 − β₁ᵗ)           Adam's averages of the gradient
        v ← β₂·v + (1−β₂)·g²,   v̂ = v / (1 − β₂ᵗ)           … and of its square
        m  = −g·w   (+ ½·h·w² with curvature h)             the utility of w on this sample
        u ← β·u + (1−β)·m,      û = u / (1 − βᵗ)            … on recent samples
        ū  = sigmoid(û / scale)                             … compared with the other weights
        w ← w − lr·[(â / (√v̂ + ε) + σ·ξ)·(1 − ū) + λ·w]     ξ ~ N(0, 1)

    Utility is that of the gradient itself, as with :class:`upgd.UPGD`: averages and step sizes are about where to go, utility
    about what would be lost. With all gates open (ū = 0) and without noise it is :class:`torch.optim.AdamW`. Averages of
    16-bit parameters are kept in 32 bits.

    Training can go on from a checkpoint of AdamW: ``load_state_dict`` takes over its averages and its count of steps (and
    its options, as loading always does); utility begins at zero. The one count ``t`` then includes AdamW's steps, and û
    is too small at first, but by the same factor for all parameters that have taken as many steps: the gates do not
    notice. From a checkpoint of UPGD, likewise, utility is taken over and Adam's averages begin.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. Most gates are close to ½ and halve the step, so it wants to be
            about twice that of AdamW.
        betas: β₁ and β₂, how long the averages of the gradient and of its square remember.
        eps: ε, which keeps the division finite; at least 1e-30.
        beta_utility: β, how long utility remembers.
        sigma: σ, the standard deviation of the perturbation. Adam's steps are about ``lr`` long whatever the size of the
            gradient, so this is the noise's part of a step.
        weight_decay: λ, decoupled weight decay.
        protect_gradient: ``False`` gates the noise only: ``w ← w − lr·[â / (√v̂ + ε) + σ·ξ·(1−ū) + λ·w]``.
        scaling, noise, curvature, maximize, foreach, capturable, generator, seed, state_dtype, stochastic_rounding,
            process_group: as for :class:`upgd.UPGD`.

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
            "capturable": capturable,
            "seed": seed,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, curvature=curvature, generator=generator, process_group=process_group)

    def _switches(self, group: dict[str, Any]) -> tuple[float, float, float]:
        return 1.0, 1.0 if group["protect_gradient"] else 0.0, 1.0
