"""Speed-up of a population over a plain loop: ``python -m benchmarks.population``.

All contenders of a table run interleaved in one process, so that other load on the machine affects them equally; the best
round of each counts. Times are processor times, or wall-clock times when numbers of threads are compared. Ratios are more
comparable between machines than times.
"""

import copy
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.plain_loop import PlainUPGD, seconds_per_step
from upgd.networks import MLP, ConvNet
from upgd.population import Learner, Population
from upgd.streams import InputPermuted, Stream, make

ROUNDS = 9
SECONDS = 0.2  #: approximate duration of a contender's turn
UPGD = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}


class Contender(NamedTuple):
    name: str
    seconds_per_learner_step: Callable[[], float]


def plain_loop(network: nn.Module, stream: Stream, method: str) -> Contender:
    """Return a plain loop for one learner, with its samples prepared beforehand."""
    model = copy.deepcopy(network)
    parameters = model.parameters()
    optimizer = PlainUPGD(parameters, **UPGD) if method == "upgd" else torch.optim.AdamW(parameters, lr=1e-4)
    chunk = stream.chunk([0], 0, 400)
    inputs, targets = chunk.inputs()[0], chunk.targets[0]
    probe = seconds_per_step(model, optimizer, inputs[:5], targets[:5])
    steps = max(5, min(400, int(SECONDS / probe)))
    return Contender("plain loop", lambda: seconds_per_step(model, optimizer, inputs[:steps], targets[:steps]))


def population(
    network: nn.Module, stream: Stream, method: str, backend: str, learners: int, threads: int | None = None
) -> Contender:
    """Return a population that generates its samples on the fly; wall-clock time is measured if ``threads`` is given."""
    settings = UPGD if method == "upgd" else {"lr": 1e-4}
    own = [Learner(method=method, seed=seed, **settings) for seed in range(learners)]
    population = Population(network, own, backend=backend)

    clock = time.process_time if threads is None else time.perf_counter

    def seconds(steps: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or 1)
        begin = clock()
        population.run(stream, steps, window=10**9)
        taken = clock() - begin
        torch.set_num_threads(before)
        return taken / steps / learners

    seconds(2)  # compile, or load compiled code
    turn = 5 * SECONDS if threads else SECONDS  # threads need time to start
    steps = max(3, int(turn / learners / seconds(20 if backend == "kernel" else 3)))
    name = f"{backend}, {learners} learner{'s' * (learners > 1)}"
    name += f", {threads} thread{'s' * (threads > 1)}" if threads else ""
    return Contender(name, lambda: seconds(steps))


def compare(title: str, contenders: list[Contender], bars: dict[str, float]) -> None:
    """Run the contenders interleaved, and print a table relative to the first one."""
    best = {contender.name: float("inf") for contender in contenders}
    for _ in range(ROUNDS):
        for name, seconds in contenders:
            best[name] = min(best[name], seconds())
    measure = next(iter(best.values()))
    print(f"\n{title}")
    for name, seconds in best.items():
        note = f"   (bar {bars[name]:g})" if name in bars else ""
        print(f"  {name:28} {1e6 * seconds:10.1f} µs a learner-step {measure / seconds:8.1f} ×{note}")
    sys.stdout.flush()


def noise_images(side: int, channels: int = 1) -> Stream:
    """Return a stream of noise images with 256 shades, whose pixels are permuted from time to time."""
    generator = torch.Generator().manual_seed(0)
    shape = (2000, side, side) if channels == 1 else (2000, channels, side, side)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (2000,), generator=generator, dtype=torch.uint8)
    return InputPermuted((images.numpy(), labels.numpy()), task_length=1000)


def main() -> None:
    torch.set_num_threads(1)
    print(f"Best of {ROUNDS} interleaved rounds; one thread unless noted; batch size 1.")

    network, stream = MLP((784, 300, 150, 10)), noise_images(28)
    backends = [population(network, stream, "upgd", "torch", n) for n in (1, 8, 32)]
    kernels = [population(network, stream, "upgd", "kernel", n) for n in (1, 8)]
    bars = {contender.name: 10 for contender in kernels}
    compare("UPGD, 784-300-150-10", [plain_loop(network, stream, "upgd"), *backends, *kernels], bars)

    threaded = [population(network, stream, "upgd", "kernel", 8, threads) for threads in (1, 2)]
    compare("The same in wall-clock time", threaded, {threaded[1].name: 1.8})

    contenders = [plain_loop(network, stream, "adamw"), population(network, stream, "adamw", "kernel", 8)]
    compare("AdamW, 784-300-150-10", contenders, {contenders[-1].name: 8})

    resetting = [population(network, stream, "continual-backprop", backend, 8) for backend in ("torch", "kernel")]
    compare("Continual Backprop, 784-300-150-10", resetting, {resetting[-1].name: 8})

    for title, network, stream, bar in (
        ("UPGD, toy network 16-300-150-1", MLP((16, 300, 150, 1), "identity"), make("toy-changing-inputs"), 10),
        ("UPGD, digits network 64-100-50-10", MLP((64, 100, 50, 10)), make("input-permuted-digits"), 20),
    ):
        contenders = [plain_loop(network, stream, "upgd"), population(network, stream, "upgd", "torch", 32)]
        contenders.append(population(network, stream, "upgd", "kernel", 8))
        compare(title, contenders, {contenders[-1].name: bar})

    network, stream = ConvNet(), noise_images(32, channels=3)
    contenders = [plain_loop(network, stream, "upgd")]
    contenders += [population(network, stream, "upgd", backend, 16) for backend in ("torch", "kernel")]
    compare("UPGD, ConvNet 3×32×32", contenders, {contenders[-1].name: 3})


if __name__ == "__main__":
    main()
