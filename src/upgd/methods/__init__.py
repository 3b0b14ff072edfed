"""Methods: one class defines a learning rule, and everything else in the package is derived from it.

New methods are written with :class:`Method` and :class:`Setting` and registered with :func:`register`. :data:`METHODS` maps
names to methods. Each family has a module:

- ``descent``: gradient descent with and without momentum, weight decay and noise;
- ``adamw``: RMSProp, Adam, AdamW, AdaUPGD;
- ``utility``: UPGD and UPS;
- ``initial``: methods that stay near the initial weights or their distribution;
- ``bounded``: bounded steps;
- ``streaming``: regularizers against forgetting;
- ``resets``: methods that reset hidden units.

    >>> import upgd.methods
    >>> upgd.methods.METHODS["upgd"].label
    'UPGD'
"""

from upgd.methods.deriving import from_torch, optimizer
from upgd.methods.method import Method, Setting
from upgd.methods.registry import METHODS, get, register

# isort: split
# Importing a family registers its methods.
from upgd.methods import (
    adamw,  # noqa: F401
    bounded,  # noqa: F401
    descent,  # noqa: F401
    initial,  # noqa: F401
    resets,  # noqa: F401
    streaming,  # noqa: F401
    utility,  # noqa: F401
)

__all__ = ["METHODS", "Method", "Setting", "from_torch", "get", "optimizer", "register"]
