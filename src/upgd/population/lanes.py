"""Concurrent execution of groups of learners: on a GPU, each group has its own stream, as one may not fill the device."""

import heapq
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from upgd.population.backend import Backend, Loss, Tally
from upgd.streams.contract import Chunk

__all__ = ["Lanes", "Need", "shared"]

# The driver puts streams into eight queues unless asked for more, and streams in the same queue wait for each other. It reads
# this when CUDA is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

#: Number of steps of one group before the next group's turn; enough to keep a GPU busy.
_STEPS = 512


@runtime_checkable
class Sharing(Protocol):
    """A backend that uses a limited number of clusters of multiprocessors, so that other backends can run concurrently."""

    clusters: int | None  #: the number of clusters that it may use; None for all
    alive: Tensor | None  #: which learners have not diverged, on the host; None if unknown
    room: int  #: the number of clusters available to it alone
    cost: float  #: the cost of a step of one learner in one cluster, relative to other backends
    size: int  #: the number of multiprocessors per cluster

    def prepare(self, chunk: Chunk, loss: Loss) -> None:
        """Compile what :meth:`advance` needs; called in a thread of its own."""

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None: ...


class Lanes:
    """Advances groups through a chunk: sequentially on the CPU, on separate streams on a GPU.

    Groups that fill a GPU run first: a cluster starts only when several multiprocessors are free at the same time, so it
    could wait long next to other kernels. Several such groups share the GPU's clusters so that they end at about the same
    time; their run times are measured block by block.

    Args:
        backends, tallies: one per group.
        device: the device of the groups.
    """

    def __init__(self, backends: Sequence[Backend], tallies: Sequence[Tally], device: torch.device) -> None:
        self._groups = list(zip(backends, tallies, strict=True))
        self._device = device
        self._prepared = False
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in backends]  # type: ignore[no-untyped-call]

    def advance(self, chunk: Chunk, loss: Loss) -> None:
        """Advance every group with a learner that has not diverged, and wait for all."""
        every = [tally.diverged_at for _, tally in self._groups]
        masks = torch.split((torch.cat(every) < 0).cpu(), [len(own) for own in every])
        alive = {number: count for number, own in enumerate(masks) if (count := int(own.sum()))}
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
        shares = shared([Need(alive[number], backend.cost, backend.room) for number, backend in sharing.items()])
        chunk = _contiguous(chunk)
        torch.cuda.synchronize(self._device)
        ran = []
        for share, (number, backend) in sorted(zip(shares, sharing.items(), strict=True), key=lambda s: -s[1][1].size):
            times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[number]):
                times[0].record()
                backend.clusters = share
                backend.advance(chunk, loss, self._groups[number][1])
                backend.clusters = None
                times[1].record()
            ran.append((backend, alive[number] / share, times))
        torch.cuda.synchronize(self._device)
        for backend, each, (begin, end) in ran:
            backend.cost = begin.elapsed_time(end) / chunk.length / max(1.0, each)


class Need(NamedTuple):
    """The requirements of a group."""

    learners: int  #: number of learners that have not diverged
    cost: float  #: of a learner's step in one cluster
    room: int  #: number of clusters available to the group alone


def shared(needs: Sequence[Need]) -> list[int]:
    """Return the number of clusters for each group that minimizes the total time: one each, then one more for the group that
    would take longest, as long as there is room.

    >>> shared([Need(8, 1.0, 15), Need(8, 1.0, 15), Need(8, 3.0, 15)])
    [4, 3, 8]
    """
    # In units of which one cluster of every size takes a whole number; called for every block, so it must be fast.
    whole = math.lcm(*(need.room for need in needs))
    given, taken = [1] * len(needs), sum(whole // need.room for need in needs)
    slowest = [(-need.cost * need.learners, at) for at, need in enumerate(needs)]
    heapq.heapify(slowest)
    while slowest:
        _, at = slowest[0]
        need = needs[at]
        if given[at] >= need.learners or taken + whole // need.room > whole:
            heapq.heappop(slowest)  # for good: there is never more room
            continue
        given[at] += 1
        taken += whole // need.room
        heapq.heapreplace(slowest, (-need.cost * need.learners / given[at], at))
    return given


def _contiguous(chunk: Chunk) -> Chunk:
    """Return the chunk with contiguous steps, so that not every group copies them."""
    names = ("targets", "dense", "index", "task")
    return replace(chunk, **{name: own.contiguous() for name in names if (own := getattr(chunk, name)) is not None})


def _parts(chunk: Chunk) -> list[Chunk]:
    return [chunk.narrow(begin, min(_STEPS, chunk.length - begin)) for begin in range(0, chunk.length, _STEPS)]
