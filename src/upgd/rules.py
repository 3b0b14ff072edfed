"""The mathematics of utility-based perturbed gradient descent, on one page.

Every method of the paper except AdamW is one rule with switches. For each parameter entry ``w`` with gradient ``g`` and,
if one has it, curvature ``h`` (an estimate of the Hessian's diagonal), at step ``t`` = 1, 2, …::

    m  = ½·h·w² − g·w                                          utility     what losing w would cost on this sample
    u ← β·u + (1−β)·m                                          trace       … on recent samples
    û  = u / (1 − βᵗ)                                          unbiased    … although u began at zero
    ū  = sigmoid(û / scale)                                    gate        … compared with the others: 0 useless, 1 useful
    w ← w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + wd·w]          update      useful weights stay, useless ones are perturbed

``scale`` is :func:`global_scale` (the largest utility of the learner) or :func:`local_scale` (the norm over the weights
that enter the same unit); ξ is the noise of :mod:`upgd.noise`; the switches name the method:

| method                      |  c  |  p  |  q  |  σ  | wd  |
| --------------------------- | --- | --- | --- | --- | --- |
| SGD                         |  1  |  0  |  0  |  0  |  0  |
| SGDW                        |  1  |  0  |  0  |  0  | > 0 |
| PGD; Anti-PGD (other noise) |  1  |  0  |  0  | > 0 |  0  |
| Shrink & Perturb            |  1  |  0  |  0  | > 0 | > 0 |
| UPGD, UPGD-W                |  1  |  1  |  1  | ≥ 0 | ≥ 0 |
| UPGD that does not protect  |  1  |  0  |  1  | ≥ 0 | ≥ 0 |
| UPS (search, no gradient)   |  0  |  –  |  1  | > 0 |  0  |

The functions are pure and work for one learner or for many: tensors may begin with *learner dimensions*, and then every
hyperparameter and switch may be a tensor of just these dimensions, so that each learner has its own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["gate", "global_scale", "largest", "local_scale", "trace", "unbiased", "update", "utility"]

#: A hyperparameter or switch: one number, or one per learner.
Value = float | Tensor


def utility(weight: Tensor, grad: Tensor, curvature: Tensor | None = None) -> Tensor:
    """What the loss would rise by, to first or second order, were each weight set to zero: ``½·h·w² − g·w``."""
    first_order = -grad * weight
    return first_order if curvature is None else first_order + 0.5 * curvature * weight**2


def trace(previous: Tensor, instant: Tensor, beta: Value) -> Tensor:
    """The running average ``β·u + (1 − β)·m``."""
    return _per_learner(beta, previous) * previous + _per_learner(1 - beta, previous) * instant


def unbiased(traced: Tensor, beta: Value, step: Value) -> Tensor:
    """The trace as if it had not begun at zero: ``u / (1 − βᵗ)``, with steps counted from 1."""
    return traced / _per_learner(1 - beta**step, traced)


def global_scale(utilities: Iterable[Tensor], learner_dims: int = 0) -> Tensor:
    """The largest utility over all parameters of a learner, at least the smallest normal float.

    That floor says what happens while nothing is useful (all utilities zero or negative): a utility of zero gets the gate
    sigmoid(0) = ½ and a negative one 0; never a division by zero, never a flipped sign. A parameter tensor that has an
    infinite or undefined utility does not take part, so that its accident stays its own.
    """
    found = largest(utilities, learner_dims)
    return found.clamp(min=torch.finfo(found.dtype).tiny)


def largest(values: Iterable[Tensor], learner_dims: int = 0) -> Tensor:
    """The largest entry of all tensors; one with an infinite or undefined maximum counts as zero."""
    maxima = [_maximum(v, learner_dims) for v in values if v.numel()]
    device = maxima[0].device
    return torch.stack([torch.where(torch.isfinite(m), m, 0).to(device) for m in maxima]).amax(0)


def local_scale(utility: Tensor, learner_dims: int = 0) -> Tensor:
    """The Euclidean norm over the weights that enter the same unit; of next to nothing, the root of the smallest float.

    The squares of smaller numbers vanish. So no utility is ever larger than its scale, even if the norm has lost it: the
    utilities of a unit that fell silent long ago fade away, and its gates go to φ(0).

    A unit is a row of a Linear weight, a filter of a convolution, or a bias vector as a whole. The result has the
    dimensions of ``utility``, of size 1 where the norm was taken.
    """
    within_learner = utility.ndim - learner_dims
    if within_learner == 0:
        norm = utility.abs()
    else:
        first = learner_dims + 1 if within_learner > 1 else learner_dims
        norm = torch.linalg.vector_norm(utility, dim=tuple(range(first, utility.ndim)), keepdim=True)
    return norm.clamp(min=torch.finfo(norm.dtype).tiny ** 0.5)


def gate(utility: Tensor, scale: Tensor) -> Tensor:
    """How useful each entry is next to the others, in [0, 1]: ``sigmoid(û / scale)``."""
    # Not torch.sigmoid: on the CPU it rounds differently at the end of a tensor, where a vector register is not full, and a
    # learner's numbers would depend, in their last bit, on who is computed beside it.
    return 1 / (1 + torch.exp(-utility / _per_learner(scale, utility)))


def update(
    weight: Tensor,
    grad: Tensor,
    gate: Value = 0.0,
    noise: Value = 0.0,
    *,
    lr: Value,
    sigma: Value = 0.0,
    weight_decay: Value = 0.0,
    c: Value = 1.0,
    p: Value = 1.0,
    q: Value = 1.0,
) -> Tensor:
    """The new weight: ``w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + wd·w]``.

    The decay is part of the step. As a factor of the weight, ``1 − lr·wd`` would be 1 in 32 bits once lr·wd is below 3e-8,
    and the decay would be lost.
    """
    lr, sigma, weight_decay, c, p, q = (_per_learner(v, weight) for v in (lr, sigma, weight_decay, c, p, q))
    gradient_part = c * grad * (1 - p * gate)
    search_part = sigma * noise * (1 - q * gate)
    return weight - lr * (gradient_part + search_part + weight_decay * weight)


def _maximum(utility: Tensor, learner_dims: int) -> Tensor:
    if utility.ndim > learner_dims + 1:  # row by row: a compiler can do that while it computes the row
        utility = utility.flatten(learner_dims + 1).amax(-1)
    return utility.amax(-1) if utility.ndim > learner_dims else utility


def _per_learner(value: Value, like: Tensor) -> Value:
    """Let one number per learner meet tensors that have more dimensions than learners do, and perhaps fewer bits."""
    if isinstance(value, Tensor) and value.ndim > 0:
        return value.reshape(value.shape + (1,) * (like.ndim - value.ndim)).to(like.dtype)
    return value
