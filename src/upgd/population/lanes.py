"""Concurrent execution of groups of learners: on a GPU, each group has its own stream, as one may not fill the device."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from upgd.population.backend import Backend, Loss, Tally
from upgd.population.shares import Need, Share, shared
from upgd.streams.contract import Chunk

__all__ = ["Lanes"]

# The driver puts streams into eight queues unless asked for more, and streams in the same queue wait for each other. It reads
# this when CUDA is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

#: Number of steps of one group before the next group's turn; enough to keep a GPU busy.
_STEPS = 512

#: Relative changes of measured costs below this are ignored.
_CHANGE = 0.01


class Block(Protocol):
    """A block of steps that has been prepared; must be kept until it is done."""

    def start(self, first: int, stop: int) -> None:
        """Start some of its clusters on the current stream."""


@runtime_checkable
class Sharing(Protocol):
    """A backend that can use some of a GPU's clusters of multiprocessors, so that other backends can run concurrently."""

    alive: Tensor | None  #: which learners have not diverged, on the host; None if unknown
    room: int  #: the number of clusters available to it alone
    cost: float  #: of a step of one learner in one cluster; at first relative to other backends, then in milliseconds
    size: int  #: the number of multiprocessors per cluster

    def prepare(self, chunk: Chunk, loss: Loss) -> None:
        """Compile what :meth:`ready` needs; called in a thread of its own."""

    def ready(self, chunk: Chunk, loss: Loss, tally: Tally, pieces: Sequence[int]) -> Block:
        """Return a block in which each cluster computes so many steps. The device must start clusters in their order."""
        ...


class Lanes:
    """Advances groups through a chunk: sequentially on the CPU, on separate streams on a GPU.

    Groups that fill a GPU run first: a cluster starts only when several multiprocessors are free at the same time, so it
    could wait long next to other kernels. Several such groups share the GPU's clusters so that they end at about the same
    time (:mod:`upgd.population.shares`); their run times are measured block by block.

    On a cluster that groups use one after another, the first kernel starts together with all others, and the next one when
    the device has room. Kernels wait for others only if these started before all late ones. Should the device start a late
    kernel first nevertheless, it leaves room for the others, because fewer late kernels wait than there are clusters.

    Args:
        backends, tallies: one per group.
        device: the device of the groups.
    """

    def __init__(self, backends: Sequence[Backend], tallies: Sequence[Tally], device: torch.device) -> None:
        self._groups = list(zip(backends, tallies, strict=True))
        self._device = device
        self._prepared = False
        self._measured = set[int]()  #: the groups whose costs are known
        self._streams: list[torch.cuda.Stream] = []
        self._late: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams, self._late = ([torch.cuda.Stream(device) for _ in backends] for _ in range(2))  # type: ignore[no-untyped-call]

    def advance(self, chunk: Chunk, loss: Loss) -> None:
        """Advance every group with a learner that has not diverged, and wait for all."""
        every = [tally.diverged_at for _, tally in self._groups]
        masks = torch.split((torch.cat(every) < 0).cpu(), [len(own) for own in every])
        alive = {number: count for number, own in enumerate(masks) if (count := int(np.count_nonzero(own.numpy())))}
        if self._device.type != "cuda":
            self._one_by_one(list(alive), chunk, loss)
            return
        greedy = [number for number in alive if self._groups[number][0].fills_device]
        modest = [number for number in alive if number not in greedy]
        sharing = {n: backend for n in greedy if isinstance(backend := self._groups[n][0], Sharing)}
        for number, backend in sharing.items():
            backend.alive = masks[number]
        if len(sharing) > 1:
            self._share(sharing, alive, chunk, loss)
            greedy = [number for number in greedy if number not in sharing]
        self._one_by_one(greedy, chunk, loss)
        torch.cuda.synchronize(self._device)  # also for the samples, which may still be being computed
        for part in _parts(chunk) if len(modest) > 1 else [chunk]:
            for number in modest:
                with torch.cuda.stream(self._streams[number]):
                    self._one_by_one([number], part, loss)
        torch.cuda.synchronize(self._device)

    def _one_by_one(self, numbers: Sequence[int], chunk: Chunk, loss: Loss) -> None:
        for number in numbers:
            backend, tally = self._groups[number]
            backend.advance(chunk, loss, tally)

    def _prepare(self, backends: Sequence[Sharing], chunk: Chunk, loss: Loss) -> None:
        """Compile all kernels at once, before the first block: a compiler takes seconds."""
        if not self._prepared:
            with ThreadPoolExecutor(len(backends)) as pool:
                list(pool.map(lambda backend: backend.prepare(chunk, loss), backends))
            self._prepared = True

    def _share(self, sharing: Mapping[int, Sharing], alive: Mapping[int, int], chunk: Chunk, loss: Loss) -> None:
        """Run groups concurrently, starting with large clusters, which need the most contiguous space."""
        self._prepare(list(sharing.values()), chunk, loss)
        needs = tuple(Need(alive[number], backend.cost, backend.room) for number, backend in sharing.items())
        shares = dict(zip(sharing, shared(needs, chunk.length, sharing.keys() <= self._measured), strict=True))
        chunk = _contiguous(chunk)
        torch.cuda.synchronize(self._device)
        started = {}
        for number in sorted(sharing, key=lambda number: -sharing[number].size):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[number]):
                block = sharing[number].ready(chunk, loss, self._groups[number][1], shares[number].pieces)
                begin.record()
                block.start(0, shares[number].prompt)
                end.record()
            started[number] = block, begin, end
        late = {number: share.late for number, share in shares.items() if share.late is not None}
        for number in sorted(late, key=lambda number: late[number]):
            block, begin, _ = started[number]
            with torch.cuda.stream(self._late[number]):
                self._late[number].wait_event(begin)
                block.start(shares[number].prompt, len(shares[number].pieces))
        torch.cuda.synchronize(self._device)
        for number, (_, begin, end) in started.items():
            self._measure(number, sharing[number], shares[number], begin.elapsed_time(end), chunk.length)

    def _measure(self, number: int, backend: Sharing, share: Share, milliseconds: float, steps: int) -> None:
        """Update the cost, unless few steps were measured or it has hardly changed: a new schedule has to be copied."""
        most = max(share.pieces[: share.prompt], default=0)
        if most >= steps and not (number in self._measured and abs(milliseconds / most / backend.cost - 1) < _CHANGE):
            backend.cost = milliseconds / most
            self._measured.add(number)


def _contiguous(chunk: Chunk) -> Chunk:
    """Return the chunk with contiguous steps, so that not every group copies them."""
    names = ("targets", "dense", "index", "task")
    return replace(chunk, **{name: own.contiguous() for name in names if (own := getattr(chunk, name)) is not None})


def _parts(chunk: Chunk) -> list[Chunk]:
    return [chunk.narrow(begin, min(_STEPS, chunk.length - begin)) for begin in range(0, chunk.length, _STEPS)]
