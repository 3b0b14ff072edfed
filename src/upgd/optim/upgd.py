"""Utility-based perturbed gradient descent, weight-wise."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd.optim._weightwise import Curvature, WeightwiseOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class UPGD(WeightwiseOptimizer):
    """Utility-based perturbed gradient descent (UPGD): protects useful weights and perturbs the others.

    For every weight ``w`` with gradient ``g``, at step ``t``::

        m  = −g·w   (+ ½·h·w² with curvature h)             utility on this sample
        u ← β·u + (1−β)·m,   û = u / (1 − βᵗ)               running average, without initial bias
        ū  = sigmoid(û / scale)                             gate
        w ← w − lr·[(g + σ·ξ)·(1 − ū) + λ·w]                ξ ~ N(0, 1)

    Parameters without a gradient are skipped, and so is their utility. An infinite or NaN gradient affects its own entries,
    as with every torch optimizer, but not other parameters: its tensor is left out of the global scale. The utility of
    16-bit parameters is kept in 32 bits.

    A parameter group with ``"gated": False`` has no gates: its weights follow the rule with ū = 0, which is perturbed
    gradient descent, and are excluded from the global scale.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: learning rate; a number or a one-element tensor. Most gates are close to ½ and halve the step, so use about
            twice the learning rate of SGD.
        beta_utility: β, the decay rate of the running average of utility; 0 uses the current sample only.
            :meth:`upgd.Monitor.summary` reports the effect of the gates.
        sigma: σ, the standard deviation of the perturbation.
        weight_decay: λ, decoupled weight decay (UPGD-W if positive).
        scaling: ``"global"`` divides utilities by the largest one of all parameters (of all groups); ``"local"`` by the
            norm over the weights that enter the same unit.
        protect_gradient: ``False`` gates the noise only: ``w ← w − lr·[g + σ·ξ·(1−ū) + λ·w]``.
        noise: ``"white"``, or ``"anticorrelated"``, where each perturbation cancels the previous one; needs one more tensor
            of state per parameter, unless the noise has a seed.
        curvature: an object with ``diagonal(param) -> tensor``, such as :class:`upgd.HesScale`, for second-order utility.
        maximize: maximize the objective instead of minimizing it.
        foreach: ``True`` for the in-place implementation that processes blocks, ``False`` for the plain one that mirrors
            :mod:`upgd.rules`. Default: the former wherever possible, if steps are not fused.
        fused: ``True`` for kernels that perform the whole step in two passes: with Triton on a GPU (fp32, bf16 or fp16
            parameters), with numba on the CPU (fp32). Default: fused on a GPU wherever possible. Noise then has a seed, as
            for sharded parameters. Under ``torch.compile``, only ``True`` gives fused steps, and they break the graph.
        overlap: with ``fused=True`` on a GPU, ``True`` runs the first pass during the backward pass, parameter by
            parameter, as soon as a gradient has been accumulated. If a gradient changes afterwards, for example because it
            is clipped, its pass is repeated. Changes through ``.data`` are not detected.
        capturable: keep the step count on the parameter's device, so that ``step`` does not synchronize and can be captured
            in a CUDA graph.
        generator: source of the noise. Default: torch's global generator (``torch.manual_seed``). It is copied and pickled
            with the optimizer but not part of ``state_dict()``. Under ``DistributedDataParallel``, all processes use the
            seed of the first one; a generator that you pass must have the same seed in all processes.
        seed: makes the noise a function of this number, the step, the parameter and the entry, so that it does not depend on
            the implementation, the device or the number of processes; see :func:`upgd.noise.parameter_normals`. Sharded
            parameters always have a seed: without this option it is drawn from ``generator`` at the first step, and the
            processes share that of the first one. It is part of ``state_dict()``.
        state_dtype: ``torch.bfloat16`` or ``torch.uint8`` keeps traces in 16 bits, or in 8 bits with a scale for each block
            of 256 entries, with unbiased stochastic rounding. Default: 32 bits if the parameters have 16. Parameters with
            fewer than 4096 entries or one dimension never have 8-bit traces.
        stochastic_rounding: also round ``bfloat16`` parameters stochastically, so that steps below their resolution are
            taken on average.
        process_group: the processes that hold the other parameters of the model, each with its own optimizer. Global
            scaling then takes the maximum over all of them, and all must step together. Not needed for sharded
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
