"""Classification of precomputed features with changing labels."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upgd.data import DataError
from upgd.streams.contract import Chunk, Device, Loss, checked_task_length, described, seed_tensor, step_tensor
from upgd.streams.shuffle import permutations, sample_order

__all__ = ["LabelPermutedFeatures"]


class LabelPermutedFeatures:
    """Precomputed features whose labels are permuted in every task.

    Label-permuted mini-ImageNet (Elsayed and Mahmood, "Addressing loss of plasticity and catastrophic forgetting in
    continual learning", 2024) is this problem with 2,048 features of a pretrained network and 100 classes. Features are
    used without scaling. Labels are permuted as in :class:`OutputPermuted`, and samples are drawn without replacement
    within a task.

    Args:
        folder: Folder with ``features.npy``, float32 ``(n, features)``, and ``labels.npy``, integers ``(n,)`` from 0.
        task_length: Number of steps per task. Default: 2,500, as in the paper.
    """

    name = "label-permuted-features"
    loss: Loss = "cross_entropy"
    default_task_length = 2_500
    __repr__ = described

    def __init__(self, folder: str | Path, *, task_length: int = default_task_length) -> None:
        self.task_length = checked_task_length(task_length)
        self._folder = Path(folder).expanduser()
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        features, labels = self._read()
        self._samples = len(labels)
        self.input_shape: tuple[int, ...] = (features.shape[1],)
        self.outputs = int(labels.max()) + 1

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        of_seeds, steps = seed_tensor(seeds), step_tensor(start, length, device)
        features, labels = self._tensors(steps.device)
        index = sample_order(of_seeds, start, length, self.task_length, self._samples, device)
        first, last = start // self.task_length, (start + length - 1) // self.task_length
        task = steps // self.task_length - first
        tasks = torch.arange(first, last + 1, device=steps.device)
        orders = permutations(of_seeds.to(steps.device)[:, None], tasks, self.outputs)
        targets = orders.flatten(1).gather(1, task * self.outputs + labels[index])
        return Chunk(start=start, targets=targets, dense=features[index], task=task)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_devices": {}}  # each process maps the files itself

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_devices:
            features, labels = self._read()
            with warnings.catch_warnings():
                # The array is a read-only memory map, and the tensor is never written to.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._on_devices[device] = (
                    torch.from_numpy(features).to(device),
                    torch.from_numpy(labels.astype(np.int64)).to(device),
                )
        return self._on_devices[device]

    def _read(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        features, labels = (_array(self._folder / name) for name in ("features.npy", "labels.npy"))
        where = self._folder / "features.npy"
        if features.dtype != np.float32 or features.ndim != 2 or 0 in features.shape:
            raise DataError(
                f"{where} must hold a float32 array of shape (n, features), not {features.dtype} of shape {features.shape}; "
                "convert it with .astype('float32')."
            )
        if not features.flags.c_contiguous:
            raise DataError(f"{where} is stored in Fortran order; save numpy.ascontiguousarray(features).")
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{self._folder / 'labels.npy'} must hold a 1-D integer array, not {labels.dtype} of shape {labels.shape}."
            )
        if len(features) != len(labels):
            raise DataError(
                f"{self._folder} has {len(features):,} features but {len(labels):,} labels; they must match."
            )
        if not 0 <= labels.min() <= labels.max() < 1_000_000:
            raise DataError(
                f"{self._folder / 'labels.npy'} must have labels from 0 to 999,999, not {labels.min()} to {labels.max()}."
            )
        if not all(np.isfinite(features[i : i + 4096]).all() for i in range(0, len(features), 4096)):
            raise DataError(f"{where} contains NaN or infinite values; replace them or remove their rows.")
        return features, labels


def _array(path: Path) -> np.ndarray[Any, Any]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; the folder must contain features.npy and labels.npy.") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not an array that can be loaded without pickle: {error}.") from None
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path} is an .npz archive; save the array alone with numpy.save.")
    return found
