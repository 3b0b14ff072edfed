"""The mathematics of utility-based perturbed gradient descent, on one page.

Every method of the paper except AdamW is one rule with switches. For each parameter entry ``w`` with gradient ``g`` and,
if available, curvature ``h`` (an estimate of the Hessian's diagonal), at step ``t`` = 1, 2, …::

    m  = ½·h·w² − g·w                                          utility     cost of removing w on this sample
    u ← β·u + (1−β)·m                                          trace       running average over samples
    û  = u / (1 − βᵗ)                                          unbiased    corrected for starting at zero
    ū  = sigmoid(û / scale)                                    gate        relative to the other weights: 0 useless, 1 useful
    w ← w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + wd·w]          update      protects useful weights, perturbs useless ones

``scale`` is :func:`global_scale` (the largest utility of the learner) or :func:`local_scale` (the norm over the incoming
weights of a unit). ξ is the noise of :mod:`upgd.noise`. The switches determine the method:

| method                      |  c  |  p  |  q  |  σ  | wd  |
| --------------------------- | --- | --- | --- | --- | --- |
| SGD                         |  1  |  0  |  0  |  0  |  0  |
| SGDW                        |  1  |  0  |  0  |  0  | > 0 |
| PGD; Anti-PGD (other noise) |  1  |  0  |  0  | > 0 |  0  |
| Shrink & Perturb            |  1  |  0  |  0  | > 0 | > 0 |
| UPGD, UPGD-W                |  1  |  1  |  1  | ≥ 0 | ≥ 0 |
| Non-protecting UPGD         |  1  |  0  |  1  | ≥ 0 | ≥ 0 |
| UPS (search, no gradient)   |  0  |  –  |  1  | > 0 |  0  |

The functions are pure and work for one learner or many: tensors may have leading *learner dimensions*, and every
hyperparameter and switch may be a tensor of these dimensions, with one value per learner.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["gate", "global_scale", "largest", "local_scale", "trace", "unbiased", "update", "utility"]

#: A hyperparameter or switch: one number, or one per learner.
Value = float | Tensor


def utility(weight: Tensor, grad: Tensor, curvature: Tensor | None = None) -> Tensor:
    """Return the increase of the loss, to first or second order, if each weight were set to zero: ``½·h·w² − g·w``."""
    first_order = -grad * weight
    return first_order if curvature is None else first_order + 0.5 * curvature * weight**2


def trace(previous: Tensor, instant: Tensor, beta: Value) -> Tensor:
    """Return the running average ``β·u + (1 − β)·m``."""
    return _per_learner(beta, previous) * previous + _per_learner(1 - beta, previous) * instant


def unbiased(traced: Tensor, beta: Value, step: Value) -> Tensor:
    """Return the trace corrected for its initial value of zero: ``u / (1 − βᵗ)``, with steps counted from 1."""
    return traced / _per_learner(1 - beta**step, traced)


def global_scale(utilities: Iterable[Tensor], learner_dims: int = 0) -> Tensor:
    """Return the largest utility over all parameters of a learner, clamped below at the smallest normal float.

    The clamp determines the gates while nothing is useful (all utilities are zero or negative): a utility of zero gets the
    gate sigmoid(0) = ½ and a negative one 0. There is no division by zero and no change of sign. A parameter tensor with a
    NaN or infinite utility is excluded, so it cannot affect other parameters.
    """
    found = largest(utilities, learner_dims)
    return found.clamp(min=torch.finfo(found.dtype).tiny)


def largest(values: Iterable[Tensor], learner_dims: int = 0) -> Tensor:
    """Return the largest entry of all tensors; a tensor whose maximum is NaN or infinite counts as zero."""
    maxima = [_maximum(v, learner_dims) for v in values if v.numel()]
    device = maxima[0].device
    return torch.stack([torch.where(torch.isfinite(m), m, 0).to(device) for m in maxima]).amax(0)


def local_scale(utility: Tensor, learner_dims: int = 0) -> Tensor:
    """Return the Euclidean norm over the incoming weights of each unit, clamped below at √tiny.

    Squares of smaller numbers underflow. With the clamp, no utility exceeds its scale even if the norm underflows: as the
    utilities of an inactive unit decay to zero, its gates approach φ(0).

    A unit is a row of a Linear weight, a filter of a convolution, or a whole bias vector. The result has the dimensions of
    ``utility``, with size 1 where the norm was taken.
    """
    within_learner = utility.ndim - learner_dims
    if within_learner == 0:
        norm = utility.abs()
    else:
        first = learner_dims + 1 if within_learner > 1 else learner_dims
        norm = torch.linalg.vector_norm(utility, dim=tuple(range(first, utility.ndim)), keepdim=True)
    return norm.clamp(min=torch.finfo(norm.dtype).tiny ** 0.5)


def gate(utility: Tensor, scale: Tensor) -> Tensor:
    """Return the gate of each entry, its utility relative to the scale, in [0, 1]: ``sigmoid(û / scale)``."""
    # Not torch.sigmoid: on the CPU, it rounds differently at the end of a tensor, where a vector register is not full, so the
    # last bit of a learner's numbers would depend on the other learners.
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
    """Return the new weight: ``w − lr·[c·g·(1 − p·ū) + σ·ξ·(1 − q·ū) + wd·w]``.

    The decay is part of the step. As a factor of the weight, ``1 − lr·wd`` would round to 1 in float32 if lr·wd is below
    3e-8, and the decay would be lost.
    """
    lr, sigma, weight_decay, c, p, q = (_per_learner(v, weight) for v in (lr, sigma, weight_decay, c, p, q))
    gradient_part = c * grad * (1 - p * gate)
    search_part = sigma * noise * (1 - q * gate)
    return weight - lr * (gradient_part + search_part + weight_decay * weight)


def _maximum(utility: Tensor, learner_dims: int) -> Tensor:
    if utility.ndim > learner_dims + 1:  # reduce by row, which a compiler can fuse with the computation of the row
        utility = utility.flatten(learner_dims + 1).amax(-1)
    return utility.amax(-1) if utility.ndim > learner_dims else utility


def _per_learner(value: Value, like: Tensor) -> Value:
    """Reshape a per-learner value so that it broadcasts against tensors with more dimensions, and match their type."""
    if isinstance(value, Tensor) and value.ndim > 0:
        return value.reshape(value.shape + (1,) * (like.ndim - value.ndim)).to(like.dtype)
    return value
