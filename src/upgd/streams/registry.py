"""Streams by name."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from upgd import plugins
from upgd.streams.bits import BitFlipping
from upgd.streams.contract import Stream
from upgd.streams.features import LabelPermutedFeatures
from upgd.streams.images import InputPermuted, OutputPermuted, Stationary
from upgd.streams.labels import ClassPairs, RandomLabels
from upgd.streams.toy import ToyChangingInputs, ToyChangingOutputs, UtilityQuality

__all__ = ["make", "names", "register"]

Factory = Callable[..., Stream]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

#: The data sets whose streams :func:`names` lists; the families take any other data set, too.
_DATA_SETS = ("digits", "mnist", "emnist", "cifar10")
#: Problems that exist for every data set.
FAMILIES: dict[str, Factory] = {
    family.family: family for family in (Stationary, InputPermuted, OutputPermuted, RandomLabels, ClassPairs)
}
_FACTORIES: dict[str, Factory] = {
    "toy-changing-inputs": ToyChangingInputs,
    "toy-changing-outputs": ToyChangingOutputs,
    "bit-flipping": BitFlipping,
    "label-permuted-features": LabelPermutedFeatures,
    "utility-quality": UtilityQuality,
    "utility-quality-weights": UtilityQuality,
    "utility-quality-features": UtilityQuality,
    **{f"{name}-{data}": partial(family, data) for name, family in FAMILIES.items() for data in _DATA_SETS},
}


def make(name: str, **options: Any) -> Stream:
    """The stream of that name.

    Args:
        name: one of :func:`names`; or ``stationary-DATA``, ``input-permuted-DATA``, ``output-permuted-DATA``,
            ``random-label-DATA``, ``class-pairs-DATA`` for any data set that :func:`upgd.data.load` knows; or one of these
            without ``-DATA`` and with ``data=(images, labels)``, your own arrays.
        options: what the stream takes, such as ``task_length``.

    Example:
        >>> make("input-permuted-digits", task_length=500).input_shape
        (8, 8)
    """
    factory = _factory(name)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise TypeError(f"{name}: {error}; its options are: {takes}") from None
    return factory(**options)


def register(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Add a stream: put ``@register("my-stream")`` before a class, or a function, that :func:`make` shall call."""

    def remember(factory: AnyFactory) -> AnyFactory:
        if name in FAMILIES:
            raise ValueError(f"there is a stream named {name!r} already; choose another name")
        return plugins.add(_FACTORIES, "stream", name, factory)

    return remember


def _factory(name: str) -> Factory:
    if not isinstance(name, str):
        raise TypeError(
            f"a problem is a name such as 'output-permuted-digits', not {name!r}; give a stream of your own a name with "
            "@upgd.streams.register"
        )
    if factory := _FACTORIES.get(name) or FAMILIES.get(name) or plugins.find(_FACTORIES, name):
        return factory
    for family, factory in FAMILIES.items():
        if name.startswith(f"{family}-"):
            return partial(factory, name.removeprefix(f"{family}-"))
    near = get_close_matches(name, _FACTORIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names())}"
    raise ValueError(f"there is no stream named {name!r}; {hint}")


def names() -> list[str]:
    """The names of all registered streams."""
    plugins.discover()
    return list(_FACTORIES)
