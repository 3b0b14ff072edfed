"""The defaults of UPGD and AdaUPGD compared with SGD and AdamW, in plain training loops with batch size 1.

``python -m benchmarks.defaults [PROCESSES]`` prints a table. It runs 288 × 20,000 steps, about an hour of processor time.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import upgd
from upgd.networks import MLP, reset
from upgd.streams import make

STEPS, SEEDS = 20_000, 3
DIGITS = MLP((64, 100, 50, 10))
TOY = MLP((16, 64, 32, 1), "identity")
#: Online accuracy for the digits, squared error for the toy problems.
PROBLEMS: dict[str, tuple[MLP, dict[str, int]]] = {
    "output-permuted-digits": (DIGITS, {"task_length": 1_000}),
    "input-permuted-digits": (DIGITS, {"task_length": 1_000}),
    "toy-changing-outputs": (TOY, {}),
    "toy-changing-inputs": (TOY, {}),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": SGD,
    "UPGD": upgd.UPGD,
    "AdamW": lambda params, lr: AdamW(params, lr, weight_decay=0.0),
    "AdaUPGD": upgd.AdaUPGD,
}


class Setting(NamedTuple):
    method: str
    lr: float
    beta: float | None


def settings() -> Iterator[Setting]:
    for plain, utility, rates in (("SGD", "UPGD", (0.01, 0.02, 0.03)), ("AdamW", "AdaUPGD", (1e-3, 2e-3, 3e-3))):
        yield from (Setting(plain, lr, None) for lr in rates)
        yield from (Setting(utility, lr, beta) for lr in rates for beta in (0.9, 0.99, 0.999))


def mean(problem: str, setting: Setting, seed: int) -> float:
    """Return the mean over all steps of the metric before each update; NaN for a diverged run."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network, options = PROBLEMS[problem]
    stream, model = make(problem, **options), reset(network, seed)
    own = {} if setting.beta is None else {"beta_utility": setting.beta}
    optimizer = OPTIMIZERS[setting.method](model.parameters(), setting.lr, **own)
    chunk, total = stream.chunk([seed], 0, STEPS), 0.0
    classes = stream.loss == "cross_entropy"
    criterion = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    for x, y in zip(chunk.inputs()[0].flatten(1), chunk.targets[0], strict=True):
        outputs = model(x[None])
        loss = criterion(outputs, y[None])
        if not loss.isfinite():
            return float("nan")
        total += float(outputs.argmax() == y) if classes else loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return total / STEPS


def main(processes: int | None) -> None:
    runs = list(itertools.product(settings(), PROBLEMS, range(SEEDS)))
    with ProcessPoolExecutor(processes) as pool:
        found = pool.map(mean, *zip(*((problem, setting, seed) for setting, problem, seed in runs), strict=True))
        means = dict(zip(runs, found, strict=True))
    print("| method | lr | β |", " | ".join(PROBLEMS), "|")
    print("|---|---|---|" + "---|" * len(PROBLEMS))
    for one in settings():
        cells = [sum(means[one, problem, seed] for seed in range(SEEDS)) / SEEDS for problem in PROBLEMS]
        beta = "" if one.beta is None else f"{one.beta:g}"
        print(f"| {one.method} | {one.lr:g} | {beta} |", " | ".join(f"{cell:.3f}" for cell in cells), "|")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else None)
