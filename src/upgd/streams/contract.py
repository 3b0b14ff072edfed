"""The interface of streams: a function of (seed, step) that returns a :class:`Chunk`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Chunk", "Device", "Loss", "Stream", "seed_tensor"]

Device = torch.device | str
Loss = Literal["cross_entropy", "mse"]


@dataclass
class Chunk:
    """The samples of some seeds at ``length`` consecutive steps.

    A stream that computes its inputs stores them in ``dense``. A stream over a data set stores the data set and indices
    into it: step ``l`` of seed ``s`` is image ``index[s, l]`` of ``source``. With a ``permutation``, pixel ``j`` of the
    input is pixel ``permutation[s, task[l], j]`` of that image. A device can therefore gather from data that is already
    in its memory, and images stay uint8 until they are used.

    Attributes:
        start: the first step, counted from 0.
        targets: ``(seeds, length)`` int64 classes, or ``(seeds, length, outputs)`` float32.
        dense: ``(seeds, length, *input_shape)`` float32, or None.
        source: ``(images, *input_shape)`` uint8, or None; the data set itself, not a copy.
        index: ``(seeds, length)`` int64, or None.
        permutation: ``(seeds, tasks, inputs)`` int64, or None; one row per task in the chunk.
        task: ``(length,)`` int64, ascending: the row of ``permutation`` at each step, 0 for the first task in the chunk.
            Defaults to all zeros.
        white: the largest possible pixel value of ``source``.
    """

    start: int
    targets: Tensor
    dense: Tensor | None = None
    source: Tensor | None = None
    index: Tensor | None = None
    permutation: Tensor | None = None
    task: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    white: int = 255

    def __post_init__(self) -> None:
        for name in ("targets", "dense", "source", "index", "permutation", "task"):
            if not isinstance(given := getattr(self, name), Tensor | None):
                raise TypeError(f"{name} of a Chunk must be a tensor, not a {type(given).__name__}")
        inputs = {name for name in ("dense", "source", "index", "permutation") if getattr(self, name) is not None}
        if inputs not in ({"dense"}, {"source", "index"}, {"source", "index", "permutation"}):
            raise ValueError(
                "a Chunk needs either dense, or source and index with an optional permutation; "
                f"not {', '.join(sorted(inputs)) or 'none of these'}"
            )
        if self.task.numel() == 0:  # default: all steps belong to one task
            self.task = self.targets.new_zeros(self.targets.shape[1:2], dtype=torch.long)

    @property
    def length(self) -> int:
        """Number of steps in the chunk."""
        return self.targets.shape[1]

    def narrow(self, offset: int, length: int) -> "Chunk":
        """Return the ``length`` steps from ``start + offset``; tensors are shared and ``permutation`` is unchanged."""
        steps = slice(offset, offset + length)
        return replace(
            self,
            start=self.start + offset,
            targets=self.targets[:, steps],
            dense=None if self.dense is None else self.dense[:, steps],
            index=None if self.index is None else self.index[:, steps],
            task=self.task[steps],
        )

    def inputs(self) -> Tensor:
        """Return the inputs of all steps: ``(seeds, length, *input_shape)`` float32; images are scaled to [−1, 1].

        A pixel value x becomes ``2·x/white − 1``, rounded once, so all devices give bitwise equal inputs.
        """
        if self.dense is not None:
            return self.dense
        pixels = self.pixels()
        if self.permutation is not None:
            tasks = self.permutation.shape[1]
            lengths = torch.bincount(self.task, minlength=tasks).tolist()
            of_tasks = zip(torch.split(pixels, lengths, 1), self.permutation.unbind(1), strict=True)
            pixels = torch.cat([seen.gather(2, order[:, None].expand_as(seen)) for seen, order in of_tasks], 1)
        return self.scaled(pixels)

    def inputs_at(self, offset: int) -> Tensor:
        """Return the inputs at step ``start + offset``: ``(seeds, *input_shape)``. Does not synchronize with the device."""
        if self.dense is not None:
            return self.dense[:, offset]
        pixels = self.pixels(offset)
        if self.permutation is not None:
            row = self.task[offset : offset + 1]
            pixels = pixels.gather(1, self.permutation.index_select(1, row).squeeze(1))
        return self.scaled(pixels)

    def pixels(self, steps: int | slice = slice(None)) -> Tensor:
        """Return the unscaled images, flattened: ``(seeds, length, inputs)`` uint8, or ``(seeds, inputs)`` for one step."""
        assert self.source is not None
        assert self.index is not None
        return self.source.flatten(1)[self.index[:, steps]]

    def scaled(self, pixels: Tensor) -> Tensor:
        """Scale flattened pixels to [−1, 1] and restore the image shape: ``(…, *input_shape)`` float32.

        Floating-point inputs are not scaled.
        """
        assert self.source is not None
        if self.source.is_floating_point():
            return pixels.view(*pixels.shape[:-1], *self.source.shape[1:])
        # Divide by a tensor: GPUs replace division by a Python number with multiplication by its rounded reciprocal.
        white = torch.full((), self.white, dtype=torch.float32, device=pixels.device)
        scaled = pixels.float().mul_(2).sub_(self.white).div_(white)
        return scaled.view(*pixels.shape[:-1], *self.source.shape[1:])


@runtime_checkable
class Stream(Protocol):
    """A problem: samples as a pure function of (seed, step).

    Attributes:
        name: the name shown in tables.
        input_shape: the shape of one input.
        outputs: the number of network outputs.
        loss: ``"cross_entropy"`` (targets are classes) or ``"mse"`` (targets are vectors of ``outputs`` numbers).
        task_length: the number of steps per task; for stationary problems, the window length of learning curves.
    """

    @property
    def name(self) -> str: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> int: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def task_length(self) -> int: ...

    def chunk(self, seeds: Sequence[int] | Tensor, start: int, length: int, device: Device = "cpu") -> Chunk:
        """Return the samples of ``seeds`` at steps ``start … start + length − 1``."""
        ...


#: Types that convert losslessly to each required type.
_NARROWER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.int64: (torch.uint8, torch.int8, torch.int16, torch.int32),
    torch.float32: (torch.float16, torch.bfloat16),
    torch.uint8: (),
}


def checked_chunk(stream: Stream, seeds: Sequence[int], start: int, length: int, device: Device = "cpu") -> Chunk:
    """Return a chunk of the stream after validating it against :class:`Chunk`; narrower types are widened.

    Kernels do not check their indices, so every chunk passes through this function before it reaches one. The range check
    reads every integer and synchronizes with the device once, which costs little compared with creating the chunk.
    Built-in streams are checked as well.
    """
    if stream.loss not in get_args(Loss):
        raise ValueError(f"loss of {stream.name} must be 'cross_entropy' or 'mse', not {stream.loss!r}")
    chunk = stream.chunk(seeds, start, length, device)
    if not isinstance(chunk, Chunk):
        raise TypeError(f"chunk() of {stream.name} must return an upgd.streams.Chunk, not a {type(chunk).__name__}")
    if chunk.start != start:
        raise ValueError(f"start of {stream.name} must be {start}, the requested step, not {chunk.start}")
    where = torch.empty(0, device=device).device  # with an explicit device index
    tensors: dict[str, Any] = {}
    for name, (dtype, shape) in _wanted(stream, len(seeds), length).items():
        if (tensor := getattr(chunk, name)) is not None:
            tensors[name] = _checked_tensor(f"{name} of {stream.name}", tensor, dtype, shape, where)
    chunk = replace(chunk, **tensors)
    _check_ranges(chunk, stream)
    return chunk


def _wanted(stream: Stream, seeds: int, length: int) -> dict[str, tuple[torch.dtype, tuple[int | str, ...]]]:
    """Return the required type and shape of each tensor of a chunk; sizes that the stream chooses are given as names."""
    samples, shape = (seeds, length), stream.input_shape
    regression = stream.loss == "mse"
    return {
        "targets": (torch.float32, (*samples, stream.outputs)) if regression else (torch.int64, samples),
        "dense": (torch.float32, (*samples, *shape)),
        "source": (torch.uint8, ("images", *shape)),
        "index": (torch.int64, samples),
        "permutation": (torch.int64, (seeds, "tasks", math.prod(shape))),
        "task": (torch.int64, (length,)),
    }


def _checked_tensor(
    what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | str, ...], device: torch.device
) -> Tensor:
    """Validate a tensor and return it unchanged if possible, because CUDA graphs compare sources by identity."""
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        size > 0 if isinstance(wanted, str) else size == wanted for size, wanted in zip(sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{what} must have the shape ({', '.join(map(str, shape))}), not {sizes}")
    if tensor.dtype != dtype and tensor.dtype not in _NARROWER[dtype]:
        raise TypeError(f"{what} must be {dtype}, not {tensor.dtype}; convert it with .to({dtype})")
    if tensor.device != device:
        raise ValueError(f"{what} must be on {device}, the device passed to chunk(), not on {tensor.device}")
    return (tensor.detach() if tensor.requires_grad else tensor).to(dtype)


def _check_ranges(chunk: Chunk, stream: Stream) -> None:
    """Raise ValueError if a target, index, permutation or task is out of range."""
    pointers = {"targets": ("outputs", stream.outputs)} if stream.loss == "cross_entropy" else {}
    if chunk.source is not None:
        pointers["index"] = ("images", len(chunk.source))
    tensors = [getattr(chunk, name) for name in pointers]
    if chunk.permutation is not None:
        _, tasks, inputs = chunk.permutation.shape
        pointers |= {"permutation": ("inputs", inputs), "task": ("tasks in this chunk", tasks)}
        tensors += [chunk.permutation, chunk.task, torch.diff(chunk.task, prepend=chunk.task[:1])]
    if not tensors:
        return
    extremes = torch.stack([torch.stack(tensor.aminmax()) for tensor in tensors]).tolist()  # synchronizes
    for (name, (things, end)), (least, most) in zip(pointers.items(), extremes, strict=False):
        if least < 0 or most >= end:
            wrong = least if least < 0 else most
            raise ValueError(
                f"{name} of {stream.name} must be from 0 to {end - 1}, not {wrong}, because there are {end} {things}"
            )
    if chunk.permutation is not None and extremes[-1][0] < 0:
        raise ValueError(f"task of {stream.name} must be ascending, but it decreases by {-extremes[-1][0]} in a chunk")


def described(stream: Stream) -> str:
    """Return a one-line description of a stream, for ``__repr__``."""
    shape = "×".join(str(side) for side in stream.input_shape)
    return f"<{stream.name}: {shape} → {stream.outputs}, {stream.loss}, {stream.task_length:,} steps per task>"


def seed_tensor(seeds: Sequence[int] | Tensor, device: Device = "cpu") -> Tensor:
    """Return the seeds as an int64 tensor of shape ``(len(seeds),)`` on the device.

    Example:
        >>> seed_tensor(range(3))
        tensor([0, 1, 2])
    """
    tensor = torch.as_tensor(seeds)
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"seeds must be a sequence of integers, such as [0] or range(20), not {seeds!r}")
    return tensor.to(device=device, dtype=torch.long)


def step_tensor(start: int, length: int, device: Device = "cpu") -> Tensor:
    """Return the steps ``start … start + length − 1`` as an int64 tensor, after validating the range."""
    if start < 0 or length < 1:
        raise ValueError(f"start must be at least 0 and length at least 1, not {start} and {length}")
    return torch.arange(start, start + length, device=device)


def checked_count(name: str, count: int, least: int, most: int) -> int:
    """Return ``count`` if it is an integer from ``least`` to ``most``; otherwise raise an error naming the option."""
    if isinstance(count, bool) or not hasattr(count, "__index__") or not least <= count.__index__() <= most:
        raise ValueError(f"{name} must be an integer from {least:,} to {most:,}, not {count!r}")
    return count.__index__()


def checked_task_length(task_length: int) -> int:
    """Return ``task_length`` if it is a positive number of steps below 2⁶³; otherwise raise ValueError."""
    if isinstance(task_length, bool) or not hasattr(task_length, "__index__") or task_length.__index__() < 1:
        raise ValueError(f"task_length must be a positive number of steps, not {task_length!r}")
    if task_length.__index__() >= 2**63:
        raise ValueError(f"task_length must be less than 2⁶³, the range of the step counter, not {task_length!r}")
    return task_length.__index__()
