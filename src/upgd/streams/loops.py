"""Streams for people with a training loop of their own."""

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from upgd.streams.contract import Device, Stream

__all__ = ["StreamDataset", "iterate"]

#: How many steps are asked of the stream at once; which ones are at hand has no influence on what comes out.
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
    """The samples of one seed, in order, as mini-batches.

    Args:
        stream: the stream.
        seed: whose samples.
        steps: how many samples; without end if None.
        start: the first step. To go on after ``n`` samples, begin at ``n``.
        batch_size: how many successive samples a batch has; the last batch may have fewer. A batch may reach across a
            change of task unless it divides the task length.
        device: where the samples shall be.

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
    """The samples of one seed for ``torch.utils.data.DataLoader``.

    With ``batch_size`` the dataset makes the batches itself, and the loader is told not to. Then the order is that of the
    stream with any number of workers, since a loader takes one item from each worker in turn, and worker ``w`` of ``W``
    makes the batches ``w, w + W, …``::

        loader = DataLoader(StreamDataset(stream, steps=10_000, batch_size=32), batch_size=None, num_workers=2)

    Without ``batch_size`` the items are single samples, also dealt out in turn. A loader that makes batches of them gives
    every sample once, but each batch comes from one worker: with ``W`` workers it holds every ``W``-th sample.

    Args:
        stream: the stream.
        seed: whose samples.
        steps: how many samples; without end if None.
        start: the first step.
        batch_size: how many successive samples an item has; None for single samples without a batch dimension.
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
            raise TypeError("a StreamDataset without steps has no length; give it steps=")
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
    """Every batch whose number is ``shard`` modulo ``shards``."""
    batches_at_once = max(1, _READ_AHEAD // batch_size)
    for first_batch in count(0, batches_at_once):
        first = first_batch * batch_size
        length = batches_at_once * batch_size if steps is None else min(batches_at_once * batch_size, steps - first)
        if length <= 0:
            return
        chunk = stream.chunk([seed], start + first, length, device)
        inputs, targets = torch.split(chunk.inputs()[0], batch_size), torch.split(chunk.targets[0], batch_size)
        for x, y in islice(zip(inputs, targets, strict=True), (shard - first_batch) % shards, None, shards):
            # Copies, so that a batch which somebody keeps does not keep all that was read with it.
            yield x.clone(), y.clone()


def _check(stream: Stream, steps: int | None, start: int, batch_size: int | None) -> None:
    if not hasattr(stream, "chunk"):
        raise TypeError(f"stream must be what upgd.streams.make(name) gives, or one of your own, not {stream!r}")
    for name, value, least in (("steps", steps, 0), ("start", start, 0), ("batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
