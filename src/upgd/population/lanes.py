"""Groups of learners side by side: on a GPU each has a lane of its own, for by itself it might not fill the device."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from upgd.population.backend import Backend, Loss, Tally
from upgd.streams.contract import Chunk

__all__ = ["Lanes", "Need", "shared"]

#: Steps that one group is given before it is the next one's turn; long enough to keep a GPU busy meanwhile.
_STEPS = 512


@runtime_checkable
class Sharing(Protocol):
    """A backend that takes a number of clusters of multiprocessors and no more, so that others have room beside it."""

    clusters: int | None  #: how many it may take; None: all
    room: int  #: how many there are, if it is alone
    cost: float  #: of a step of one learner in one cluster, next to that of other backends
    size: int  #: multiprocessors of a cluster
    learners: int

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None: ...


class Lanes:
    """Advances groups through a chunk: on the CPU one after the other, on a GPU on streams of their own.

    Groups that fill a GPU go first: a cluster begins only when several multiprocessors are free at the same time, and beside
    kernels that come and go it may wait for long. Several of them share the GPU's clusters, so that all end at about
    the same time; how long each takes is measured, block by block.

    Args:
        backends, tallies: of each group.
        device: where they are.
    """

    def __init__(self, backends: Sequence[Backend], tallies: Sequence[Tally], device: torch.device) -> None:
        self._groups = list(zip(backends, tallies, strict=True))
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in backends]  # type: ignore[no-untyped-call]

    def advance(self, chunk: Chunk, loss: Loss) -> None:
        """Take every group that has a learner alive through the chunk, and wait for all."""
        alive = [number for number, (_, tally) in enumerate(self._groups) if bool((tally.diverged_at < 0).any())]
        if self._device.type != "cuda":
            self._one_by_one(alive, chunk, loss)
            return
        greedy = [number for number in alive if self._groups[number][0].fills_device]
        modest = [number for number in alive if number not in greedy]
        sharing = {n: backend for n in greedy if isinstance(backend := self._groups[n][0], Sharing)}
        if len(sharing) > 1:
            self._share(sharing, chunk, loss)
            greedy = [number for number in greedy if number not in sharing]
        self._one_by_one(greedy, chunk, loss)
        torch.cuda.synchronize(self._device)  # for the samples, too, which may have been in the making until now
        for part in _parts(chunk) if len(modest) > 1 else [chunk]:
            for number in modest:
                with torch.cuda.stream(self._streams[number]):
                    self._one_by_one([number], part, loss)
        torch.cuda.synchronize(self._device)

    def _one_by_one(self, numbers: Sequence[int], chunk: Chunk, loss: Loss) -> None:
        for number in numbers:
            backend, tally = self._groups[number]
            backend.advance(chunk, loss, tally)

    def _share(self, sharing: Mapping[int, Sharing], chunk: Chunk, loss: Loss) -> None:
        """Side by side; large clusters are placed first, where they find room."""
        shares = shared([Need(backend.learners, backend.cost, backend.room) for backend in sharing.values()])
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
            ran.append((backend, share, times))
        torch.cuda.synchronize(self._device)
        for backend, share, (begin, end) in ran:
            backend.cost = begin.elapsed_time(end) / chunk.length / max(1.0, backend.learners / share)


class Need(NamedTuple):
    """What a group asks of the device."""

    learners: int
    cost: float  #: of a learner's step in one cluster
    room: int  #: clusters that the device has for the group, if it is alone


def shared(needs: Sequence[Need]) -> list[int]:
    """How many clusters each group gets, so that the last one ends early: one each, and then always one more for the group
    that would take longest, as long as there is room.

    >>> shared([Need(8, 1.0, 15), Need(8, 1.0, 15), Need(8, 3.0, 15)])
    [4, 3, 8]
    """
    given = [1] * len(needs)

    def takes(at: int) -> float:
        return needs[at].cost * max(1.0, needs[at].learners / given[at])

    while True:
        taken = sum(Fraction(count, need.room) for count, need in zip(given, needs, strict=True))
        waiting = [
            at for at, need in enumerate(needs) if given[at] < need.learners and taken + Fraction(1, need.room) <= 1
        ]
        if not waiting:
            return given
        given[max(waiting, key=takes)] += 1


def _parts(chunk: Chunk) -> list[Chunk]:
    return [chunk.narrow(begin, min(_STEPS, chunk.length - begin)) for begin in range(0, chunk.length, _STEPS)]
