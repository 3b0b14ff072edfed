"""A million steps of input-permuted MNIST, six methods × 20 seeds, on one GPU: ``python -m benchmarks.gpu_proof FILE``.

The settings are the best reported in public sources. Writes accuracies and times to FILE as JSON; ``python -m
benchmarks.gpu_page`` updates docs/gpu.md with them.
"""

import argparse
import json
import time

from benchmarks.gpu import plain_rate, plain_upgd, write
from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.streams import make

SEEDS = 20
METHODS = {
    "SGDW": {"method": "sgdw", "lr": 1e-3, "weight_decay": 1e-3},
    "PGD": {"method": "pgd", "lr": 1e-3, "sigma": 0.05},
    "Shrink & Perturb": {"method": "shrink-and-perturb", "lr": 1e-3, "sigma": 0.05, "weight_decay": 0.01},
    "UPGD-W": {"method": "upgd", "lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01},
    "UPGD-W, not protecting": {
        "method": "upgd-nonprotecting",
        "lr": 1e-3,
        "sigma": 0.1,
        "beta_utility": 0.9,
        "weight_decay": 0.01,
    },
    "AdamW": {"method": "adamw", "lr": 1e-4, "betas": (0.0, 0.99), "weight_decay": 0.0},
}


def run(names: list[str], steps: int) -> dict:
    """Run some methods in one population; return accuracies by method, and the time."""
    learners = [Learner(seed=seed, **METHODS[name]) for name in names for seed in range(SEEDS)]
    begin = time.perf_counter()
    population = Population(MLP((784, 300, 150, 10)), learners, device="cuda")
    result = population.run(make("input-permuted-mnist"), steps)
    seconds = time.perf_counter() - begin
    overall = result.mean_accuracy
    return {
        "seconds": seconds,
        "learners": len(learners),
        "backends": sorted(set(population.backends)),
        "accuracy": {name: overall[i * SEEDS : (i + 1) * SEEDS].tolist() for i, name in enumerate(names)},
        "diverged": int((result.diverged_at >= 0).sum()),
    }


def prove(path: str, steps: int) -> None:
    plain = plain_rate(MLP((784, 300, 150, 10)), plain_upgd, make("input-permuted-mnist"), steps=900)
    runs = []
    for names in ([name for name in METHODS if name != "AdamW"], ["AdamW"]):
        runs.append(run(names, steps))
        print(json.dumps(runs[-1] | {"accuracy": means(runs[-1])}), flush=True)
        write(path, proof={"steps": steps, "plain_loop": plain, "runs": runs})


def means(one: dict) -> dict[str, float]:
    return {name: round(sum(values) / len(values), 4) for name, values in one["accuracy"].items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="FILE", help="where to write accuracies and times as JSON")
    parser.add_argument("steps", nargs="?", type=int, default=1_000_000)
    prove(**vars(parser.parse_args()))
