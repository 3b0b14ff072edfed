"""Start of the sweep: second derivatives of the losses with respect to their input.

Each rule returns ``factor`` times the second derivative of the criterion's output, where ``factor`` is the gradient with
respect to that output: 1 for ``loss.backward()``, 1/k for ``(loss / k).backward()``, one number per sample if the criterion
does not reduce. Cross-entropies have a full Hessian with respect to their logits; the rules return its exact diagonal.
"""

import torch
from torch import Tensor, nn

from upgd.curvature._registry import loss


@loss(nn.MSELoss)
def mean_squared_error(criterion: nn.MSELoss, y: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    if y.shape != target.shape:
        raise ValueError(
            f"HesScale needs the input and target of MSELoss to have the same shape, not {tuple(y.shape)} and "
            f"{tuple(target.shape)}; reshape the target"
        )
    return (2 * factor / y.numel() if criterion.reduction == "mean" else 2 * factor).expand_as(y)


@loss(nn.BCEWithLogitsLoss)
def binary_cross_entropy(criterion: nn.BCEWithLogitsLoss, y: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    s = torch.sigmoid(y)
    h = s * (1 - s) * factor
    if criterion.pos_weight is not None:
        h = h * (1 + (criterion.pos_weight - 1) * target)
    if criterion.weight is not None:
        h = h * criterion.weight
    return h / y.numel() if criterion.reduction == "mean" else h


@loss(nn.CrossEntropyLoss)
def cross_entropy(criterion: nn.CrossEntropyLoss, y: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    classes = 1 if y.ndim > 1 else 0
    q = torch.softmax(y, classes)
    return torch.addcmul(q, q, q, value=-1) * _share(criterion, target, factor, classes).unsqueeze(classes)


@loss(nn.NLLLoss)
def negative_log_likelihood(criterion: nn.NLLLoss, y: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    return torch.zeros_like(y)


def _share(criterion: nn.CrossEntropyLoss, target: Tensor, factor: Tensor, classes: int) -> Tensor:
    """Return the factor of −log q of the target for each sample: target mass, class weights and reduction.

    The loss of a sample is ``−Σ_c w_c·t_c·log q_c`` for a target distribution t, which label smoothing ε replaces by
    ``(1 − ε)·t + ε/C``. Its Hessian with respect to the logits has the diagonal ``(Σ_c w_c·t_c)·(q − q²)``.
    """
    weight, smoothing = criterion.weight, criterion.label_smoothing
    if target.is_floating_point():
        mass = _mass_of_probabilities(target, weight, smoothing, classes)
        return mass * (factor / mass.numel() if criterion.reduction == "mean" else factor)

    if target.numel() == 1 and criterion.reduction == "mean" and (weight is None or smoothing == 0):
        # Online learning: the weighted mean of one sample is that sample, whatever its weight (NaN if it is ignored).
        return factor.expand(target.shape)
    mass = own = target != criterion.ignore_index
    if weight is not None:
        own = weight[target.where(mass, 0).long()] * mass  # classes in 8 bits would be a mask
        mass = (1 - smoothing) * own + smoothing * weight.mean() * mass
    # torch divides the mean by the sum of target weights, with and without smoothing.
    return mass * (factor / own.sum() if criterion.reduction == "mean" else factor)


def _mass_of_probabilities(target: Tensor, weight: Tensor | None, smoothing: float, classes: int) -> Tensor:
    target = (1 - smoothing) * target + smoothing / target.shape[classes]
    if weight is not None:
        shape = [1] * target.ndim
        shape[classes] = -1
        target = target * weight.view(shape)
    return target.sum(classes)
