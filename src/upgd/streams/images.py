"""Classification problems over a data set: as it is, with permuted inputs, with permuted labels.

Any labelled data set serves: one that :func:`upgd.data.load` knows by name, a :class:`upgd.data.Dataset`, or a pair of
arrays ``(images, labels)``.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from upgd.data import Dataset, from_arrays, load
from upgd.noise import Purpose, uniforms
from upgd.streams.contract import (
    Chunk,
    Device,
    Loss,
    checked_count,
    checked_task_length,
    described,
    seed_tensor,
    step_tensor,
)
from upgd.streams.shuffle import permutations, sample_order

__all__ = ["ImageStream", "InputPermuted", "OutputPermuted", "Stationary", "on_device"]

#: The embedded digits are few and small: a demonstration should see many tasks in a minute.
_DIGITS_TASK_LENGTH = 1_000

#: A name for :func:`upgd.data.load`, a data set, or a pair of arrays (images, labels).
Data = str | Dataset | tuple[Any, Any]

#: Images and labels of a data set on the devices where they are needed: brought there once, whoever asks.
_tensors: WeakKeyDictionary[Dataset, dict[torch.device, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class ImageStream:
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
        source, _ = on_device(self.data, steps.device)
        first = start // self.task_length
        task = steps // self.task_length - first
        tasks = torch.arange(first, (start + length - 1) // self.task_length + 1, device=steps.device)
        index, targets = self._drawn(seeds, start, task, tasks)
        chunk = Chunk(start=start, targets=targets, source=source, index=index, task=task, white=self.data.white)
        return self._changed(chunk, seeds.to(device)[:, None], tasks)

    def _drawn(self, seeds: Tensor, start: int, task: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Which images come, and their targets, each ``(seeds, length)``; ``task`` is the row of ``tasks`` at each step."""
        _, labels = on_device(self.data, task.device)
        index = sample_order(seeds, start, len(task), self._shuffled_every(), len(labels), task.device)
        return index, labels[index]

    def _shuffled_every(self) -> int:
        """After how many steps samples may come again; within, a pass over the data set ends by itself."""
        return self.task_length

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        """The chunk as the problem makes it; ``tasks`` are those that the chunk touches."""
        return chunk


class Stationary(ImageStream):
    """A data set as it is, pass after pass, each in a new order; nothing changes.

    Args:
        data: the data set.
        task_length: the window for curves, 5 000 steps (1 000 for the embedded digits). It has no effect on the samples.
    """

    family = "stationary"
    default_task_length = 5_000

    def _shuffled_every(self) -> int:
        return len(self.data.labels)


class _Permuted(ImageStream):
    """Every task has a permutation; with ``drift``, a task takes over from the one before it gradually."""

    def __init__(self, data: Data, *, task_length: int | None = None, drift: int = 0) -> None:
        super().__init__(data, task_length=task_length)
        self.drift = checked_count("drift", drift, 0, self.task_length)

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        if not self.drift:
            return self._permuted(chunk, permutations(seeds, tasks, self._permuted_size()), chunk.task)
        own = chunk.start // self.task_length
        first = max(own - 1, 0)
        mixed = torch.arange(first, own + len(tasks), device=tasks.device)
        orders = permutations(seeds, mixed, self._permuted_size())
        return self._permuted(chunk, orders, self._tasks_of_samples(seeds, chunk) - first)

    def _tasks_of_samples(self, seeds: Tensor, chunk: Chunk) -> Tensor:
        """``(seeds, length)``: from which task each sample comes.

        At step ``j`` (from 0) of a task but the first, that is the task before with a chance of ``1 − (j + 1)/(drift + 1)``.
        """
        steps = torch.arange(chunk.start, chunk.start + chunk.length, device=seeds.device)
        task, within = steps // self.task_length, steps % self.task_length
        # A tensor divided by a tensor is rounded correctly on every device; see Chunk.
        chance = (within + 1).double() / torch.full_like(within, self.drift + 1, dtype=torch.float64)
        late = uniforms(seeds, Purpose.MIXTURE, steps, 1).squeeze(-1) >= chance
        return task - (late & (task > 0)).long()

    def _permuted_size(self) -> int:
        """How many entries a permutation has."""
        raise NotImplementedError

    def _permuted(self, chunk: Chunk, orders: Tensor, rows: Tensor) -> Chunk:
        """The chunk with ``orders``, ``(seeds, tasks, size)``, applied: at each step the row that ``rows`` names,
        ``(length,)`` for all seeds or ``(seeds, length)``."""
        raise NotImplementedError


class InputPermuted(_Permuted):
    """Every task, the first included, has its own random order of the inputs.

    Task ``k``'s permutation is a function of (seed, k), over all inputs: the pixels of a colour image move between the
    colours, too.

    Args:
        data: the data set.
        task_length: how many steps a task has, 5 000 as in the paper (1 000 for the embedded digits).
        drift: over how many steps a task takes over from the one before: at step ``j`` of them a sample is the new task's
            with a chance of ``(j + 1)/(drift + 1)``. 0, the default: at once.
    """

    family = "input-permuted"
    default_task_length = 5_000

    def _permuted_size(self) -> int:
        return math.prod(self.input_shape)

    def _permuted(self, chunk: Chunk, orders: Tensor, rows: Tensor) -> Chunk:
        if rows.ndim == 1:
            return replace(chunk, permutation=orders)
        # A chunk has one permutation for all seeds at a step, and rows that only ascend: a mixture has neither.
        pixels = chunk.pixels()
        mixed = [seen.gather(1, own[at]) for seen, own, at in zip(pixels, orders, rows, strict=True)]
        return Chunk(start=chunk.start, targets=chunk.targets, dense=chunk.scaled(torch.stack(mixed)), task=chunk.task)


class OutputPermuted(_Permuted):
    """Every task, the first included, has its own random order of the classes.

    A sample of class ``c`` has the target ``permutation[c]``, and task ``k``'s permutation is a function of (seed, k).

    Args:
        data: the data set.
        task_length: how many steps a task has, 2 500 as in the paper (1 000 for the embedded digits).
        drift: as for :class:`InputPermuted`.
    """

    family = "output-permuted"
    default_task_length = 2_500

    def _permuted_size(self) -> int:
        return self.outputs

    def _permuted(self, chunk: Chunk, orders: Tensor, rows: Tensor) -> Chunk:
        return replace(chunk, targets=orders.flatten(1).gather(1, rows * self.outputs + chunk.targets))


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


def on_device(data: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images, uint8, and labels, int64, of a data set on a device."""
    on_devices = _tensors.setdefault(data, {})
    if device not in on_devices:
        with warnings.catch_warnings():
            # The arrays are often memory maps that cannot be written to; nobody here writes.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            images, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (data.images, data.labels))
        on_devices[device] = (images.to(device), labels.to(device).long())
    return on_devices[device]
