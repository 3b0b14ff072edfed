"""From a method to a torch optimizer."""

import importlib
from typing import TYPE_CHECKING, Any

from upgd.methods.registry import get

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

__all__ = ["optimizer"]


def optimizer(name: str, params: "ParamsT", **settings: Any) -> "Optimizer":
    """A torch optimizer that runs a method, made from the method's class.

    Methods with a public optimizer class, such as ``upgd``, give that class. All others give an optimizer that runs the
    method's rule. It has the same manners: parameter groups, closures, schedulers, tensor learning rates, ``state_dict``,
    ``GradScaler``, ``torch.compile``. In a group with ``"gated": False`` a method with gates has none.

    Args:
        name: one of :data:`upgd.methods.METHODS`.
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        settings: the method's settings by name; and ``maximize``, ``capturable``, ``generator`` and ``curvature``, as for
            :class:`upgd.UPGD`.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> upgd.methods.optimizer("upgd", model.parameters(), lr=0.01).__class__
        <class 'upgd.optim.upgd.UPGD'>
        >>> optimizer = upgd.methods.optimizer("ups-even", model.parameters(), lr=1.0, sigma=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    # The optimizers are built on the methods, and so are imported only when one is asked for.
    made: Optimizer = importlib.import_module("upgd.optim.from_method").optimizer(get(name), params, **settings)
    return made
