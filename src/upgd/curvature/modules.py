"""Modules that make structure visible to HesScale that plain tensor operations hide: gates, branches and sums."""

import torch
from torch import Tensor, nn

__all__ = ["Add", "Fork", "Gate", "Residual"]


class Gate(nn.Module):
    """Multiply each unit or channel by a gate, initialized to 1.

    The gate's gradient and curvature estimate the utility of a feature: removing it (gate 1 → 0) costs about
    ``½·∂²L/∂gate² − ∂L/∂gate``. Do not pass ``weight`` to the optimizer if the gates should stay 1.

    Args:
        units: Number of units or channels.
        dim: Their dimension in the input. Default: 1, as in ``(batch, units)`` and ``(batch, channels, height, width)``.

    Example:
        >>> net = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), gate := upgd.curvature.Gate(3), nn.Linear(3, 1))
        >>> criterion = nn.MSELoss()
        >>> with upgd.HesScale(net, criterion) as curvature:
        ...     criterion(net(torch.ones(2, 5)), torch.zeros(2, 1)).backward()
        >>> (0.5 * curvature.diagonal(gate.weight) - gate.weight.grad).shape
        torch.Size([3])
    """

    def __init__(self, units: int, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.ones(units))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shaped(x)

    def shaped(self, x: Tensor) -> Tensor:
        """Return the gates in a shape that broadcasts against ``x``."""
        shape = [1] * x.ndim
        shape[self.dim] = -1
        return self.weight.view(shape)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, dim={self.dim}"


class Fork(nn.Module):
    """Pass the input to several branches: ``a, b = fork(x)``. Each result may be used once.

    In the backward pass, gradients and curvatures of the branches are summed (curvatures without mixed derivatives, as
    everywhere in HesScale).
    """

    def __init__(self, branches: int = 2) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        # A single node with several outputs, so that the branches can be distinguished in the backward pass.
        return x.expand(self.branches, *x.shape).unbind()


class Add(nn.Module):
    """Add two tensors of the same shape: ``add(a, b)``."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape:
            raise ValueError(
                f"Add takes tensors of the same shape, not {tuple(a.shape)} and {tuple(b.shape)}; give Residual a "
                "shortcut that makes them equal, such as nn.Linear or nn.Conv2d with kernel_size=1"
            )
        return a + b


class Residual(nn.Module):
    """Compute ``body(x) + shortcut(x)`` in a form that HesScale can follow.

    Args:
        body: Any module.
        shortcut: The other branch. Default: None, the identity.

    Example:
        >>> block = upgd.curvature.Residual(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        >>> block(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.fork = Fork()
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fork(x)
        result: Tensor = self.add(self.body(a), self.shortcut(b))
        return result
