"""Hashes of the parameters of every method after 70 steps, as stored in golden.json.

``python tests/population/golden.py`` writes the file anew. Do that only for a change that is meant to change results, and
raise the engine version with it.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upgd.methods import METHODS
from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.streams import make

FILE = Path(__file__).with_name("golden.json")
STEPS = 70
#: Processors for which the compiler orders sums as for another one: the hashes are the same.
ALIKE = {"znver5": "znver4"}
PROBLEMS = {
    "relu": (MLP((64, 20, 12, 10)), "output-permuted-digits"),
    "tanh": (nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)), "input-permuted-digits"),
}


def learners(backend: str) -> dict[str, Learner]:
    """Every method in every variant that the backend runs, by a name."""
    plain: list[dict[str, Any]] = [
        {"method": "sgd"},
        {"method": "sgdw", "weight_decay": 0.01},
        {"method": "pgd", "sigma": 0.1},
        {"method": "anti-pgd", "sigma": 0.1},
        {"method": "shrink-and-perturb", "sigma": 0.1, "weight_decay": 0.01},
        {"method": "adamw", "lr": 0.003},
        {"method": "ups-even", "lr": 1.0, "sigma": 0.001, "granularity": "feature"},
    ]
    gated = [
        {"method": method, "granularity": granularity, "scaling": scaling, "order": order, "noise": noise}
        for method, granularity, scaling, order, noise in itertools.product(
            ("upgd", "upgd-nonprotecting", "ups"),
            ("weight", "feature"),
            ("global", "local"),
            (1, 2),
            ("white", "anticorrelated"),
        )
    ]
    without_kernel = [
        *({"method": "adaupgd", "scaling": s, "order": o} for s, o in itertools.product(("global", "local"), (1, 2))),
        {"method": "sgd", "normalize": 0.99},
        {"method": "upgd", "normalize": 0.99},
        {"method": "upgd", "gated": "hidden"},
        {"method": "upgd", "gated": "output", "scaling": "local"},
    ]
    # Methods that were added later, on top of SGD and Adam.
    of_entries = (
        "momentum",
        "adam",
        "rmsprop",
        "l2-init",
        "weight-clipping",
        "s-ewc",
        "s-mas",
        "s-si",
        "s-rwalk",
    )
    of_units = ("continual-backprop", "redo", "self-normalized-resets")
    often = {
        "kappa": 0.1,
        "replacement_rate": 0.05,
        "maturity": 10.0,
        "period": 20.0,
        "tau": 0.5,
        "rejection": 0.05,
        "patience": 5.0,
    }
    newer: list[dict[str, Any]] = [
        {"method": "shrink-and-perturb-init", "sigma": 0.1, "weight_decay": 0.01},
        *(
            {"method": method, **({"optimizer": optimizer} if "optimizer" in METHODS[method].settings else {})}
            for method in of_entries
            for optimizer in (("sgd", "adam") if "optimizer" in METHODS[method].settings else ("",))
        ),
    ]
    # The compiler chooses the order of sums in its kernel, and may choose another one next time.
    without_kernel.append({"method": "obgd"})
    without_kernel += [{"method": "upgd", "profile": "authors", "scaling": scaling} for scaling in ("global", "local")]
    without_kernel += [
        {"method": method, "optimizer": optimizer} for method in of_units for optimizer in ("sgd", "adam")
    ]
    found = {}
    for own in plain + gated + newer + (without_kernel if backend == "torch" else []):
        settings: dict[str, Any] = {"lr": 0.003 if own.get("optimizer") == "adam" else 0.05}
        settings |= {name: value for name, value in often.items() if name in METHODS[own["method"]].settings}
        if own["method"] in ("upgd", "upgd-nonprotecting", "ups", "adaupgd"):
            settings |= {"beta_utility": 0.9, "sigma": 0.01}
            settings |= {} if own["method"] == "ups" else {"weight_decay": 0.01}
        for seed in (0, 1):
            name = " ".join([*(f"{n}={v}" if n != "method" else str(v) for n, v in own.items()), f"seed={seed}"])
            found[name] = Learner(**{**settings, **own, "seed": seed})
    return found


def computed(backend: str, problem: str) -> dict[str, str]:
    """The hashes now, by learner."""
    network, stream = PROBLEMS[problem]
    named = learners(backend)
    population = Population(network, list(named.values()), backend=backend)
    population.run(make(stream, task_length=30), STEPS)
    return {name: _hash(population.parameters(place)) for place, name in enumerate(named)}


def _hash(parameters: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters.values())).hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return what sums depend on: vector registers and versions of libraries determine the order of additions."""
    import llvmlite.binding
    import numba

    processor = llvmlite.binding.get_host_cpu_name()
    return {
        "processor": ALIKE.get(processor, processor),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


if __name__ == "__main__":
    values = {
        f"{backend} {problem}": computed(backend, problem) for backend in ("torch", "kernel") for problem in PROBLEMS
    }
    FILE.write_text(json.dumps({"machine": machine(), **values}, indent=1) + "\n")
