"""Differences from the authors' code other than learning rules; see docs/differences.md.

Run it: ``python examples/their_measurements.py``, or with ``--seeds 1 --steps 100`` for a quick look.
"""

import argparse

import torch
from torch import nn

import upgd
import upgd.curvature
import upgd.streams
from upgd import utility
from upgd.experiments.paper import utility_quality
from upgd.networks import MLP, reset


class TheirAvgPool2d(nn.AvgPool2d):
    """Average pooling for which HesScale has the authors' rule. Windows must not overlap."""


@upgd.curvature.layer(TheirAvgPool2d)
def their_average_pool(module, call, h, g):
    """An input contributes 1/n to its mean, so its curvature is h/n²; the authors' code has h/n."""
    size = module.kernel_size
    return h.repeat_interleave(size, -2).repeat_interleave(size, -1) / size**2


def accuracy(pool: type[nn.AvgPool2d], seed: int, steps: int) -> float:
    """Return the online accuracy of second-order UPGD with average pooling, on output-permuted digits."""
    layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), pool(2), nn.Flatten(), nn.Linear(72, 10))
    model = reset(nn.Sequential(*layers), seed)
    criterion = nn.CrossEntropyLoss()
    curvature = upgd.HesScale(model, criterion)
    generator = torch.Generator().manual_seed(seed)
    optimizer = upgd.UPGD(
        model.parameters(), lr=0.03, beta_utility=0.99, sigma=0.001, curvature=curvature, generator=generator
    )
    right = 0
    for x, y in upgd.streams.iterate(upgd.streams.make("output-permuted-digits"), seed, steps=steps):
        outputs = model(x.view(1, 1, 8, 8))
        right += (outputs.argmax() == y).item()
        optimizer.zero_grad()
        criterion(outputs, y).backward()
        optimizer.step()
    return right / steps


def correct(seed: int, steps: int, *, tasks: int, **settings: float) -> torch.Tensor:
    """Return 1 for each step of output-permuted digits at which a network learning with UPGD, or with SGD if only ``lr`` is
    given, is right, and 0 for the others; ``tasks`` is the seed of the stream."""
    model = MLP((64, 100, 50, 10), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sgd = settings.keys() == {"lr"}
    optimizer = torch.optim.SGD(model.parameters(), **settings) if sgd else None
    optimizer = optimizer or upgd.UPGD(model.parameters(), **settings, generator=generator)
    found = []
    for x, y in upgd.streams.iterate(upgd.streams.make("output-permuted-digits"), tasks, steps=steps):
        outputs = model(x.flatten(1))
        found.append((outputs.argmax() == y).item())
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
    return torch.tensor(found, dtype=torch.float64)


def mean_of_their_windows(values: torch.Tensor, length: int) -> float:
    """Return the mean of the windows that the authors' statistics have: they end with the steps 0, length, 2·length …, so
    the first one is a single step, and the steps after the last end are lost."""
    ends = range(1, len(values) + 1, length)
    return torch.stack([values[max(0, end - length) : end].mean() for end in ends]).mean().item()


def correlations(seed: int, steps: int) -> list[float]:
    """The mean rank correlation of second-order utility with the true utility, both with the weights before the update,
    and both with those after it; derivatives are from before the update."""
    model, criterion = MLP((5, 50, 1), seed=seed).double(), nn.MSELoss()
    curvature = upgd.HesScale(model, criterion)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for x, y in upgd.streams.iterate(upgd.streams.make("utility-quality-weights"), seed, steps=steps):
        optimizer.zero_grad()
        criterion(model(x.double()), y.double()).backward()
        second = {name: curvature.diagonal(p).clone() for name, p in model.named_parameters()}
        with curvature.paused():
            before = correlation(model, criterion, second, x.double(), y.double())
            optimizer.step()
            after = correlation(model, criterion, second, x.double(), y.double())
        found.append([before, after])
    return torch.tensor(found).nanmean(0).tolist()


def correlation(model, criterion, second, x, y) -> torch.Tensor:
    items = dict(model.named_parameters())
    approximate = {name: upgd.rules.utility(w.detach(), w.grad, second[name]) for name, w in items.items()}
    return utility.correlation(approximate, utility.true_weights(model, criterion, x, y))


def summary(values: list[float]) -> str:
    of_seeds = torch.tensor(values, dtype=torch.float64)
    return f"{of_seeds.mean():.4f} ± {of_seeds.std() / len(values) ** 0.5:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2_000)
    wanted = parser.parse_args()
    print("average pooling, online accuracy of second-order UPGD:")
    for name, pool in (("h/n²", nn.AvgPool2d), ("h/n", TheirAvgPool2d)):
        print(f"  {name}: {summary([accuracy(pool, seed, wanted.steps) for seed in range(wanted.seeds)])}")
    steps, seeds = 5 * wanted.steps, range(wanted.seeds)
    ours = [correct(seed, steps, tasks=seed, lr=0.03, beta_utility=0.99, sigma=0.001) for seed in seeds]
    print(f"online accuracy of UPGD minus SGD, {steps:,} steps of output-permuted digits:")
    for name, other in (("same tasks", 0), ("other tasks", 1_000)):
        sgd = [correct(seed, steps, tasks=seed + other, lr=0.01) for seed in seeds]
        print(f"  {name}: {summary([(own - one).mean().item() for own, one in zip(ours, sgd, strict=True)])}")
    print("online accuracy of UPGD in these runs:")
    print(f"  all steps: {summary([own.mean().item() for own in ours])}")
    print(f"  their windows: {summary([mean_of_their_windows(own, 1_000) for own in ours])}")
    before, after = zip(*(correlations(seed, wanted.steps) for seed in range(wanted.seeds)), strict=True)
    print("rank correlation of second-order utility with the true utility:")
    print(f"  weights before the update: {summary(before)}\n  weights after the update: {summary(after)}")
    print("the same with ReLU, all items ranked together, by ranks and by the output of argsort:")
    for granularity in ("weight", "feature"):
        study = utility_quality.run(granularity, activations=["relu"], seeds=seeds, steps=wanted.steps)
        ranks = study.means("relu", "global", "second order")
        places = study.by_argsort["relu"]["global"]["second order"].nanmean(-1)
        print(f"  {granularity}s: {summary(ranks.tolist())} and {summary(places.tolist())}")


if __name__ == "__main__":
    main()
