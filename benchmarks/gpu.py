"""Learner-steps per second on a GPU, end to end.

``python -m benchmarks.gpu [random | mnist] [both | kernel | torch] [FILE]`` prints a table and writes it to FILE as JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plain_loop import PlainUPGD
from upgd.networks import MLP, ConvNet
from upgd.population import Learner, Population
from upgd.streams import make

UPGD = {"method": "upgd", "lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}

SGD = {"method": "sgd", "lr": 0.001}
PGD = {"method": "pgd", "lr": 0.001, "sigma": 0.1}

#: Methods with kernels generated from their rules.
GENERATED = {
    "UPGD, second order": {**UPGD, "order": 2},
    "UPGD, feature-wise": {**UPGD, "granularity": "feature"},
    "UPGD, gates in the output layer": {**UPGD, "gated": "output"},
    "UPGD, normalized inputs": {**UPGD, "normalize": 0.99},
    "AdamW": {"method": "adamw", "lr": 1e-4},
    "AdaUPGD": {"method": "adaupgd", "lr": 1e-4},
    "L2 Init": {"method": "l2-init", "lr": 0.01},
    "L2 Init with Adam": {"method": "l2-init", "optimizer": "adam", "lr": 1e-4},
    "streaming EWC": {"method": "s-ewc", "lr": 0.01, "kappa": 1.0},
    "streaming SI": {"method": "s-si", "lr": 0.01, "kappa": 1.0},
    "Continual Backprop": {"method": "continual-backprop", "lr": 1e-3},
    "Continual Backprop with Adam": {"method": "continual-backprop", "optimizer": "adam", "lr": 1e-4},
    "ReDo": {"method": "redo", "lr": 1e-3},
    "Self-Normalized Resets": {"method": "self-normalized-resets", "lr": 1e-3},
}
#: Those with many numbers per weight, which take more of a GPU.
LARGE = ("AdaUPGD", "L2 Init with Adam", "streaming SI", "Continual Backprop with Adam")


def rate(network, learners: Sequence[Learner], stream, seconds: float = 0.4, backend: str = "auto") -> float:
    """Return learner-steps per second, after compilation and once the networks have started to learn."""
    population = Population(network, learners, device="cuda", backend=backend)
    population.run(stream, 300, window=100_000)
    begin = time.perf_counter()
    population.run(stream, 300, window=100_000)
    steps = int(max(300, min(20_000, 300 * seconds / (time.perf_counter() - begin))))
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        population.run(stream, steps, window=100_000)
        best = max(best, steps * len(learners) / (time.perf_counter() - begin))
    assert (population.result().diverged_at < 0).all()
    return best


def images(kind: str, outputs: int):
    """Return a stream of random images, or input-permuted MNIST if requested and the number of classes matches."""
    if kind == "mnist" and outputs == 10:
        return make("input-permuted-mnist")
    random = np.random.default_rng(0)
    pictures = (random.random((20_000, 28, 28)) * 256).astype(np.uint8)
    labels = random.integers(0, outputs, 20_000).astype(np.uint8)
    labels[:outputs] = range(outputs)
    return make("input-permuted", data=(pictures, labels))


def colour_images():
    """Return output-permuted random images of CIFAR's size."""
    random = np.random.default_rng(0)
    pictures = (random.random((5_000, 3, 32, 32)) * 256).astype(np.uint8)
    return make("output-permuted", data=(pictures, (np.arange(5_000) % 10).astype(np.uint8)))


def each(count: int, *settings: dict[str, Any]) -> list[Learner]:
    """Return some learners for each of the settings."""
    return [Learner(seed=seed, **own) for own in settings for seed in range(count)]


def upgd_learners(count: int, **more) -> list[Learner]:
    return each(count, {**UPGD, **more})


def plain_rate(network, optimizer, stream, steps: int = 300) -> float:
    """Return steps per second of a plain training loop for a single learner, which also evaluates every prediction."""
    model = network.cuda()
    chunk = stream.chunk([0], 0, steps, "cuda")
    inputs, targets = chunk.inputs()[0], chunk.targets[0]
    update = optimizer(model.parameters())
    for step in range(steps):
        if step == steps // 3:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        outputs = model(inputs[step : step + 1])
        loss = torch.nn.functional.cross_entropy(outputs, targets[step : step + 1])
        loss.item()
        (outputs.argmax(1) == targets[step : step + 1]).item()
        update.zero_grad()
        loss.backward()
        update.step()
    torch.cuda.synchronize()
    return (steps - steps // 3) / (time.perf_counter() - begin)


def plain_upgd(params):
    return PlainUPGD(params, **{name: value for name, value in UPGD.items() if name != "method"})


def on_chip(kind: str):
    """Yield the cases that the kernel runs: name, network, learners, stream."""
    paper, stream = MLP((784, 300, 150, 10)), images(kind, 10)
    for count in (1, 15, 100, 150, 512):
        yield f"UPGD, {count}", paper, upgd_learners(count), stream
    yield "UPGD, local scaling, 150", paper, upgd_learners(150, scaling="local"), stream
    yield "UPGD, anticorrelated noise, 150", paper, upgd_learners(150, noise="anticorrelated"), stream
    yield "UPGD, without noise, 150", paper, upgd_learners(150, sigma=0.0), stream
    yield "UPGD, not protecting, 150", paper, upgd_learners(150, method="upgd-nonprotecting"), stream
    yield "SGD, 150", paper, each(150, SGD), stream
    yield "PGD, 150", paper, each(150, PGD), stream
    for name, settings in GENERATED.items():
        yield f"{name}, 150", paper, each(150, settings), stream
    yield "784-300-150-47, UPGD, 150", MLP((784, 300, 150, 47)), upgd_learners(150), images(kind, 47)
    toy = [Learner(method="upgd", lr=0.001, sigma=0.001, seed=s) for s in range(150)]
    small, changing = MLP((16, 300, 150, 1), "identity"), make("toy-changing-inputs")
    yield "16-300-150-1 (toy), UPGD, 150", small, toy, changing
    yield "16-300-150-1 (toy), UPGD, second order, 150", small, [own.but(order=2) for own in toy], changing
    yield (
        "16-300-150-1 (toy), UPGD, feature-wise, 150",
        small,
        [own.but(granularity="feature") for own in toy],
        changing,
    )
    yield "UPGD, 24", paper, upgd_learners(24), stream
    local, anticorrelated = {**UPGD, "scaling": "local"}, {**UPGD, "noise": "anticorrelated"}
    mixed = each(8, UPGD, local, anticorrelated)
    yield "UPGD, local scaling, anticorrelated noise, 8 each", paper, mixed, stream
    yield "UPGD, AdamW, L2 Init, 8 each", paper, each(8, UPGD, GENERATED["AdamW"], GENERATED["L2 Init"]), stream
    many = [UPGD, local, anticorrelated, SGD, PGD, *(own for name, own in GENERATED.items() if name not in LARGE)]
    yield f"{len(many)} methods, 4 each", paper, each(4, *many), stream
    convnet, colour = ConvNet((3, 32, 32), 10), colour_images()
    yield "ConvNet, UPGD, 128", convnet, upgd_learners(128, sigma=0.001), colour
    for name in ("UPGD, second order", "UPGD, feature-wise", "AdamW", "AdaUPGD", "L2 Init"):
        yield f"ConvNet, {name}, 128", convnet, each(128, {**GENERATED[name], "lr": 1e-4}), colour


def compile_kernels(rows) -> None:
    """Compile the kernels of all cases on all cores; they are cached on disk."""

    def compile_one(row) -> None:
        _, network, learners, stream = row
        Population(network, learners[:1], device="cuda", backend="kernel").run(stream, 1, window=1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, rows))


def general(kind: str):
    """Yield cases for the general backend, which is for everything that the kernel does not run."""
    paper, stream = MLP((784, 300, 150, 10)), images(kind, 10)
    yield "UPGD, 128", paper, upgd_learners(128), stream
    yield "AdamW, 128", paper, [Learner(method="adamw", lr=1e-4, seed=s) for s in range(128)], stream
    yield "ConvNet, UPGD, 128", ConvNet((3, 32, 32), 10), upgd_learners(128, sigma=0.001), colour_images()


def main(kind: str = "random", which: str = "both", path: str | None = None) -> None:
    if not torch.cuda.is_available():
        print("Skipped: requires a GPU.")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; learner-steps/s, 784-300-150-10 unless noted")
    rates: dict[str, dict[str, int]] = {"plain": {}, "on chip": {}, "general": {}}

    earlier = {} if path is None else read(path).get("rates", {})

    def tell(part: str, name: str, speed: float) -> None:
        rates[part][name] = round(speed)
        print(f"{part:8} {name:52} {speed:12,.0f}", flush=True)
        if path is not None:  # after every row, so that an interrupted run loses nothing
            write(path, rates=earlier | {part: rows for part, rows in rates.items() if rows})

    labels = (np.arange(500) % 10).astype(np.uint8)
    colour = make("output-permuted", data=(np.zeros((500, 3, 32, 32), np.uint8), labels))
    tell("plain", "plain loop", plain_rate(MLP((784, 300, 150, 10)), plain_upgd, images(kind, 10)))
    tell("plain", "plain loop, ConvNet", plain_rate(ConvNet((3, 32, 32), 10), plain_upgd, colour))
    for part, backend, rows in (("on chip", "kernel", on_chip), ("general", "torch", general)):
        cases = list(rows(kind)) if which in ("both", backend) else []
        if part == "on chip":
            compile_kernels(cases)
        for name, network, learners, stream in cases:
            tell(part, name, rate(network, learners, stream, backend=backend))


def read(path: str) -> dict[str, Any]:
    """Read a file of results; return an empty dict if it does not exist."""
    file = Path(path)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(path: str, **parts: object) -> None:
    """Add parts to a file of results."""
    file = Path(path)
    known = read(path) | {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **parts}
    file.write_text(json.dumps(known, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("random", "mnist"), default="random", help="the images")
    parser.add_argument("which", nargs="?", choices=("both", "kernel", "torch"), default="both", help="the backends")
    parser.add_argument("path", nargs="?", metavar="FILE", help="where to write the table as JSON")
    main(**vars(parser.parse_args()))
