"""Classification problems over a data set: stationary, with permuted inputs, or with permuted labels.

Any labelled data set can be used: a name known to :func:`upgd.data.load`, a :class:`upgd.data.Dataset`, or a pair of
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

#: The embedded digits are a small data set, so short tasks let a demonstration reach many of them within a minute.
_DIGITS_TASK_LENGTH = 1_000

#: A name for :func:`upgd.data.load`, a data set, or a pair of arrays (images, labels).
Data = str | Dataset | tuple[Any, Any]

#: Images and labels of each data set on each device, copied there once.
_tensors: WeakKeyDictionary[Dataset, dict[torch.device, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


class ImageStream:
    """Base class of problems that draw samples from a data set without replacement."""

    family: str
    default_task_length: int
    loss: Loss = "cross_entropy"
    __repr__ = described

    def __init__(self, data: Data, *, task_length: int | None = None) -> None:
        self.data = _dataset(data)
        if task_length is None:
            task_length = self.usual_task_length(self.data.name)
        self.name = f"{self.family}-{self.data.name}"
        self.input_shape: tuple[int, ...] = self.data.images.shape[1:]
        self.outputs = self.data.classes
        self.task_length = checked_task_length(task_length)

    @classmethod
    def usual_task_length(cls, data: str) -> int:
        """Return the default task length for a data set."""
        return _DIGITS_TASK_LENGTH if data == "digits" else cls.default_task_length

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        seeds, steps = seed_tensor(seeds), step_tensor(start, length, device)
        source, _ = on_device(self.data, steps.device)
        first = start // self.task_length
        task = steps // self.task_length - first
        tasks = torch.arange(first, (start + length - 1) // self.task_length + 1, device=steps.device)
        index, targets = self._drawn(seeds, start, task, tasks)
        chunk = Chunk(start=start, targets=targets, source=source, index=index, task=task, white=self.data.white)
        chunk = self._changed(chunk, seeds.to(device)[:, None], tasks)
        if source.is_floating_point() and chunk.dense is None:  # kernels look up bytes only
            return Chunk(start=start, targets=chunk.targets, dense=chunk.inputs(), task=task)
        return chunk

    def _drawn(self, seeds: Tensor, start: int, task: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Return image indices and targets, each ``(seeds, length)``; ``task`` is the row of ``tasks`` at each step."""
        _, labels = on_device(self.data, task.device)
        index = sample_order(seeds, start, len(task), self._shuffled_every(), len(labels), task.device)
        return index, labels[index]

    def _shuffled_every(self) -> int:
        """Number of steps after which the samples are reshuffled, whether or not a pass over the data is complete."""
        return self.task_length

    def _changed(self, chunk: Chunk, seeds: Tensor, tasks: Tensor) -> Chunk:
        """Apply the problem's transformation to the chunk; ``tasks`` are the tasks that the chunk covers."""
        return chunk


class Stationary(ImageStream):
    """A stationary data set, reshuffled after every pass.

    Args:
        data: The data set.
        task_length: Window length of learning curves; does not affect the samples. Default: 5,000 steps (1,000 for the
            embedded digits).

    Example:
        >>> Stationary("digits")
        <stationary-digits: 8×8 → 10, cross_entropy, 1,000 steps per task>
    """

    family = "stationary"
    default_task_length = 5_000

    def _shuffled_every(self) -> int:
        return len(self.data.labels)


class _Permuted(ImageStream):
    """Base class of problems with one permutation per task; with ``drift``, consecutive tasks are blended gradually."""

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
        """Return the task that each sample belongs to, ``(seeds, length)``.

        At step ``j`` (from 0) of every task but the first, this is the previous task with probability
        ``1 − (j + 1)/(drift + 1)``.
        """
        steps = torch.arange(chunk.start, chunk.start + chunk.length, device=seeds.device)
        task, within = steps // self.task_length, steps % self.task_length
        # Dividing a tensor by a tensor is correctly rounded on every device; see Chunk.scaled.
        chance = (within + 1).double() / torch.full_like(within, self.drift + 1, dtype=torch.float64)
        late = uniforms(seeds, Purpose.MIXTURE, steps, 1).squeeze(-1) >= chance
        return task - (late & (task > 0)).long()

    def _permuted_size(self) -> int:
        """Number of entries in a permutation."""
        raise NotImplementedError

    def _permuted(self, chunk: Chunk, orders: Tensor, rows: Tensor) -> Chunk:
        """Apply ``orders``, ``(seeds, tasks, size)``, to the chunk. ``rows`` selects the permutation at each step:
        ``(length,)`` for all seeds or ``(seeds, length)``."""
        raise NotImplementedError


class InputPermuted(_Permuted):
    """Every task, including the first, applies a random permutation to the inputs.

    The permutation of task ``k`` is a function of (seed, k). It permutes all inputs, so pixels of colour images also move
    between channels.

    Args:
        data: The data set.
        task_length: Number of steps per task. Default: 5,000, as in the paper (1,000 for the embedded digits).
        drift: Number of steps over which a task replaces the previous one. At step ``j`` of them, a sample belongs to the
            new task with probability ``(j + 1)/(drift + 1)``. Default: 0, an abrupt change.

    Example:
        >>> InputPermuted("digits", task_length=500)
        <input-permuted-digits: 8×8 → 10, cross_entropy, 500 steps per task>
    """

    family = "input-permuted"
    default_task_length = 5_000

    def _permuted_size(self) -> int:
        return math.prod(self.input_shape)

    def _permuted(self, chunk: Chunk, orders: Tensor, rows: Tensor) -> Chunk:
        if rows.ndim == 1:
            return replace(chunk, permutation=orders)
        # A Chunk has one permutation per step for all seeds, with ascending rows. A mixture of tasks fits neither.
        pixels = chunk.pixels()
        mixed = [seen.gather(1, own[at]) for seen, own, at in zip(pixels, orders, rows, strict=True)]
        return Chunk(start=chunk.start, targets=chunk.targets, dense=chunk.scaled(torch.stack(mixed)), task=chunk.task)


class OutputPermuted(_Permuted):
    """Every task, including the first, applies a random permutation to the classes.

    A sample of class ``c`` has the target ``permutation[c]``. The permutation of task ``k`` is a function of (seed, k).

    Args:
        data: The data set.
        task_length: Number of steps per task. Default: 2,500, as in the paper (1,000 for the embedded digits).
        drift: See :class:`InputPermuted`.

    Example:
        >>> OutputPermuted("digits", task_length=500)
        <output-permuted-digits: 8×8 → 10, cross_entropy, 500 steps per task>
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
    """Return the images (uint8) and labels (int64) of a data set on a device."""
    on_devices = _tensors.setdefault(data, {})
    if device not in on_devices:
        with warnings.catch_warnings():
            # The arrays are often read-only memory maps, and the tensors are never written to.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            images, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (data.images, data.labels))
        on_devices[device] = (images.to(device), labels.to(device).long())
    return on_devices[device]
