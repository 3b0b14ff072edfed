"""Utility-based perturbed gradient descent, weight-wise."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import Curvature, WeightwiseOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UPGD(WeightwiseOptimizer):
    """Utility-based perturbed gradient descent: protects the weights that are useful and perturbs those that are not.

    For every weight ``w`` with gradient ``g``, at step ``t``::

        m  = −g·w   (+ ½·h·w² with curvature h)             the utility of w on this sample
        u ← β·u + (1−β)·m,   û = u / (1 − βᵗ)               … on recent samples
        ū  = sigmoid(û / scale)                             … compared with the other weights
        w ← w − lr·[(g + σ·ξ)·(1 − ū) + λ·w]                ξ ~ N(0, 1)

    A parameter without gradient is left alone, and its utility takes no part. A gradient that is infinite or NaN spoils the
    entries it belongs to, as with every torch optimizer, but no other parameter: the spoilt tensor is left out of the
    global scale. The utility of 16-bit parameters is kept in 32 bits.

    A parameter group with ``"gated": False`` has no gates: its weights follow the rule with ū = 0, which is perturbed
    gradient descent, and take no part in the global scale.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. Most gates are close to ½ and halve the step, so it wants to be
            about twice that of SGD.
        beta_utility: β, how long utility remembers; 0 looks at the present sample alone. See
            :meth:`upgd.Monitor.summary` for how much the gates do.
        sigma: σ, the standard deviation of the perturbation.
        weight_decay: λ, decoupled weight decay (UPGD-W where it is positive).
        scaling: ``"global"`` compares a weight with the most useful one of all parameters (of all groups);
            ``"local"`` with the norm over the weights that enter the same unit.
        protect_gradient: ``False`` gates the noise only: ``w ← w − lr·[g + σ·ξ·(1−ū) + λ·w]``.
        noise: ``"white"``, or ``"anticorrelated"`` where each perturbation takes back the one before,
            at the cost of one more tensor of state per parameter.
        curvature: an object with ``diagonal(param) -> tensor``, such as :class:`upgd.HesScale`, for second-order utility.
        maximize: ascend the objective instead.
        foreach: ``True`` for the implementation that works block by block in place, ``False`` for the plain one that
            mirrors :mod:`upgd.rules`; by default the former wherever it applies.
        capturable: keep the step count on the parameter's device, so that ``step`` never waits for it and can be
            captured in a CUDA graph.
        generator: where the noise comes from; by default torch's global generator, so ``torch.manual_seed`` governs it.
            It is copied and pickled with the optimizer but is no part of ``state_dict()``.
            Under ``DistributedDataParallel`` the processes share the seed of the first one; a generator that you pass must
            have the same seed in all of them.
        seed: makes the noise a function of this number, the step, the parameter and the entry, so that it does not depend on
            the implementation, the device or the number of processes; see :func:`upgd.noise.parameter_normals`. Sharded
            parameters always have a seed: without this option it is drawn from ``generator`` at the first step, and the
            processes share that of the first one. It is part of ``state_dict()``.
        state_dtype: ``torch.bfloat16`` or ``torch.uint8`` keeps traces in 16 bits, or in 8 bits with a scale for each block
            of 256 entries, rounded at random such that they are right on average. By default they have 32 bits where the
            parameters have 16. Parameters with fewer than 4096 entries or one dimension never have 8-bit traces.
        stochastic_rounding: round parameters in ``bfloat16`` at random, too, such that a step that is smaller than their
            resolution is taken on average.
        process_group: the processes that hold the other parameters of the model, each in an optimizer of its own:
            global scaling then takes the maximum over all of them, and all must step together. Not needed for sharded
            (``DTensor``) parameters, nor within ``ZeroRedundancyOptimizer``, whose process group is used.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = upgd.UPGD(model.parameters(), lr=0.01, sigma=0.001)
        >>> loss = torch.nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2))
        >>> loss.backward()
        >>> optimizer.step()

    Reference:
        Elsayed and Mahmood, "Utility-based Perturbed Gradient Descent: An Optimizer for Continual Learning",
        https://arxiv.org/abs/2302.03281
    """

    _gated = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        *,
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
