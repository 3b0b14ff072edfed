"""The cost of streams relative to learning: at most 2% for indices and permutations.

128 seeds run one task of each problem. The time of ``chunk``, per learner and step, is divided by the time that a population
needs to learn (UPGD on the available device; on a CPU, a small population for a few steps). Random bytes of the right shapes
replace the data sets. Interleaved rounds in one process, best of each: ``python -m benchmarks.streams``.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.timing import interleaved
from upgd.data import Dataset, from_arrays
from upgd.networks import MLP, ConvNet
from upgd.population import Learner, Population
from upgd.streams import Stream, make
from upgd.streams.shuffle import permutations, sample_order

SEEDS = 128
LIMIT = 0.02


def stand_in(name: str, size: int, shape: tuple[int, ...], classes: int) -> Dataset:
    drawn = np.random.default_rng(0)
    return from_arrays(name, drawn.integers(0, 256, (size, *shape), np.uint8), np.arange(size) % classes)


def cases() -> list[tuple[Stream, nn.Module]]:
    mnist = stand_in("mnist", 60_000, (28, 28), 10)
    emnist = stand_in("emnist", 112_800, (28, 28), 47)
    cifar10 = stand_in("cifar10", 50_000, (3, 32, 32), 10)
    return [
        (make("stationary", data=mnist), MLP((784, 300, 150, 10))),
        (make("input-permuted", data=mnist), MLP((784, 300, 150, 10))),
        (make("output-permuted", data=emnist), MLP((784, 300, 150, 47))),
        (make("output-permuted", data=cifar10), ConvNet()),
        (make("toy-changing-inputs"), MLP((16, 300, 150, 1), "identity")),
    ]


def finished(device: str, job: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs the job and waits for the device."""

    def run() -> None:
        job()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def measure(stream: Stream, network: nn.Module, device: str, learners: int, steps: int) -> tuple[float, float]:
    """Return seconds per learner-step for the stream and for the population that learns from it."""
    specs = [Learner(method="upgd", lr=0.01, sigma=0.01, seed=seed) for seed in range(learners)]
    population = Population(network, specs, device=device)
    jobs = {
        "stream": finished(device, lambda: stream.chunk(range(SEEDS), 0, stream.task_length, device)),
        "learn": finished(device, lambda: population.run(stream, steps=steps)),
    }
    best = interleaved(jobs, rounds=5)
    return best["stream"] / (SEEDS * stream.task_length), best["learn"] / (learners * steps)


def shuffle_ratio(device: str, size: int = 60_000, wanted: int = 5_000) -> float:
    """Return the time to sort random keys of all samples, relative to computing the order of the wanted samples only."""
    seeds, task = torch.arange(16), torch.zeros((), dtype=torch.long)
    jobs = {
        "sorted": finished(device, lambda: permutations(seeds.to(device), task, size)[:, :wanted]),
        "asked": finished(device, lambda: sample_order(seeds, 0, wanted, wanted, size, device)),
    }
    best = interleaved(jobs, rounds=5)
    return best["sorted"] / best["asked"]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    learners, steps = (SEEDS, 1_000) if device == "cuda" else (8, 25)
    print(f"{device}, {SEEDS} seeds, times per learner-step; the bar is {LIMIT:.0%}\n")
    print("| stream | chunk | learning | share |\n|---|---|---|---|")
    for stream, network in cases():
        chunk, learning = measure(stream, network, device, learners, steps)
        print(
            f"| {stream.name} | {chunk * 1e6:.3f} µs | {learning * 1e6:.2f} µs | {chunk / learning:.2%} |", flush=True
        )
    print(
        f"\n5,000 of 60,000 samples: sorting all takes {shuffle_ratio(device):.1f} times as long as evaluating these."
    )


if __name__ == "__main__":
    main()
