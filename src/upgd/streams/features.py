"""Classification of precomputed features with changing labels."""

from pathlib import Path
from typing import Any

import numpy as np

from upgd.data import DataError, Dataset, from_arrays
from upgd.streams.images import OutputPermuted

__all__ = ["LabelPermutedFeatures"]


class LabelPermutedFeatures(OutputPermuted):
    """Precomputed features whose labels are permuted in every task.

    Label-permuted mini-ImageNet (Elsayed and Mahmood, "Addressing loss of plasticity and catastrophic forgetting in
    continual learning", 2024) is this problem with 2,048 features of a pretrained network and 100 classes. It is
    :class:`OutputPermuted` on a data set of feature vectors, memory-mapped from two files.

    Args:
        folder: Folder with ``features.npy``, float32 ``(n, features)``, and ``labels.npy``, integers ``(n,)`` from 0.
        task_length: Number of steps per task. Default: 2,500, as in the paper.
        drift: As for :class:`InputPermuted`.

    Example:
        >>> stream = LabelPermutedFeatures("my-features")  # doctest: +SKIP
    """

    family = "label-permuted"

    def __init__(
        self, folder: str | Path, *, task_length: int = OutputPermuted.default_task_length, drift: int = 0
    ) -> None:
        self._folder = Path(folder).expanduser()
        super().__init__(_read(self._folder), task_length=task_length, drift=drift)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self._folder, "task_length": self.task_length, "drift": self.drift}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # each process maps the files itself


def _read(folder: Path) -> Dataset:
    features, labels = (_array(folder / name) for name in ("features.npy", "labels.npy"))
    if features.dtype != np.float32 or features.ndim != 2:
        raise DataError(
            f"{folder / 'features.npy'} must hold a float32 array of shape (n, features), not {features.dtype} of shape "
            f"{features.shape}; convert it with .astype('float32')"
        )
    if not features.flags.c_contiguous:
        raise DataError(f"{folder / 'features.npy'} is stored in Fortran order; save numpy.ascontiguousarray(features)")
    try:
        return from_arrays("features", features, labels)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error


def _array(path: Path) -> np.ndarray[Any, Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; the folder must contain features.npy and labels.npy") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not an array that can be loaded without pickle: {error}") from None
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path} is an .npz archive; save the array alone with numpy.save")
    return found
