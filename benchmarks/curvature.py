"""The cost of HesScale: forward and backward passes with it, relative to those without.

Interleaved rounds in one process on one thread; processor time, best round of each: `python -m benchmarks.curvature`.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from upgd.curvature import HesScale
from upgd.networks import MLP, ConvNet

LIMIT = 2.5
CASES = {
    "MLP 784-300-150-10, batch 1": (lambda: MLP((784, 300, 150, 10)), (1, 784), 50),
    "MLP 784-300-150-10, batch 32": (lambda: MLP((784, 300, 150, 10)), (32, 784), 25),
    "ConvNet 3×32×32, batch 32": (lambda: ConvNet((3, 32, 32), 10), (32, 3, 32, 32), 3),
}


def measure(
    build: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, rounds: int = 40
) -> tuple[float, float]:
    """Return the processor seconds of one forward and backward pass without and with HesScale: the best round of each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(10, shape[:1], generator=generator)
    criterion = nn.CrossEntropyLoss()
    plain, followed = build(), build()
    seen = nn.CrossEntropyLoss()
    best = [float("inf")] * 2
    with HesScale(followed, seen):
        for _ in range(rounds):
            best[0] = min(best[0], _seconds(plain, criterion, x, y, steps))
            best[1] = min(best[1], _seconds(followed, seen, x, y, steps))
    return best[0], best[1]


def _seconds(model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        model.zero_grad()
        criterion(model(x), y).backward()
    return (time.process_time() - start) / steps


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'forward + backward':32} {'without':>10} {'HesScale':>10} {'ratio':>7}   (at most {LIMIT})")
    for name, (build, shape, steps) in CASES.items():
        without, with_it = measure(build, shape, steps)
        print(f"{name:32} {without * 1e6:7.0f} µs {with_it * 1e6:7.0f} µs {with_it / without:7.2f}")


if __name__ == "__main__":
    main()
