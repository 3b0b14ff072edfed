"""Loss and gradient of any module for many learners at once, with :mod:`torch.func`; slower than a chain, but general."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from upgd.population.backend import Loss
from upgd.population.chain import Derivatives

__all__ = ["Functional", "check_learns_online"]


class Functional:
    """A module that maps a batch of samples to a batch of outputs. Its buffers are shared and not modified.

    Args:
        network: the module, with the device and type of the computation.
    """

    def __init__(self, network: nn.Module) -> None:
        check_learns_online(network)
        self._network = network
        self._buffers = dict(network.named_buffers())

    def derivatives(self, parameters: Mapping[str, Tensor], x: Tensor, target: Tensor, loss: Loss) -> Derivatives:
        """Return derivatives as :meth:`upgd.population.chain.Chain.derivatives` does, without curvature and gates."""

        def of_one(own: dict[str, Tensor], sample: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            outputs = functional_call(self._network, {**own, **self._buffers}, (sample.unsqueeze(0),)).squeeze(0)
            lost = F.cross_entropy(outputs, wanted) if loss == "cross_entropy" else F.mse_loss(outputs, wanted)
            return lost, outputs

        gradient, (lost, outputs) = vmap(grad_and_value(of_one, has_aux=True))(dict(parameters), x, target)
        correct = outputs.argmax(-1) == (target if loss == "cross_entropy" else -1)
        return Derivatives(lost, correct, gradient)


def check_learns_online(network: nn.Module) -> None:
    """Raise ValueError if a module depends on anything but seed, step and sample."""
    for name, module in network.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(
                f"network has the {type(module).__name__} {name!r} in training mode, which draws random numbers that are not "
                "a function of seed and step; call network.eval() first, or remove it"
            )
        if isinstance(module, _NormBase) and module.training:
            raise ValueError(
                f"network has the {type(module).__name__} {name!r} in training mode, which computes statistics over "
                "batches, but learners process one sample at a time; call network.eval() first, or use LayerNorm"
            )
