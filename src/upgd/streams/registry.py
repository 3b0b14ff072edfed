"""Registry of streams."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from upgd import plugins
from upgd.data import check_name
from upgd.streams.bits import BitFlipping
from upgd.streams.contract import Stream
from upgd.streams.features import LabelPermutedFeatures
from upgd.streams.images import InputPermuted, OutputPermuted, Stationary
from upgd.streams.labels import ClassPairs, RandomLabels
from upgd.streams.toy import ToyChangingInputs, ToyChangingOutputs, UtilityQuality

__all__ = ["factory", "make", "names", "register"]

Factory = Callable[..., Stream]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

#: Data sets whose streams :func:`names` lists; the problem families accept any other data set as well.
_DATA_SETS = ("digits", "mnist", "emnist", "cifar10")
#: Problem families that exist for every data set.
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
    """Create the stream with the given name.

    Args:
        name: One of :func:`names`; or ``stationary-DATA``, ``input-permuted-DATA``, ``output-permuted-DATA``,
            ``random-label-DATA`` or ``class-pairs-DATA`` for any data set known to :func:`upgd.data.load`; or one of these
            without ``-DATA``, with your own arrays as ``data=(images, labels)``.
        options: Keyword arguments of the stream, such as ``task_length``.

    Example:
        >>> make("input-permuted-digits", task_length=500).input_shape
        (8, 8)
    """
    create = factory(name)
    signature = inspect.signature(create)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise TypeError(f"{name}: {error}; its options are: {takes}") from None
    return create(**options)


def register(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Register a stream under a name.

    Use it as a decorator, ``@register("my-stream")``, on the class or function that :func:`make` should call.
    """

    def remember(factory: AnyFactory) -> AnyFactory:
        if name in FAMILIES:
            raise ValueError(f"a stream named {name!r} already exists; choose another name")
        return plugins.add(_FACTORIES, "stream", name, factory)

    return remember


def factory(name: str) -> Factory:
    """Return what creates the stream of that name, or raise ValueError with a suggestion if there is no such stream."""
    if not isinstance(name, str):
        raise TypeError(
            f"a problem is a name such as 'output-permuted-digits', not {name!r}; register your own stream with "
            "@upgd.streams.register"
        )
    if found := _FACTORIES.get(name) or FAMILIES.get(name) or plugins.find(_FACTORIES, name):
        return found
    for family, create in FAMILIES.items():
        if name.startswith(f"{family}-"):
            data = name.removeprefix(f"{family}-")
            check_name(data)
            return partial(create, data)
    near = get_close_matches(name, _FACTORIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names())}"
    raise ValueError(f"there is no problem {name!r}; {hint}")


def names() -> list[str]:
    """Return the names of all registered streams."""
    plugins.discover()
    return list(_FACTORIES)
