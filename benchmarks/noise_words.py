"""Write the raw words of the learners' noise to standard output, for test suites of random number generators::

    python -m benchmarks.noise_words index | dieharder -a -g 200
    python -m benchmarks.noise_words step  | dieharder -a -g 200
    python -m benchmarks.noise_words seed  | dieharder -a -g 200

The argument selects what consecutive words differ in: the index of the parameter (all 282,160 of a 784-300-150-10 network,
then the next step), the step, or the seed. An optional number selects another stream of this kind: the seed, or the step.
docs/noise.md shows the results.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from upgd.noise import learner_words

ENTRIES = 282_160
BLOCK = 1 << 16
PAIRS = 32


def by_index(seed: int = 0) -> Iterator[Tensor]:
    """Yield all words of step 1, then of step 2, and so on, in the order in which a learner uses them."""
    step = 0
    while step := step + 1:
        yield torch.stack(learner_words(seed, step, ENTRIES // 2), -1)


def by_step(seed: int = 0) -> Iterator[Tensor]:
    """Yield the words of one entry at many consecutive steps, then those of the next entry, and so on."""
    start = 1
    while True:
        radius, angle = learner_words(seed, torch.arange(start, start + BLOCK), PAIRS)
        yield torch.stack((radius.T, angle.T), 1)
        start += BLOCK


def by_seed(step: int = 1) -> Iterator[Tensor]:
    """Yield the words of one entry for many consecutive seeds, then those of the next entry, and so on."""
    start = 0
    while True:
        radius, angle = learner_words(torch.arange(start, start + BLOCK), step, PAIRS)
        yield torch.stack((radius.T, angle.T), 1)
        start += BLOCK


STREAMS = {"index": by_index, "step": by_step, "seed": by_seed}


def write() -> None:
    kind, *number = sys.argv[1:] or [""]
    if kind not in STREAMS or not all(text.isdigit() for text in number):
        sys.exit(f"usage: python -m benchmarks.noise_words {{{','.join(STREAMS)}}} [NUMBER] | dieharder -a -g 200")
    torch.set_num_threads(1)
    try:
        for block in STREAMS[kind](*map(int, number)):
            sys.stdout.buffer.write(block.contiguous().numpy().tobytes())
    except BrokenPipeError:
        sys.stderr.close()  # the reader has closed the pipe


if __name__ == "__main__":
    write()
