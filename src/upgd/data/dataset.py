"""Labelled images or feature vectors, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "DataError", "Dataset", "from_arrays"]

#: Images are stored as unsigned bytes and converted only where they are used.
Bytes = npt.NDArray[np.uint8]
#: More classes are a mistake.
_MOST_CLASSES = 1_000_000
#: Rows that are checked at once, so that a memory-mapped file is not read as a whole.
_ROWS = 4096


class DataError(ValueError):
    """A data file, archive, download or array cannot be used; the message names it and the remedy."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images or feature vectors.

    Bytes are scaled to [−1, 1] only where they are used, as ``(x / white − 0.5) / 0.5``. Floating-point inputs are used
    without scaling. Data sets in the cache are memory-mapped: opening one takes milliseconds, and all processes on a machine
    share one copy.

    Args:
        name: The name shown in tables and reports.
        images: uint8 or float32; ``(n, height, width)`` for grey images, ``(n, channels, height, width)`` for colour,
            ``(n, features)`` for feature vectors.
        labels: Integers, ``(n,)``, from 0 to ``classes − 1``.
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
    images: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    classes: int
    white: int = 255
    transposed: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "×".join(str(n) for n in self.images.shape[1:])
        kind = "vectors" if self.images.ndim == 2 else "images"
        return f"Dataset({self.name!r}: {len(self):,} {kind} of {shape}, {self.classes} classes)"

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
        images: ``(n, height, width)``, ``(n, channels, height, width)`` or, for feature vectors, ``(n, features)``; an array
            or array-like. Images may be bytes (uint8), which are scaled to [−1, 1]. Floating-point numbers are converted to
            float32 and used without scaling.
        labels: ``(n,)`` integers from 0 to ``classes − 1``.
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
        >>> upgd.data.from_arrays("points", [[0.5, -1.0], [0.0, 2.5]], [0, 1])
        Dataset('points': 2 vectors of 2, 2 classes)
    """
    images, labels = _checked_images(images, white), _checked_labels(labels)
    if len(images) != len(labels):
        raise DataError(f"images and labels must have the same length, not {len(images):,} and {len(labels):,}")
    found = int(labels.max()) + 1
    classes = found if classes is None else classes
    if not found <= classes <= _MOST_CLASSES:
        raise DataError(
            f"classes must be from {found} (the largest label plus one) to {_MOST_CLASSES:,}, not {classes}"
        )
    return Dataset(name, _read_only(images), _read_only(labels), classes, white, transposed)


def _checked_images(images: Any, white: int) -> npt.NDArray[Any]:
    array = np.asarray(images)
    is_float = np.issubdtype(array.dtype, np.floating)
    if array.dtype != np.uint8 and not is_float:
        raise DataError(
            f"images must be unsigned bytes (uint8) from 0 to white={white}, or floating-point numbers, not {array.dtype}; "
            "convert them with .astype('uint8') or .astype('float32')"
        )
    if array.ndim not in ((2, 3, 4) if is_float else (3, 4)) or 0 in array.shape:
        vectors = "or, for floating-point numbers, (n, features) " if is_float or array.ndim == 2 else ""
        raise DataError(
            f"images must have the shape (n, height, width) or (n, channels, height, width) {vectors}without zero-sized "
            f"dimensions, not {array.shape}"
        )
    if array.ndim == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        raise DataError(f"images of shape {array.shape} have their channels last; pass images.transpose(0, 3, 1, 2)")
    if is_float:
        array = array.astype(np.float32, copy=False)
        if not all(np.isfinite(array[i : i + _ROWS]).all() for i in range(0, len(array), _ROWS)):
            raise DataError("images contain NaN or infinite values; replace them or remove their rows")
        return array
    if not 1 <= white <= 255:
        raise DataError(f"white must be from 1 to 255, the largest possible pixel value, not {white}")
    if white < 255 and array.max() > white:
        raise DataError(
            f"images contain the value {array.max()}, more than white={white}; pass white={array.max()} or more"
        )
    return array


def _checked_labels(labels: Any) -> npt.NDArray[Any]:
    array = np.asarray(labels)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"labels must be a 1-D integer array, not {array.dtype} of shape {array.shape}")
    if len(array) and not 0 <= array.min() <= array.max() < _MOST_CLASSES:
        raise DataError(f"labels must be from 0 to {_MOST_CLASSES - 1:,}, not from {array.min()} to {array.max()}")
    return array.astype(np.uint8 if not len(array) or array.max() <= 255 else np.int32, copy=False)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
