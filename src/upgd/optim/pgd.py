"""Perturbed gradient descent and related methods, which perturb all weights equally."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import WeightwiseOptimizer


class PGD(WeightwiseOptimizer):
    """Perturbed gradient descent (PGD): gradient descent with equal noise on every weight.

    For every weight ``w`` with gradient ``g``::

        w ← w − lr·(g + σ·ξ + λ·w)                  ξ ~ N(0, 1)

    With ``noise="anticorrelated"`` it is Anti-PGD (Orvieto et al., 2022); with ``sigma=0`` it is gradient descent with
    decoupled weight decay (SGDW).

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. May be omitted if every parameter group has its own.
        sigma: σ, the standard deviation of the perturbation. May be omitted likewise.
        weight_decay: λ, decoupled weight decay.
        noise, maximize, foreach, fused, capturable, generator, seed, stochastic_rounding: as for :class:`upgd.UPGD`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = upgd.PGD(model.parameters(), lr=0.01, sigma=0.1, noise="anticorrelated")
        >>> torch.nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    _gated = False
    _q = 0.0
    _required: tuple[str, ...] = ("lr", "sigma")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        *,
        sigma: float | None = None,
        weight_decay: float = 0.0,
        noise: str = "white",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "sigma": sigma,
            "weight_decay": weight_decay,
            "noise": noise,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "seed": seed,
            "state_dtype": None,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, generator=generator)


class ShrinkAndPerturb(PGD):
    """Shrink and perturb (Ash and Adams, 2020), at every step: :class:`upgd.PGD` with weight decay.

    For every weight ``w`` with gradient ``g``::

        w ← w − lr·(g + σ·ξ + λ·w)                  ξ ~ N(0, 1)

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. May be omitted if every parameter group has its own.
        sigma: σ, the standard deviation of the perturbation. May be omitted likewise.
        weight_decay: λ, the strength of shrinking. May be omitted likewise.
        maximize, foreach, fused, capturable, generator, seed, stochastic_rounding: as for :class:`upgd.UPGD`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = upgd.ShrinkAndPerturb(model.parameters(), lr=0.01, sigma=0.1, weight_decay=0.01)
        >>> torch.nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    _required = ("lr", "sigma", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        *,
        sigma: float | None = None,
        weight_decay: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            sigma=sigma,
            weight_decay=weight_decay,  # type: ignore[arg-type]  # required here, and so checked in every group
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            generator=generator,
            seed=seed,
            stochastic_rounding=stochastic_rounding,
        )
