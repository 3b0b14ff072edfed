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
        alive = [bool((tally.diverged_at < 0).any()) for _, tally in self._groups]
        working = [number for number, lives in enumerate(alive) if lives]
        if self._device.type != "cuda":
            for number in working:
                backend, tally = self._groups[number]
                backend.advance(chunk, loss, tally)
            return
        # The samples may still be in the making, on the stream of whoever calls.
        torch.cuda.synchronize(self._device)
        for part in _parts(chunk) if len(working) > 1 else [chunk]:
            for number in working:
                backend, tally = self._groups[number]
                with torch.cuda.stream(self._streams[number]):
                    backend.advance(part, loss, tally)
        torch.cuda.synchronize(self._device)


def _parts(chunk: Chunk) -> list[Chunk]:
    return [chunk.narrow(begin, min(_STEPS, chunk.length - begin)) for begin in range(0, chunk.length, _STEPS)]
