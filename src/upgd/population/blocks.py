"""Division of a run into blocks of steps. It bounds latency and memory, and does not affect any result."""

from collections.abc import Sequence

import torch
from torch import Tensor

from upgd.streams.contract import Chunk, Stream, checked_chunk

__all__ = ["Pace", "Supply"]


class Pace:
    """Chooses the number of steps per block: about half a second, the time that Ctrl-C has to wait."""

    SECONDS = 0.5
    STEPS = 10_000

    def __init__(self) -> None:
        self.steps = 16

    def adapt(self, steps: int, seconds: float) -> None:
        """Adapt to the time that a block took."""
        in_time = int(self.SECONDS * steps / max(seconds, 1e-9))
        self.steps = max(1, min(4 * self.steps, in_time, self.STEPS))


class Supply:
    """Provides the samples of consecutive blocks.

    Streams have overhead per chunk, such as drawing a task's permutation. Chunks are therefore as long as the memory limit
    allows, and blocks are cut from them.
    """

    BYTES = 64 << 20
    STEPS = 10_000

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._seeds = seeds
        self._device = device
        self._stream: Stream | None = None
        self._chunk: Chunk | None = None
        self._steps = 64

    def take(self, stream: Stream, step: int, length: int, end: int) -> Chunk:
        """Return ``length`` samples from ``step``, or fewer if the chunk ends before. Chunks do not go beyond ``end``."""
        chunk = self._chunk
        if chunk is None or stream is not self._stream or not chunk.start <= step < chunk.start + chunk.length:
            chunk = self._fetch(stream, step, min(self._steps, end - step))
        offset = step - chunk.start
        return chunk.narrow(offset, min(length, chunk.length - offset))

    def _fetch(self, stream: Stream, step: int, length: int) -> Chunk:
        self._chunk = None  # free its memory for the next chunk
        self._chunk = checked_chunk(stream, self._seeds, step, length, self._device)
        self._stream = stream
        per_step = sum(_bytes_per_step(t) for t in (self._chunk.targets, self._chunk.dense, self._chunk.index))
        if self._chunk.permutation is not None:  # one per task; there may be many short tasks
            per_step += self._chunk.permutation.nbytes // length
        self._steps = max(1, min(4 * self._steps, self.BYTES // per_step, self.STEPS))
        return self._chunk


def _bytes_per_step(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.element_size() * tensor[:, 0].numel()
