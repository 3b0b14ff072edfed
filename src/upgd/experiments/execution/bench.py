"""Measure the speed of this machine for the paper's experiments."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from upgd.experiments.execution.estimate import learner_steps_per_second
from upgd.experiments.execution.work import device_named
from upgd.experiments.spec import architecture
from upgd.population import Learner, Population
from upgd.streams import Stream, make

__all__ = ["measure"]

_METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.001},
    "adamw": {"lr": 0.001},
    "upgd": {"lr": 0.001, "sigma": 0.01},
}
_LEARNERS = {"cpu": 8, "cuda": 512}


def measure(device: str = "auto", seconds: float = 1.0) -> Iterator[dict[str, Any]]:
    """Measure methods on the networks of the toy and the image problems, with synthetic images of the same size."""
    device = device_named(device)
    for network, stream in _problems():
        module = architecture.network(network, stream)
        for method, settings in _METHODS.items():
            count = _LEARNERS.get(device.partition(":")[0], 8)
            learners = [Learner(method=method, seed=seed, **settings) for seed in range(count)]
            yield {
                "network": re.sub(r", [\d,]+ parameters$", "", module.describe()),  # type: ignore[operator]
                "method": method,
                "learners": count,
                "learner_steps_per_second": learner_steps_per_second(module, stream, learners, device, seconds=seconds),
                "backend": Population(module, learners[:1], device).backends[0],
                "device": device,
            }


def _problems() -> Iterator[tuple[str, Stream]]:
    yield "300-150:identity", make("toy-changing-outputs")
    random = np.random.default_rng(0)
    for network, shape in (("300-150", (28, 28)), ("conv", (3, 32, 32))):
        images = random.integers(0, 256, (2_000, *shape), np.uint8)
        yield network, make("output-permuted", data=(images, random.integers(0, 10, 2_000, np.uint8)))
