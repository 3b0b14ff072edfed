"""Networks by name, so that a result can refer to its network and another process can create the same one.

``"300-150"`` is an MLP with hidden layers of 300 and 150 units, ``"300-150:identity"`` has another activation
(``"300-150:crelu"`` has two outputs per unit), and ``"300-150:layernorm"`` or ``"300-150:tanh:layernorm"`` has an
``nn.LayerNorm`` before each activation. ``"linear"`` is a single layer, ``"conv"`` the paper's convolutional network, and
``"conv-authors"`` the same without activations after the convolutions, as in the authors' public code.
:func:`upgd.networks.register` adds others. The problem determines the inputs and outputs.

    >>> from upgd.streams import make
    >>> network("100-50", make("output-permuted-digits")).describe()
    'MLP 64-100-50-10, relu, 12,060 parameters'
"""

import math
import re

from torch import nn

from upgd import plugins
from upgd.networks import ACTIVATIONS, BUILT_IN, MLP, ConvNet, Linear, registered
from upgd.streams import Stream

__all__ = ["check", "network"]

_DENSE = re.compile(r"[1-9]\d{0,17}(-[1-9]\d{0,17})*")
#: 4 GB in float32 for one learner; a larger network is probably a typing error.
_MOST_PARAMETERS = 10**9
_FORMS = (
    "linear, conv, conv-authors, or hidden sizes such as 300-150; an activation and layernorm may follow, as in "
    "300-150:tanh:layernorm"
)


def network(name: str, stream: Stream) -> nn.Module:
    """Return the network of that name for a problem."""
    check(name)
    body, *words = name.split(":")
    if not _is_built_in(body) and (factory := registered(name)) is not None:
        made = factory(stream)
        if not isinstance(made, nn.Module):
            raise TypeError(f"the function of network={name!r} must return an nn.Module, not {made!r}")
        return made
    layer_norm = "layernorm" in words
    activation = next((word for word in words if word != "layernorm"), "relu")
    inputs = math.prod(stream.input_shape)
    if body == "linear":
        return Linear(inputs, stream.outputs)
    if body in ("conv", "conv-authors"):
        return ConvNet(stream.input_shape, stream.outputs, activation, conv_activation=body == "conv")
    sizes = (inputs, *(int(size) for size in body.split("-")), stream.outputs)
    # Check the size first: some systems promise memory that they do not have, and kill the process later.
    entering = (inputs, *(size * (2 if activation == "crelu" else 1) for size in sizes[1:-1]))
    parameters = sum((before + 1) * after for before, after in zip(entering, sizes[1:], strict=True))
    if parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"network={name!r} has {parameters:,} parameters, more than {_MOST_PARAMETERS:,}; use smaller hidden layers"
        )
    return MLP(sizes, activation, layer_norm=layer_norm)


def check(name: str) -> str:
    """Return the name if it is valid; otherwise raise an error that lists the valid forms."""
    if not isinstance(name, str):
        raise TypeError(f"network must be a string such as '300-150', not {name!r}")
    body, *words = name.split(":")
    if not _is_built_in(body) and registered(name) is None:
        raise ValueError(f"network must be {_FORMS}; not {name!r}; for another one, {plugins.REMEDY}")
    if body not in BUILT_IN and words[-1:] == ["layernorm"]:
        del words[-1]
    if words and (len(words) > 1 or words[0] not in ACTIVATIONS or body == "linear"):
        raise ValueError(
            f"the activation in network={name!r} must be one of {', '.join(ACTIVATIONS)}; only that of an MLP may be "
            "followed by :layernorm, and linear has none"
        )
    return name


def _is_built_in(body: str) -> bool:
    return body in BUILT_IN or _DENSE.fullmatch(body) is not None
