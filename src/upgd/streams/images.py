"""Classification problems over a data set: as it is, with permuted inputs, with permuted labels.

Any labelled data set serves: one that :func:`upgd.data.load` knows by name, a :class:`upgd.data.Dataset`, or a pair of
arrays ``(images, labels)``.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from upgd.data import Dataset, from_arrays, load
from upgd.streams.contract import Chunk, Device, Loss, checked_task_length, described, seed_tensor, step_tensor
from upgd.streams.shuffle import permutations, sample_order

__all__ = ["InputPermuted", "OutputPermuted", "Stationary"]

#: The embedded digits are few and small: a demonstration should see many tasks in a minute.
_DIGITS_TASK_LENGTH = 1_000

#: A name for :func:`upgd.data.load`, a data set, or a pair of arrays (images, labels).
Data = str | Dataset | tuple[Any, Any]

#: Images and labels of a data set on the devices where they are needed: brought there once, whoever asks.
_tensors: WeakKeyDictionary[Dataset, dict[torch.device, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class _Images:
    """Samples of a data set, drawn without replacement."""

    family: str
    default_task_length: int
    loss: Loss = "cross_entropy"
    __repr__ = described

    def __init__(self, data: Data, *, task_length: int | None = None) -> None:
        self.data = _dataset(data)
        if task_length is None:
            task_length = _DIGITS_TASK_LENGTH if self.data.name == "digits" else self.default_task_length
        self.name = f"{self.family}-{self.data.name}"
        self.input_shape: tuple[int, ...] = self.data.images.shape[1:]
        self.outputs = self.data.classes
        self.task_length = checked_task_length(task_length)

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """The samples of ``seeds`` at the steps ``start … start + length − 1``."""
        seeds, steps = seed_tensor(seeds), step_tensor(start, length, device)
        source, labels = _on_device(self.data, steps.device)
        first = start // self.task_length
        index = sample_order(seeds, start, length, self._shuffled_every(), len(labels), device)
        chunk = Chunk(
            start=start,
            targets=labels[index],
            source=source,
            index=index,
            task=steps // self.task_length - first,
            white=self.data.white,
        )
        tasks = torch.arange(first, (start + length - 1) // self.task_length + 1, device=device)
        return self._changed(chunk, seeds.to(device)[:, None], tasks)

    def _shuffled_every(self) -> int:
        """After how many steps samples may come again; within, a pass over the data set ends by itself."""
        return self.task_length

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        """The chunk as the problem makes it; ``tasks`` are those that the chunk touches."""
        raise NotImplementedError


class Stationary(_Images):
    """A data set as it is, pass after pass, each in a new order; nothing changes.

    Args:
        data: the data set.
        task_length: the window for curves, 5 000 steps (1 000 for the embedded digits). It has no effect on the samples.
    """

    family = "stationary"
    default_task_length = 5_000

    def _shuffled_every(self) -> int:
        return len(self.data.labels)

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        return chunk


class InputPermuted(_Images):
    """Every task, the first included, has its own random order of the inputs.

    Task ``k``'s permutation is a function of (seed, k), over all inputs: the pixels of a colour image move between the
    colours, too.

    Args:
        data: the data set.
        task_length: how many steps a task has, 5 000 as in the paper (1 000 for the embedded digits).
    """

    family = "input-permuted"
    default_task_length = 5_000

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        chunk.permutation = permutations(seeds, tasks, math.prod(self.input_shape))
        return chunk


class OutputPermuted(_Images):
    """Every task, the first included, has its own random order of the classes.

    A sample of class ``c`` has the target ``permutation[c]``, and task ``k``'s permutation is a function of (seed, k).

    Args:
        data: the data set.
        task_length: how many steps a task has, 2 500 as in the paper (1 000 for the embedded digits).
    """

    family = "output-permuted"
    default_task_length = 2_500

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        renamed = permutations(seeds, tasks, self.outputs)
        chunk.targets = renamed.flatten(1).gather(1, chunk.task * self.outputs + chunk.targets)
        return chunk


def _dataset(data: Data) -> Dataset:
    if isinstance(data, str):
        return load(data)
    if isinstance(data, Dataset):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(
            f"data must be the name of a data set, a Dataset, or (images, labels), not a {type(data).__name__}"
        )
    return from_arrays("arrays", *data)


def _on_device(data: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    on_devices = _tensors.setdefault(data, {})
    if device not in on_devices:
        with warnings.catch_warnings():
            # The arrays are often memory maps that cannot be written to; nobody here writes.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            images, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (data.images, data.labels))
        on_devices[device] = (images.to(device), labels.to(device).long())
    return on_devices[device]
