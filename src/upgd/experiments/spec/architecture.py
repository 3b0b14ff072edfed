"""Networks by name, so that a result can say which one it used and another process can make the same.

``"300-150"`` is an MLP with hidden layers of 300 and 150 units, ``"300-150:identity"`` one with another activation,
``"linear"`` a single layer, ``"conv"`` the paper's convolutional network, and ``"conv-authors"`` the same without activations
after the convolutions, as in the authors' public code. Inputs and outputs are the problem's.

    >>> from upgd.streams import make
    >>> network("100-50", make("output-permuted-digits")).describe()
    'MLP 64-100-50-10, relu, 12,060 parameters'
"""

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

from torch import nn

from upgd.networks import ACTIVATIONS, MLP, ConvNet, Linear
from upgd.streams import Stream
from upgd.streams.registry import is_again

__all__ = ["check", "network", "register"]

Factory = Callable[[Stream], nn.Module]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

_REGISTERED: dict[str, Factory] = {}
BUILT_IN = ("linear", "conv", "conv-authors")
_DENSE = re.compile(r"[1-9]\d{0,17}(-[1-9]\d{0,17})*")
#: 4 GB in float32, for one learner; a larger network is a slip of the keyboard.
_MOST_PARAMETERS = 10**9
_FORMS = "linear, conv, conv-authors, or hidden sizes such as 300-150; an activation may follow, as in 300-150:tanh"


def network(name: str, stream: Stream) -> nn.Module:
    """The network of that name for a problem."""
    check(name)
    if name in _REGISTERED:
        return _REGISTERED[name](stream)
    body, _, activation = name.partition(":")
    activation = activation or "relu"
    inputs = math.prod(stream.input_shape)
    if body == "linear":
        return Linear(inputs, stream.outputs)
    if body in ("conv", "conv-authors"):
        return ConvNet(stream.input_shape, stream.outputs, activation, conv_activation=body == "conv")
    sizes = (inputs, *(int(size) for size in body.split("-")), stream.outputs)
    # Counted before it is made: some systems promise memory that they do not have, and end the process later.
    parameters = sum((before + 1) * after for before, after in pairwise(sizes))
    if parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"network={name!r} has {parameters:,} parameters, more than {_MOST_PARAMETERS:,}; use smaller hidden layers"
        )
    return MLP(sizes, activation)


def check(name: str) -> str:
    """The name itself, or an error that says what names there are."""
    body, colon, activation = str(name).partition(":")
    known = name in _REGISTERED or body in BUILT_IN or _DENSE.fullmatch(body)
    if not known:
        raise ValueError(f"network must be {_FORMS}; not {name!r}")
    if colon and (activation not in ACTIVATIONS or body == "linear"):
        raise ValueError(f"the activation in network={name!r} must be one of {', '.join(ACTIVATIONS)}; linear has none")
    return name


def register(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Add a network: put ``@register("my-network")`` before a function that makes the module for a stream."""

    if name in BUILT_IN or not re.fullmatch(r"[a-z][\w-]*", name):
        raise ValueError(f"{name!r} cannot be the name of a new network: taken, or no plain lower-case name")

    def remember(factory: AnyFactory) -> AnyFactory:
        if name in _REGISTERED and not is_again(factory, _REGISTERED[name]):
            raise ValueError(f"there is a network named {name!r} already; choose another name")
        _REGISTERED[name] = factory
        return factory

    return remember
