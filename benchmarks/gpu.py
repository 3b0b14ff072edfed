"""Learner-steps per second on a GPU, through the public API and end to end: ``python -m benchmarks.gpu [mnist | random]``."""

import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.streams import make

UPGD = {"method": "upgd", "lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}


def rate(
    network, learners: Sequence[Learner], stream, seconds: float = 2.0, backend: str = "auto"
) -> tuple[float, str]:
    """Learner-steps per second, once everything is compiled and the networks have begun to learn."""
    population = Population(network, learners, device="cuda", backend=backend)
    population.run(stream, 300, window=10_000)
    begin = time.perf_counter()
    population.run(stream, 300, window=10_000)
    steps = int(max(300, min(4_000, 300 * seconds / (time.perf_counter() - begin))))
    best = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        population.run(stream, steps, window=10_000)
        best = max(best, steps * len(learners) / (time.perf_counter() - begin))
    assert (population.result().diverged_at < 0).all()
    return best, population.backends[0]


def images(kind: str, outputs: int):
    """Input-permuted MNIST, or random images where that is not at hand or has other classes."""
    if kind == "mnist" and outputs == 10:
        return make("input-permuted-mnist")
    random = np.random.default_rng(0)
    pictures = (random.random((20_000, 28, 28)) * 256).astype(np.uint8)
    labels = random.integers(0, outputs, 20_000).astype(np.uint8)
    labels[:outputs] = range(outputs)
    return make("input-permuted", data=(pictures, labels))


def upgd_learners(count: int, **more) -> list[Learner]:
    return [Learner(seed=seed, **{**UPGD, **more}) for seed in range(count)]


def main(kind: str = "mnist") -> None:
    paper = MLP((784, 300, 150, 10))
    stream = images(kind, 10)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; learner-steps/s")
    rows = [
        *(
            (f"784-300-150-10, UPGD, {n} learners", paper, upgd_learners(n), stream)
            for n in (1, 15, 20, 100, 128, 150, 512)
        ),
        ("local scaling, 150", paper, upgd_learners(150, scaling="local"), stream),
        ("anticorrelated, 150", paper, upgd_learners(150, noise="anticorrelated"), stream),
        ("not protecting, 150", paper, upgd_learners(150, method="upgd-nonprotecting"), stream),
        ("SGD, 150", paper, [Learner(method="sgd", lr=0.001, seed=s) for s in range(150)], stream),
        ("PGD, 150", paper, [Learner(method="pgd", lr=0.001, sigma=0.1, seed=s) for s in range(150)], stream),
        ("784-300-150-47, UPGD, 150", MLP((784, 300, 150, 47)), upgd_learners(150), images(kind, 47)),
        (
            "16-300-150-1 (toy), UPGD, 150",
            MLP((16, 300, 150, 1), "identity"),
            [Learner(method="upgd", lr=0.001, sigma=0.001, seed=s) for s in range(150)],
            make("toy-changing-inputs"),
        ),
    ]
    for name, network, learners, problem in rows:
        speed, backend = rate(network, learners, problem)
        print(f"{name:40} {speed:12,.0f}   {backend}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
