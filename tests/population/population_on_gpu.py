"""Requirements of the kernel on a GPU; plain functions, which need only torch and numpy.

``make test-gpu`` runs all of them. The truth is the torch backend on the CPU, in float64.
"""

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import long_runs
import torch
from gpu_cases import (
    CHECKS,
    CONVOLUTIONS,
    NETWORKS,
    NOISES,
    PAPERS_CONVNET,
    Check,
    Problem,
    Run,
    Samples,
    Settings,
    assert_same_bits,
    assert_same_learner,
    bits,
    both,
    check,
    check_with_kernels,
    compared,
    of_learner,
    rule_learners,
)
from torch import Tensor

from upgd.networks import MLP
from upgd.noise import learner_normals
from upgd.population import Learner, Population, lanes, shares
from upgd.population.cuda import backend as on_chip
from upgd.population.cuda import convolutional
from upgd.population.cuda.compiler import compiled
from upgd.population.cuda.planner import fastest
from upgd.population.cuda.source import source
from upgd.population.spec import groups

STEPS = 100
#: Where noise is looked at, too: compiling takes its time.
NOISY = ("784-300-150-10", "16-300-150-1", "five layers")
#: Runs that take every path of the kernel in few steps, for compute-sanitizer: the networks, by the size of the clusters.
FEW = 8
SMALL: dict[int, Problem] = {
    1: (MLP((6, 18, 10, 2), "tanh"), Samples((6,), 2, "mse")),
    8: (MLP((33, 21, 18, 7), "leaky_relu"), Samples((33,), 7, images=True, task_length=5)),
}
#: Sizes that no other network here would get, and the noise for each: what depends on the size does not depend on the noise.
OTHER_CLUSTERS: dict[int, Settings | None] = dict(zip((2, 4, 16), NOISES, strict=True))
#: More learners than an H200 can run at once in clusters of eight: some must wait.
MANY = [Learner(method="upgd", lr=0.01, sigma=0.1, seed=seed) for seed in range(10, 22)]
_UPGD: Settings = {"method": "upgd", "sigma": 0.1, "beta_utility": 0.99}
#: Methods with generated kernels, and additional features, each in some settings.
GENERATED: dict[str, Settings] = {
    "utility": _UPGD,
    "one number": {"method": "l2-init"},
    "two numbers": {"method": "adamw", "eps": 1e-3},
    "three numbers": {"method": "adaupgd", "sigma": 0.1, "eps": 1e-3},
    "second order": {**_UPGD, "order": 2},
    "second order, local": {**_UPGD, "order": 2, "scaling": "local", "noise": "anticorrelated"},
    "features": {**_UPGD, "granularity": "feature"},
    "features, second order": {**_UPGD, "granularity": "feature", "order": 2, "scaling": "local"},
    "normalized": {**_UPGD, "normalize": 0.99},
    "normalized, gates in some layers": {**_UPGD, "normalize": 0.9, "order": 2, "gated": "hidden"},
    "gates in some layers": {**_UPGD, "gated": "output"},
    "sums": {"method": "obgd"},
    "resets": {"method": "continual-backprop", "maturity": 3, "decay_contribution": 0.9, "replacement_rate": 0.0537},
    "resets, three numbers": {"method": "redo", "optimizer": "adam", "eps": 1e-3, "tau": 0.6, "period": 5},
    "resets of silent units": {"method": "self-normalized-resets", "patience": 2, "rejection": 0.0517},
}
#: Units are not reset on chip in networks with convolutions.
WITH_CONVOLUTIONS = tuple(name for name in GENERATED if "resets" not in name)
ON_THE_PAPERS_NETWORK = ("two numbers", "three numbers", "second order", "features", "normalized")
#: Networks that begin with convolutions, the methods that each is run with, and the size of the clusters if it is given.
CONVOLUTIONAL: list[tuple[Problem, Sequence[str], int | None]] = [
    *((problem, WITH_CONVOLUTIONS[size - 1 :: 4], size) for size, problem in CONVOLUTIONS.items()),
    (PAPERS_CONVNET[True], ("utility", *ON_THE_PAPERS_NETWORK), None),
    (PAPERS_CONVNET[False], ("utility",), None),
]


def generated_learners(names: Iterable[str] = tuple(GENERATED)) -> list[Learner]:
    return [Learner(lr=lr, seed=seed, **GENERATED[name]) for name in names for seed, lr in enumerate((0.01, 0.003))]


#: The paths: the size of the clusters, and learners.
PATHS: dict[str, tuple[int, list[Learner]]] = {
    f"{'no' if noise is None else noise.get('noise', 'white')} noise, clusters of {size}": (size, rule_learners(noise))
    for size in SMALL
    for noise in NOISES
}
PATHS |= {"many learners": (8, MANY)} | {name: (8, generated_learners([name])) for name in GENERATED}


@contextmanager
def clusters_of(size: int | None) -> Iterator[None]:
    """Restrict the planner to clusters of one size."""
    modules = (on_chip, convolutional)
    before = [module.CLUSTERS for module in modules]
    for module, sizes in zip(modules, before, strict=True):
        module.CLUSTERS = sizes if size is None else (size,)
    on_chip._plans.cache_clear()
    try:
        yield
    finally:
        for module, sizes in zip(modules, before, strict=True):
            module.CLUSTERS = sizes
        on_chip._plans.cache_clear()


def kernels_to_come() -> Iterator[tuple[Problem, Sequence[Learner], int | None]]:
    """What the checks will run: a problem, learners, and the size of the clusters if it is given."""
    for name, problem in NETWORKS.items():
        for noise in NOISES if name in NOISY else (None,):
            yield problem, rule_learners(noise), None
    for size, few in PATHS.values():
        yield SMALL[size], few, size
    for size, noise in OTHER_CLUSTERS.items():
        yield NETWORKS["five layers"], rule_learners(noise), size
    yield NETWORKS["five layers"], generated_learners(), None
    yield NETWORKS["784-300-150-10"], generated_learners(ON_THE_PAPERS_NETWORK), None
    for problem, names, size in CONVOLUTIONAL:
        yield problem, generated_learners(names), size
    long_learners = [Learner(**settings) for settings in long_runs.ON_CHIP.values()]
    for size in (None, 8):
        yield (long_runs.NETWORK, long_runs.STREAM), long_learners, size


def texts(device: torch.device) -> set[str]:
    """Return the sources of the kernels."""
    found = set()
    for (network, stream), learners, size in kernels_to_come():
        indexed = stream.chunk([0], 0, 1).index is not None
        with clusters_of(size):
            for group, _ in groups(learners, [0] * len(learners)):
                why = on_chip.unsupported(network, group, device, torch.float32)
                assert why is None, why
                layers = on_chip._layers(network, group.kind.gated)
                program = on_chip._program(group, on_chip._convolutional(network))
                chosen = fastest(on_chip._plans(layers, group.kind, program, device))
                assert size in (None, chosen.cluster)
                found.add(source(chosen, stream.loss, indexed, on_chip.parts()))
    return found


@check
def kernels_compile(device: str) -> str:
    """Compile the kernels of the other checks, on many cores at once."""
    if device != "cuda":
        return "nothing to compile"
    major, minor = torch.cuda.get_device_capability()
    compile_one = partial(compiled, architecture=f"sm_{major}{minor}")
    needed = sorted(texts(torch.device("cuda", torch.cuda.current_device())))
    half = max(1, (os.cpu_count() or 1) // 2)  # the other half is for checks without kernels
    with ProcessPoolExecutor(half, multiprocessing.get_context("spawn")) as pool:
        return f"{len(list(pool.map(compile_one, needed)))} kernels"


# -------------------------------------------------------------------------------------------------------- equal results


@check_with_kernels
def same_answers_with_global_scaling(device: str) -> str:
    """The network of the paper: weights, utilities, loss, hits; global scaling, and no utility at all."""
    return _without_noise(
        "784-300-150-10", [own for own in rule_learners(None) if own.scaling != "local"], STEPS, device
    )


@check_with_kernels
def same_answers_with_local_scaling(device: str) -> str:
    """The same with local scaling."""
    return _without_noise(
        "784-300-150-10", [own for own in rule_learners(None) if own.scaling == "local"], STEPS, device
    )


@check_with_kernels
def same_answers_of_other_networks(device: str) -> str:
    """Other sizes, numbers of layers, activations and losses; all rules."""
    steps = {name: STEPS for name in NETWORKS if name != "784-300-150-10"}
    steps["784-300-150-47"] = STEPS // 5  # large networks are slow on the CPU
    return "\n".join(_without_noise(name, rule_learners(None), count, device) for name, count in steps.items())


def _without_noise(name: str, learners: Sequence[Learner], steps: int, device: str) -> str:
    return f"{name}, {steps} steps: {compared(*both(NETWORKS[name], learners, steps, device, 'kernel'))}"


@check_with_kernels
def same_answers_with_noise(device: str) -> str:
    """The same noise: white and anticorrelated, 10 steps."""
    return "\n".join(
        f"{name}, {noise}: {compared(*both(NETWORKS[name], rule_learners(noise), 10, device, 'kernel'))}"
        for name in NOISY
        for noise in NOISES[1:]
    )


def _generating(device: str) -> str:
    """Return the backend that runs all of them; the CPU kernel supports fewer."""
    return "kernel" if device == "cuda" else "torch"


@check_with_kernels
def same_answers_of_generated_rules(device: str) -> str:
    """Generated kernels: moments, second order, features, normalization, gates by layer."""
    few = generated_learners(ON_THE_PAPERS_NETWORK)
    return "\n".join(
        f"{name}, {steps} steps: {compared(*both(NETWORKS[name], learners, steps, device, _generating(device)))}"
        for name, learners, steps in (
            ("five layers", generated_learners(), 40 if device == "cuda" else 8),
            ("784-300-150-10", few, 10),
        )
    )


@check_with_kernels
def generated_rules_agree_in_every_bit(device: str) -> str:
    """Reproducible, in blocks of other lengths, alone and with others of other kinds, restored after 100 steps."""
    network, stream = NETWORKS["784-300-150-10"]
    learners = [own.but(seed=seed) for seed in range(4) for own in generated_learners(ON_THE_PAPERS_NETWORK)[::2]]
    steps, saved = (1_000, 100) if device == "cuda" else (20, 10)

    def run(which: list[Learner], *lengths: int, begin: dict[str, Tensor] | None = None) -> Population:
        population = Population(network, which, device=device, backend=_generating(device))
        if begin is not None:
            population.restore(begin)
        for length in lengths:
            population.run(stream, length, window=10_000)
        return population

    once = run(learners, steps)
    assert (once.result().diverged_at < 0).all()
    assert_same_bits(bits(once), bits(run(learners, steps)), "again")
    parted = run(learners, 1, saved - 1)
    assert_same_bits(bits(once), bits(run(learners, steps - saved, begin=parted.state())), "in blocks, restored")
    for place in range(len(ON_THE_PAPERS_NETWORK)):
        alone = run(learners[place : place + 1], steps)
        assert_same_learner(of_learner(once, place), of_learner(alone, 0), learners[place])
    return f"{len(learners)} learners of {len(ON_THE_PAPERS_NETWORK)} kinds, {steps} steps"


def few_steps(size: int, learners: Sequence[Learner], device: str) -> str:
    with clusters_of(size):
        return compared(*both(SMALL[size], learners, FEW, device, _generating(device)))


for path, (size, learners) in PATHS.items():
    CHECKS[f"few steps: {path}"] = Check(partial(few_steps, size, learners), needs_kernels=True)


@check_with_kernels
def every_size_of_cluster(device: str) -> str:
    """The planner chooses sizes by speed; all other sizes are also correct."""
    lines = []
    for size, noise in OTHER_CLUSTERS.items():
        with clusters_of(size):
            runs = both(NETWORKS["five layers"], rule_learners(noise), STEPS, device, "kernel")
        lines.append(f"clusters of {size}: {compared(*runs)}")
    return "\n".join(lines)


@check_with_kernels
def utilities_that_fade_away(device: str) -> str:
    """Local scaling, and units that have been inactive for long: the squares of their utilities underflow."""
    network, stream = NETWORKS["784-300-150-10"]
    settings = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.9, "scaling": "local"}
    learners = [Learner(method=m, seed=s, **settings) for m in ("upgd", "upgd-nonprotecting") for s in (0, 1)]
    begin = Population(network, learners, backend="torch")
    begin.run(stream, 3, window=10_000)
    state = begin.state()
    state["group.0.parameters.layers.0.bias"][:, ::2] = -100
    for name in [name for name in state if ".utility." in name]:
        state[name] *= 1e-22
    here = Population(network, learners, backend="torch")
    there = Population(network, learners, device=device, backend="kernel")
    for population in (here, there):
        population.restore(state)
        population.run(stream, 10, window=10_000)
    assert (there.result().diverged_at < 0).all(), there.result().diverged_at
    end, right = there.state(), here.state()
    moved = {n: right[n] - state[n] for n in state if ".parameters." in n}
    apart = max(float((end[n] - right[n]).norm() / moved[n].norm()) for n in moved)
    assert apart < 1e-3, apart
    return f"apart by {apart:.1e} of how far they moved"


@check_with_kernels
def noise_value_by_value(device: str) -> str:
    """One step with and without noise: the difference is lr·σ·ζ. For large seeds and late steps, too."""
    network, stream = NETWORKS["784-300-150-10"]
    seeds = [0, 1, 2, 3, 2**31, 2**32 + 5, 2**40 + 7, 2**63 - 1]
    lines = []
    for taken in (0, 999, 2**32 + 11):
        drawn = []
        for more in ({"method": "sgd"}, {"method": "pgd", "sigma": 1.0}):
            learners = [Learner(lr=1.0, seed=seed, **more) for seed in seeds]
            population = Population(network, learners, device=device, backend="kernel")
            population.restore(population.state() | _as_if_taken(taken))
            population.run(stream, 1, window=10_000)
            own = [population.parameters(i).values() for i in range(len(seeds))]
            drawn.append(torch.stack([torch.cat([p.double().cpu().flatten() for p in ps]) for ps in own]))
        found = drawn[0] - drawn[1]
        right = learner_normals(torch.tensor(seeds), taken + 1, found.shape[1], dtype=torch.float64)
        error = (found - right).abs()
        assert error.max() < 1e-4, error.max()
        assert error.mean() < 1e-6, error.mean()
        lines.append(f"step {taken + 1:,}: {found.numel():,} values, largest error {error.max():.1e}")
    return "\n".join(lines)


def _as_if_taken(steps: int) -> dict[str, Tensor]:
    """What a state says after so many steps of classification."""
    return {name: torch.tensor(n) for name, n in (("step", steps), ("window", 10_000), ("loss", 1))}


# ----------------------------------------------------------------------------------------------------- bitwise equality


@check_with_kernels
def reruns_and_blocks_agree_in_every_bit(device: str) -> str:
    """Reproducible, in blocks of other lengths, alone and with others; enough steps to detect races."""
    network, stream = NETWORKS["784-300-150-10"]
    settings = {"lr": 0.01, "sigma": 0.1, "beta_utility": 0.99, "weight_decay": 0.01}
    learners = [Learner(method="upgd", seed=seed, **settings) for seed in range(23)]
    steps = 3_000 if device == "cuda" else 100

    def run(which: list[Learner], *lengths: int) -> Population:
        population = Population(network, which, device=device, backend="kernel")
        for length in lengths:
            population.run(stream, length, window=10_000)
        return population

    once = run(learners, steps)
    assert (once.result().diverged_at < 0).all()
    assert_same_bits(bits(once), bits(run(learners, steps)), "again")
    assert_same_bits(bits(once), bits(run(learners, 1, 7, 42, steps - 50)), "in blocks")
    alone = run(learners[17:18], steps)
    assert_same_learner(of_learner(once, 17), of_learner(alone, 0), "one alone")
    return f"23 learners, {steps} steps"


@check_with_kernels
def diverged_learners_leave_their_clusters_to_others(device: str) -> str:
    """The others are scheduled anew in the next block, and compute the same bits as without them."""
    network, stream = NETWORKS["784-300-150-10"]
    count, lengths = (40, (10, 300, 50)) if device == "cuda" else (6, (4, 3))
    learners = [Learner(method="upgd", lr=1e-3 if i % 3 else 1e6, sigma=0.1, seed=i) for i in range(count)]

    def run(which: list[Learner]) -> Population:
        population = Population(network, which, device=device, backend="kernel")
        for length in lengths:
            population.run(stream, length, window=10_000)
        return population

    mixed, calm = run(learners), run([own for own in learners if own.lr < 1])
    assert ((mixed.diverged_at >= 0) == [own.lr > 1 for own in learners]).all(), mixed.diverged_at
    assert mixed.diverged_at.max() < lengths[0], mixed.diverged_at
    for number, place in enumerate(i for i in range(count) if i % 3):
        assert_same_learner(of_learner(mixed, place), of_learner(calm, number), learners[place])
    return f"{count // 3 + (count % 3 > 0)} of {count} learners diverged"


@check_with_kernels
def methods_follow_each_other_on_a_cluster(device: str) -> str:
    """Learners whose steps are divided between kernels that start at different times compute the same bits as alone."""
    network, stream = NETWORKS["784-300-150-10"]
    count, lengths = (8, (300, 41, 200)) if device == "cuda" else (2, (4, 3))
    kinds: list[Settings] = [{}, {"scaling": "local"}, {"noise": "anticorrelated"}]
    learners = [Learner(method="upgd", lr=0.01, sigma=0.1, seed=s, **own) for own in kinds for s in range(count)]
    late = 0

    def counted(*needs: Any) -> tuple[shares.Share, ...]:
        nonlocal late
        made = shares.shared(*needs)
        late += sum(share.late is not None for share in made)
        return made

    def run(which: Sequence[Learner]) -> Population:
        population = Population(network, which, device=device, backend="kernel")
        for length in lengths:
            population.run(stream, length, window=10_000)
        return population

    with patch.multiple(shares, _SAVED=0.0, _FRACTION=0.0), patch.object(lanes, "shared", counted):
        mixed = run(learners)
    assert late or device != "cuda", "no method followed another one"
    for begin in range(0, len(learners), count):
        alone = run(learners[begin : begin + count])
        for own in range(count):
            assert_same_learner(of_learner(alone, own), of_learner(mixed, begin + own), learners[begin + own])
    return f"{late} kernels started on a cluster after another one"


@check_with_kernels
def state_goes_on(device: str) -> str:
    """Saved at a 100th step and restored, bit for bit; and where the CPU stopped."""
    network, stream = NETWORKS["five layers"]
    learners = rule_learners({"sigma": 0.01})
    whole = Population(network, learners, device=device, backend="kernel")
    whole.run(stream, 100, window=10_000)
    other = Population(network, learners, device=device, backend="kernel")
    other.restore(whole.state())
    for population in (whole, other):
        population.run(stream, 57, window=10_000)
    assert_same_bits(bits(whole), bits(other), "restored")
    truth = Population(network, learners, backend="torch", dtype=torch.float64)
    truth.run(stream, 43, window=10_000)
    here = Population(network, learners, backend="torch")
    there = Population(network, learners, device=device, backend="kernel")
    for population in (here, there):
        population.restore(truth.state())
    return f"bit for bit; from the CPU's state: {compared(*(Run.of(p, stream, 40) for p in (truth, here, there)))}"


@check_with_kernels
def long_runs_on_chip(device: str) -> str:
    """Eight seeds × 50 000 steps: online accuracy and loss are the CPU's, in the mean; in clusters of any size."""
    right, _ = long_runs.reference()
    lines = []
    for size in (None, 8):
        with clusters_of(size):
            found = long_runs.measured(long_runs.ON_CHIP, long_runs.STEPS, device=device, backend="kernel")
        lines.append(f"clusters of {size or 'the chosen size'}:\n{long_runs.compared(right, found)}")
    return "\n".join(lines)
