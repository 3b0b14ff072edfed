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
from upgd.streams.images import ImageStream, InputPermuted, OutputPermuted, Stationary
from upgd.streams.labels import ClassPairs, RandomLabels
from upgd.streams.toy import ToyChangingInputs, ToyChangingOutputs, UtilityQuality

__all__ = ["defaults", "factory", "make", "names", "register"]

Factory = Callable[..., Stream]
AnyFactory = TypeVar("AnyFactory", bound=Factory)

#: Data sets whose streams :func:`names` lists; the problem families accept any other data set as well.
_DATA_SETS = ("digits", "mnist", "emnist", "cifar10")
#: Problem families that exist for every data set.
FAMILIES: dict[str, type[ImageStream]] = {
    family.family: family for family in (Stationary, InputPermuted, OutputPermuted, RandomLabels, ClassPairs)
}
#: The family and the data set of the problems that :func:`names` lists.
_OF_DATA_SETS = {f"{family}-{data}": (family, data) for family in FAMILIES for data in _DATA_SETS}
_FACTORIES: dict[str, Factory] = {
    "toy-changing-inputs": ToyChangingInputs,
    "toy-changing-outputs": ToyChangingOutputs,
    "bit-flipping": BitFlipping,
    "label-permuted-features": LabelPermutedFeatures,
    "utility-quality": UtilityQuality,
    "utility-quality-weights": UtilityQuality,
    "utility-quality-features": UtilityQuality,
    **{name: partial(FAMILIES[family], data) for name, (family, data) in _OF_DATA_SETS.items()},
}


def make(name: str, **options: Any) -> Stream:
    """Create the stream with the given name.

    Args:
        name: One of :func:`names`; or ``stationary-DATA``, ``input-permuted-DATA``, ``output-permuted-DATA``,
            ``random-label-DATA`` or ``class-pairs-DATA`` for any data set known to :func:`upgd.data.load`; or one of these
            without ``-DATA``, with your own arrays as ``data=(images, labels)``.
        options: Keyword arguments of the stream, such as ``task_length``.

    Returns:
        The stream, see :class:`upgd.streams.Stream`.

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
        wrong = "" if _takes_any(signature) else next((own for own in options if own not in signature.parameters), "")
        if not wrong:
            raise TypeError(f"{name}: {error}; its options are: {takes}") from None
        near = "".join(f" (did you mean {match!r}?)" for match in get_close_matches(wrong, signature.parameters, n=1))
        raise TypeError(f"{name} has no option {wrong!r}{near}; its options are: {takes}") from None
    stream = create(**options)
    for attribute in ("name", "input_shape", "outputs", "loss", "task_length", "chunk"):
        if not hasattr(stream, attribute):
            raise TypeError(f"the stream {name!r} has no {attribute!r}; define it as an attribute of its class")
    if not isinstance(stream.input_shape, tuple | list):
        raise TypeError(f"input_shape of {name} must be a tuple, such as (1,), not {stream.input_shape!r}")
    return stream


def _takes_any(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def register(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Register a stream under a name.

    Use it as a decorator, ``@register("my-stream")``, on the class or function that :func:`make` should call.

    Args:
        name: The name, for :func:`make`, commands and experiments.

    Returns:
        A decorator, which returns the class or function unchanged.
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
    found = _find(name)
    if found is None:
        near = get_close_matches(name, _FACTORIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names())}, or {plugins.REMEDY}"
        raise ValueError(f"there is no problem {name!r}; {hint}")
    if name not in _FACTORIES and isinstance(found, partial):
        check_name(*found.args)
    return found


def defaults(name: str) -> dict[str, Any]:
    """Return the default values of a stream's options, without loading its data set; none for an unknown stream."""
    found = _find(name)
    if found is None:
        return {}
    parameters = inspect.signature(found).parameters.values()
    values = {one.name: one.default for one in parameters if one.default is not one.empty}
    if name in _OF_DATA_SETS and "task_length" in values:  # whose default is None: it depends on the data set
        family, data = _OF_DATA_SETS[name]
        values["task_length"] = FAMILIES[family].usual_task_length(data)
    return values


def _find(name: str) -> Factory | None:
    """Return what creates the stream of that name, whether or not its data set exists."""
    if found := _FACTORIES.get(name) or FAMILIES.get(name) or plugins.find(_FACTORIES, name):
        return found
    for family, create in FAMILIES.items():
        if name.startswith(f"{family}-"):
            return partial(create, name.removeprefix(f"{family}-"))
    return None


def names() -> list[str]:
    """Return the names of all registered streams.

    Example:
        >>> "toy-changing-inputs" in names()
        True
    """
    plugins.discover()
    return list(_FACTORIES)
