"""Registered data sets: a name and a function that returns the arrays."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from upgd import plugins
from upgd.data.dataset import DataError, Dataset, from_arrays
from upgd.data.sources import OFFICIAL

__all__ = ["load", "names", "register"]

AnyFunction = TypeVar("AnyFunction", bound=Callable[[], Any])

_REGISTERED: dict[str, Callable[[], Any]] = {}
#: Results of the registered functions; each function is called once.
_loaded: dict[Callable[[], Any], Dataset] = {}


def register(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register a data set; use it as a decorator on a function that returns the images and labels.

    With ``@upgd.data.register("my-data")``, ``stationary-my-data``, ``input-permuted-my-data``,
    ``output-permuted-my-data`` and the other problem families become available. The function is called once per process,
    when the data set is first used. It returns two arrays as accepted by :func:`from_arrays` (images as bytes or floats,
    or feature vectors; and integer labels), or a :class:`Dataset`.

    Args:
        name: The name of the data set: lower-case letters, digits, ``-``, ``_`` and ``.``.

    Example:
        >>> import numpy as np
        >>> import upgd.data
        >>> @upgd.data.register("example-noise")
        ... def noise():
        ...     draw = np.random.default_rng(0)
        ...     return draw.integers(0, 256, (100, 4, 4), np.uint8), draw.integers(0, 2, 100)
        >>> upgd.data.load("example-noise")
        Dataset('example-noise': 100 images of 4×4, 2 classes)
    """
    if name == "digits" or name in OFFICIAL or not re.fullmatch(r"[a-z0-9][\w-]*", name):
        raise DataError(f"{name!r} is not a valid name for a new data set: it is taken, or not a plain lower-case name")

    def remember(function: AnyFunction) -> AnyFunction:
        return plugins.add(_REGISTERED, "data set", name, function)

    return remember


def load(name: str, split: str) -> Dataset | None:
    """Return the registered data set of that name, or None."""
    function = plugins.find(_REGISTERED, name)
    if function is None:
        return None
    if split != "train":
        raise DataError(f"split must be 'train' for the registered data set {name!r}, not {split!r}")
    if function not in _loaded:
        _loaded[function] = _checked(name, function())
    return _loaded[function]


def names() -> list[str]:
    """Return the names of all registered data sets."""
    plugins.discover()
    return list(_REGISTERED)


def _checked(name: str, given: Any) -> Dataset:
    if isinstance(given, Dataset):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(
            f"the function of the data set {name!r} must return (images, labels) or a Dataset, not a {type(given).__name__}"
        )
    try:
        return from_arrays(name, *given)
    except DataError as error:
        raise DataError(f"the data set {name!r}: {error}") from error
