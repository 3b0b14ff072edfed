"""Activation modules that torch does not provide."""

import torch
from torch import Tensor, nn

__all__ = ["CReLU"]


class CReLU(nn.Module):
    """Concatenated ReLU (Shang et al., 2016): ``[max(x, 0), max(−x, 0)]``, two outputs per unit.

    Units cannot die: one of the two outputs always passes on the gradient, unless the input is zero. The next layer has twice
    as many inputs.

    Args:
        dim: The dimension of the units. Default: −1, after Linear layers; use −3 after two-dimensional convolutions.

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
        x = x.view_as(x)  # HesScale needs modules to use their input only once
        return torch.cat([torch.relu(x), torch.relu(-x)], self.dim)
