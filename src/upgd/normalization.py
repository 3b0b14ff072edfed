"""Online normalization of inputs by a running mean and variance, which start as plain averages.

With decay rate α, at step t = 1, 2, …, for every input x::

    a  = min(α, (t − 1)/t)
    μ′ = a·μ + (1−a)·x
    v′ = a·v + (1−a)·(x − μ)·(x − μ′)
    x̂  = clip((x − μ′)/√(v′ + 10⁻⁴), −5, 5)
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OnlineNorm", "decay", "normalize", "normalized"]

_EPS = 1e-4
_CLIP = 5.0


def decay(rate: Any, step: Any) -> Any:
    """Return the decay rate of a step: a plain average at first, then ``rate``."""
    averaging = (step - 1) / step
    if isinstance(rate, float | int) and isinstance(averaging, float | int):
        return min(rate, averaging)
    return torch.minimum(rate, averaging)


def normalize(x: Tensor, mean: Tensor, variance: Tensor, decay: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized sample, the new mean and the new variance."""
    new_mean = decay * mean + (1 - decay) * x
    new_variance = decay * variance + (1 - decay) * ((x - mean) * (x - new_mean))
    return normalized(x, new_mean, new_variance), new_mean, new_variance


def normalized(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return a sample normalized by the given mean and variance."""
    return ((x - mean) / (variance + _EPS).sqrt()).clamp(-_CLIP, _CLIP)


class OnlineNorm(nn.Module):
    """Normalize inputs online, one sample at a time. Use it as the first layer of a model.

    With decay rate α, at step t = 1, 2, …, for every input x::

        a  = min(α, (t − 1)/t)                              a plain average at first
        μ ← a·μ + (1−a)·x,   v ← a·v + (1−a)·(x − μ_old)·(x − μ)
        output = clip((x − μ)/√(v + 10⁻⁴), −5, 5)

    In training mode, each sample of a batch, in order, updates the mean and the variance before it is normalized. In
    evaluation mode, they are not updated. In training mode, gradients do not flow through the layer, which is meant for
    input data. ``Learner(normalize=rate)`` gives the same results in a population.

    Args:
        shape: The shape of one sample, such as ``784`` or ``(3, 32, 32)``.
        rate: The decay rate α. Default: 0.99.

    Attributes:
        mean, variance, steps: The running statistics and the number of samples seen; buffers, so they are part of
            ``state_dict()``.

    Example:
        >>> model = torch.nn.Sequential(upgd.OnlineNorm(4), torch.nn.Linear(4, 2))
        >>> model(torch.randn(1, 4)).shape
        torch.Size([1, 2])
    """

    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, shape: int | tuple[int, ...], rate: float = 0.99) -> None:
        super().__init__()
        self.rate = _checked_rate(rate)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.mean.shape:
            raise ValueError(
                f"x must be a batch of samples of shape {tuple(self.mean.shape)}, not a tensor of shape {tuple(x.shape)}; "
                "add a batch dimension with x.unsqueeze(0), or create OnlineNorm with the shape of your samples"
            )
        if not self.training:
            return normalized(x, self.mean, self.variance)
        out = []
        for sample in x.detach():
            self.steps += 1
            rate = decay(self.rate, self.steps.item())
            new, mean, variance = normalize(sample, self.mean, self.variance, rate)
            self.mean.copy_(mean)
            self.variance.copy_(variance)
            out.append(new)
        return torch.stack(out) if out else x

    def extra_repr(self) -> str:
        return f"{tuple(self.mean.shape)}, rate={self.rate}"


def _checked_rate(rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < float(rate) < 1:
        raise ValueError(f"rate must be a number between 0 and 1, not {rate!r}; try 0.99")
    return float(rate)
