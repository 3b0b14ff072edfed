"""Utility-based perturbed search, weight-wise."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import Curvature, WeightwiseOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UPS(WeightwiseOptimizer):
    """Utility-based perturbed search (UPS): perturbs weights according to their utility, without a gradient step.

    For every weight ``w``::

        w ← w − lr·σ·ξ·(1 − ū)             ξ ~ N(0, 1)

    with the gate ``ū`` of :class:`upgd.UPGD`. The utility needs gradients, so call ``loss.backward()`` before ``step()`` as
    usual. The control without utility is :class:`upgd.PGD` with zero gradients.

    All other arguments are those of :class:`upgd.UPGD`.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; the paper uses 1 and searches over ``sigma``.
        sigma: σ, the standard deviation of the perturbation.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = upgd.UPS(model.parameters(), sigma=0.01)
        >>> torch.nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    _gated = True
    _c = 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        beta_utility: float = 0.99,
        sigma: float = 1e-3,
        scaling: str = "global",
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
            "beta_utility": beta_utility,
            "sigma": sigma,
            "weight_decay": 0.0,
            "scaling": scaling,
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
