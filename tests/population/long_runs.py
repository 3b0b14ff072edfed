"""Long runs: mean online accuracy and loss of 8 seeds over 50,000 steps agree on every device.

Rounding differs between devices, and learning amplifies it: two runs that begin nearly equal come to make different mistakes.
So each seed runs in several twins whose initial weights are 0.1% apart. The twins of a seed on one device tell how far
runs differ for no reason, and this is the measure for what differs between devices.

``long_runs.json`` has the CPU's numbers, by ``python tests/population/long_runs.py --write`` (about 15 minutes on two cores).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.networks import MLP, initial_parameters
from upgd.population import Learner, Population
from upgd.population.result import Result
from upgd.streams import make

Settings = dict[str, Any]
#: By name: the online accuracy and loss, ``(seeds, twins)`` each.
Numbers = dict[str, dict[str, NDArray[np.float64]]]

REFERENCE = Path(__file__).with_name("long_runs.json")
SEEDS, TWINS, STEPS = 8, 3, 50_000
METRICS = ("accuracy", "loss")
NETWORK = MLP((64, 100, 50, 10))
#: Tasks long enough that every chunk of the stream has few of them.
STREAM = make("input-permuted-digits", task_length=5_000)

UTILITY = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.999, "weight_decay": 0.001}
ON_CHIP: dict[str, Settings] = {
    "upgd": {"method": "upgd", **UTILITY},
    "upgd, local": {"method": "upgd", "scaling": "local", **UTILITY},
    "upgd, not protecting": {"method": "upgd-nonprotecting", **UTILITY},
    "shrink & perturb": {"method": "shrink-and-perturb", "lr": 0.01, "sigma": 0.1, "weight_decay": 0.001},
    "pgd": {"method": "pgd", "lr": 0.01, "sigma": 0.05},
    "sgdw": {"method": "sgdw", "lr": 0.01, "weight_decay": 0.001},
}
GENERAL: dict[str, Settings] = {
    "adamw": {"method": "adamw", "lr": 3e-4},
    "upgd, feature-wise": {"method": "upgd", "wise": "feature", **UTILITY},
    "upgd, second order": {"method": "upgd", "order": 2, **UTILITY},
}
#: Errors that a comparison of long runs must detect.
MISTAKES: dict[str, tuple[str, Settings]] = {
    "σ doubled": ("upgd", {**ON_CHIP["upgd"], "sigma": 0.2}),
    "step 5 % too long": ("upgd", {**ON_CHIP["upgd"], "lr": 0.0105}),
    "step 5 % too short": ("sgdw", {**ON_CHIP["sgdw"], "lr": 0.0095}),
    "AdamW's step 5 % too long": ("adamw", {**GENERAL["adamw"], "lr": 3.15e-4}),
}


def learners_of(settings: Settings) -> list[Learner]:
    return [Learner(seed=seed, **settings) for seed in range(SEEDS) for _ in range(TWINS)]


def beginnings(learners: Sequence[Learner]) -> dict[str, Tensor]:
    """The initial weights, those of twins 0.1% apart."""
    stacked = initial_parameters(NETWORK, [learner.seed for learner in learners])
    nearly_one = torch.tensor([1 + 2.0**-10 * (place % TWINS) for place in range(len(learners))])
    return {name: p * nearly_one.view(-1, *[1] * (p.ndim - 1)) for name, p in stacked.items()}


def measured(cases: Mapping[str, Settings], steps: int, **where: Any) -> Numbers:
    """Run the cases' learners in one population."""
    learners = [learner for settings in cases.values() for learner in learners_of(settings)]
    population = Population(NETWORK, learners, parameters=beginnings(learners), **where)
    return numbers(population.run(STREAM, steps), list(cases))


def numbers(result: Result, names: Sequence[str]) -> Numbers:
    """Return the results of the learners of these cases."""
    found = {"accuracy": result.mean_accuracy, "loss": result.mean_loss}
    shape = (len(names), SEEDS, TWINS)
    return {name: {m: found[m].reshape(shape)[i] for m in METRICS} for i, name in enumerate(names)}


def scores(right: Numbers, found: Numbers) -> dict[tuple[str, str], float]:
    """Return the difference of the means in standard errors: Student's t with ``SEEDS·(TWINS − 1)`` degrees of freedom.

    The variance is that of ``right`` among twins of one seed. A last digit is granted to runs that do not differ at all.
    """
    apart = {}
    for name, metrics in found.items():
        for metric, values in metrics.items():
            own = right[name][metric]
            variance = own.var(axis=1, ddof=1).mean() + (1e-5 * own.mean()) ** 2
            error = np.sqrt(variance * (1 / own.size + 1 / values.size))
            apart[name, metric] = float((values.mean() - own.mean()) / error)
    return apart


def compared(right: Numbers, found: Numbers) -> str:
    """Compare ``found`` with ``right``, and return a description.

    Of 18 means that are equal in truth, one will be two standard errors off by chance, and this is no mistake. So we ask that
    three of four are within two, that none is further away than 4.5 (by chance: 1 in 150), and that the mean square is
    below 3.5 (it should be 1.1).
    """
    apart = scores(right, found)
    size = np.abs(list(apart.values()))
    lines = [
        f"{name}: "
        + ", ".join(
            f"{m} {values[m].mean():.4f} ({right[name][m].mean():.4f} on the CPU, {apart[name, m]:+.1f} s.e.)"
            for m in METRICS
        )
        for name, values in found.items()
    ]
    lines.append(
        f"{(size < 2).sum()} of {size.size} means within 2 standard errors, mean square {(size**2).mean():.2f}"
    )
    words = "\n".join(lines)
    assert np.isfinite(size).all(), words
    assert (size < 4.5).all(), words
    assert (size < 2).mean() >= 0.75, words
    assert (size**2).mean() < 3.5, words
    return words


def circumstances() -> dict[str, Any]:
    """What the numbers depend on, besides the learners."""
    problem = {"network": NETWORK.describe(), "stream": repr(STREAM)}
    return {**problem, "seeds": SEEDS, "twins": TWINS, "steps": STEPS}


def reference() -> tuple[Numbers, Numbers]:
    """Return the CPU's numbers, and those with errors."""
    known = json.loads(REFERENCE.read_text(encoding="utf-8"))
    assert known["of"] == circumstances(), f"{REFERENCE.name} is of another problem; write it again"
    for part, cases in (("methods", {**ON_CHIP, **GENERAL}), ("mistakes", {n: s for n, (_, s) in MISTAKES.items()})):
        settings = {name: case["settings"] for name, case in known[part].items()}
        assert settings == json.loads(json.dumps(cases)), f"{REFERENCE.name} is of other learners; write it again"
    return _numbers(known["methods"]), _numbers(known["mistakes"])


def _numbers(part: dict[str, dict[str, Any]]) -> Numbers:
    return {name: {metric: np.array(case[metric]) for metric in METRICS} for name, case in part.items()}


def _one(settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = measured({"it": settings}, STEPS)["it"]
    return {"settings": settings, **{m: np.round(found[m], 6).tolist() for m in METRICS}}


def write() -> None:
    """Compute the CPU's numbers."""
    cases = {("methods", name): settings for name, settings in {**ON_CHIP, **GENERAL}.items()}
    cases |= {("mistakes", name): settings for name, (_, settings) in MISTAKES.items()}
    known: dict[str, dict[str, Any]] = {"of": circumstances(), "methods": {}, "mistakes": {}}
    with ProcessPoolExecutor(2) as pool:
        for (part, name), found in zip(cases, pool.map(_one, cases.values()), strict=True):
            known[part][name] = found
            print(part, name, *(f"{metric} {np.mean(found[metric]):.4f}" for metric in METRICS), flush=True)
    REFERENCE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
