"""Groups of learners side by side: on a GPU each has a lane of its own, for by itself it might not fill the device."""

from collections.abc import Sequence

import torch

from upgd.population.backend import Backend, Loss, Tally
from upgd.streams.contract import Chunk

__all__ = ["Lanes"]

#: Steps that one group is given before it is the next one's turn; long enough to keep a GPU busy meanwhile.
_STEPS = 512


class Lanes:
    """Advances groups through a chunk: on the CPU one after the other, on a GPU on streams of their own.

    Groups that fill a GPU go first, one after the other: a cluster begins only when several multiprocessors are free at the
    same time, and beside kernels that come and go it may wait for long.

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


def _parts(chunk: Chunk) -> list[Chunk]:
    return [chunk.narrow(begin, min(_STEPS, chunk.length - begin)) for begin in range(0, chunk.length, _STEPS)]
