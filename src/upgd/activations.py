"""Activations that torch does not have."""

import torch
from torch import Tensor, nn

__all__ = ["CReLU"]


class CReLU(nn.Module):
    """Concatenated ReLU (Shang et al., 2016): ``[max(x, 0), max(−x, 0)]``, two outputs for every unit.

    No unit can die: one of its two outputs passes the gradient on, unless the input is zero. The next layer has twice as many
    inputs.

    Args:
        dim: along which units lie: −1 behind Linear layers, −3 behind two-dimensional convolutions.

    Example:
        >>> CReLU()(torch.tensor([[2.0, -1.0]]))
        tensor([[2., 0., 0., 1.]])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}"

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)  # one node in autograd's graph, for HesScale, which follows modules that use their input once
        return torch.cat([torch.relu(x), torch.relu(-x)], self.dim)
