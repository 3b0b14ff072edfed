"""Labelled images stored as bytes, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "DataError", "Dataset", "from_arrays"]

#: Arrays are stored as unsigned bytes and converted only where they are used.
Bytes = npt.NDArray[np.uint8]


class DataError(ValueError):
    """A data file, archive, download or array cannot be used; the message names it and the remedy."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images, stored as bytes.

    Pixels are scaled to [−1, 1] only where they are used, as ``(x / white − 0.5) / 0.5``. Data sets in the cache are
    memory-mapped: opening one takes milliseconds, and all processes on a machine share one copy.

    Args:
        name: The name shown in tables and reports.
        images: uint8, ``(n, height, width)`` for grey images or ``(n, channels, height, width)`` for colour.
        labels: uint8, ``(n,)``, from 0 to ``classes − 1``.
        classes: The number of classes.
        white: The largest possible pixel value: 255, or 16 for the embedded digits.
        transposed: Whether rows and columns of the images are swapped, as in the EMNIST files; see :meth:`upright`.

    Example:
        >>> import upgd.data
        >>> digits = upgd.data.load("digits")
        >>> digits.images.shape, digits.classes, digits.white
        ((1797, 8, 8), 10, 16)
    """

    name: str
    images: Bytes
    labels: Bytes
    classes: int
    white: int = 255
    transposed: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.images.shape[1:])
        return f"Dataset({self.name!r}: {len(self):,} images of {shape}, {self.classes} classes)"

    def upright(self) -> Dataset:
        """Return the data set with upright images, swapping the axes if the files store them transposed.

        The result is a view. Experiments use the pixels as stored, for comparability with published results; a network
        without convolutions is not affected by the orientation.
        """
        if not self.transposed:
            return self
        return replace(self, images=self.images.swapaxes(-1, -2), transposed=False)


def from_arrays(
    name: str, images: Any, labels: Any, *, classes: int | None = None, white: int = 255, transposed: bool = False
) -> Dataset:
    """Create a data set from arrays, after validating them. Arrays are copied only if necessary.

    Args:
        name: The name of the data set.
        images: uint8, ``(n, height, width)`` or ``(n, channels, height, width)``; an array or array-like.
        labels: ``(n,)`` integers from 0 to ``classes − 1``; at most 256 classes.
        classes: The number of classes. Default: the largest label plus one.
        white: The largest possible pixel value. Default: 255.
        transposed: Whether rows and columns of the images are swapped, as in EMNIST. Default: False.

    Returns:
        The data set, with read-only arrays.

    Example:
        >>> import numpy as np
        >>> import upgd.data
        >>> upgd.data.from_arrays("noise", np.zeros((3, 4, 4), np.uint8), [0, 1, 1])
        Dataset('noise': 3 images of 4×4, 2 classes)
    """
    images, labels = _checked_images(images, white), _checked_labels(labels)
    if len(images) != len(labels):
        raise DataError(f"images and labels must have the same length, not {len(images):,} and {len(labels):,}.")
    found = int(labels.max()) + 1
    classes = found if classes is None else classes
    if not found <= classes <= 256:
        raise DataError(f"classes must be from {found} (the largest label plus one) to 256, not {classes}.")
    return Dataset(name, _read_only(images), _read_only(labels), classes, white, transposed)


def _checked_images(images: Any, white: int) -> Bytes:
    array = np.asarray(images)
    if array.dtype != np.uint8:
        raise DataError(
            f"images must be unsigned bytes (uint8) from 0 to white={white}, not {array.dtype}: "
            "scale and round them first, e.g. (255 * images).round().astype('uint8')."
        )
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise DataError(
            "images must have the shape (n, height, width) or (n, channels, height, width) without zero-sized dimensions, "
            f"not {array.shape}."
        )
    if array.ndim == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        raise DataError(f"images of shape {array.shape} have their channels last; pass images.transpose(0, 3, 1, 2).")
    if not 1 <= white <= 255:
        raise DataError(f"white must be from 1 to 255, the largest possible pixel value, not {white}.")
    if white < 255 and array.max() > white:
        raise DataError(
            f"images contain the value {array.max()}, more than white={white}; pass white={array.max()} or more."
        )
    return array


def _checked_labels(labels: Any) -> Bytes:
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"labels must be a 1-D integer array, not {array.dtype} of shape {array.shape}.")
    if len(array) and not 0 <= array.min() <= array.max() <= 255:
        raise DataError(f"labels must be from 0 to 255, not from {array.min()} to {array.max()}.")
    return array.astype(np.uint8, copy=False)


def _read_only(array: Bytes) -> Bytes:
    view = array.view()
    view.flags.writeable = False
    return view
