"""Adapters from streams to custom training loops."""

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from upgd.streams.contract import Device, Stream

__all__ = ["StreamDataset", "iterate"]

#: Number of steps requested from the stream at once; it does not affect the samples.
_READ_AHEAD = 512


def iterate(
    stream: Stream,
    seed: int = 0,
    *,
    steps: int | None = None,
    start: int = 0,
    batch_size: int = 1,
    device: Device = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the samples of one seed, in order, in mini-batches.

    Args:
        stream: The stream.
        seed: The seed of the stream.
        steps: Number of samples. Default: None, without end.
        start: The first step. To continue after ``n`` samples, pass ``n``. Default: 0.
        batch_size: Number of consecutive samples per batch; the last batch may be smaller. A batch may span a task change
            unless ``batch_size`` divides the task length. Default: 1.
        device: The device of the returned tensors.

    Yields:
        Inputs ``(batch, *input_shape)`` float32 and targets: ``(batch,)`` int64 classes or ``(batch, outputs)`` float32.

    Example:
        >>> import upgd.streams
        >>> stream = upgd.streams.make("input-permuted-digits")
        >>> for x, y in upgd.streams.iterate(stream, seed=0, steps=2):
        ...     print(tuple(x.shape), tuple(y.shape))  # loss = criterion(model(x), y), and so on
        (1, 8, 8) (1,)
        (1, 8, 8) (1,)
    """
    _check(stream, steps, start, batch_size)
    return _batches(stream, seed, steps, start, batch_size, device)


class StreamDataset(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of one seed as a dataset for ``torch.utils.data.DataLoader``.

    With ``batch_size``, the dataset yields batches, and the loader must be created with ``batch_size=None``. Worker ``w``
    of ``W`` produces the batches ``w, w + W, …``, and the loader takes one item from each worker in turn, so the batches
    come in stream order with any number of workers::

        loader = DataLoader(StreamDataset(stream, steps=10_000, batch_size=32), batch_size=None, num_workers=2)

    Without ``batch_size``, the items are single samples, distributed over the workers in the same way. If the loader
    batches them, it still yields every sample once, but each batch comes from one worker: with ``W`` workers it holds
    every ``W``-th sample.

    Args:
        stream: The stream.
        seed: The seed of the stream.
        steps: Number of samples. Default: None, without end.
        start: The first step. Default: 0.
        batch_size: Number of consecutive samples per item, or None for single samples without a batch dimension.
    """

    def __init__(
        self, stream: Stream, seed: int = 0, *, steps: int | None = None, start: int = 0, batch_size: int | None = None
    ) -> None:
        _check(stream, steps, start, batch_size)
        self.stream, self.seed, self.steps, self.start, self.batch_size = stream, seed, steps, start, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        shard, shards = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = _batches(self.stream, self.seed, self.steps, self.start, self.batch_size or 1, "cpu", shard, shards)
        return batches if self.batch_size else ((x[0], y[0]) for x, y in batches)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("a StreamDataset without steps has no length; pass steps=")
        return -(-self.steps // (self.batch_size or 1))


def _batches(
    stream: Stream,
    seed: int,
    steps: int | None,
    start: int,
    batch_size: int,
    device: Device,
    shard: int = 0,
    shards: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the batches whose index is ``shard`` modulo ``shards``."""
    batches_at_once = max(1, _READ_AHEAD // batch_size)
    for first_batch in count(0, batches_at_once):
        first = first_batch * batch_size
        length = batches_at_once * batch_size if steps is None else min(batches_at_once * batch_size, steps - first)
        if length <= 0:
            return
        chunk = stream.chunk([seed], start + first, length, device)
        inputs, targets = torch.split(chunk.inputs()[0], batch_size), torch.split(chunk.targets[0], batch_size)
        for x, y in islice(zip(inputs, targets, strict=True), (shard - first_batch) % shards, None, shards):
            # Clone, so that a batch kept by the caller does not keep the whole chunk in memory.
            yield x.clone(), y.clone()


def _check(stream: Stream, steps: int | None, start: int, batch_size: int | None) -> None:
    if not hasattr(stream, "chunk"):
        raise TypeError(f"stream must be a Stream, such as the result of upgd.streams.make(name), not {stream!r}")
    for name, value, least in (("steps", steps, 0), ("start", start, 0), ("batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
