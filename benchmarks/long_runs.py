"""Compare long runs of every method on a GPU with the same runs on a CPU.

Rounding differs between devices, and learning amplifies it, so that after some thousand steps only statistics can be
compared. Both devices train the same learners (method, settings, seed) on the same samples with the same noise:

    python -m benchmarks.long_runs compute --device cpu  --output cpu.csv  --steps 20000
    python -m benchmarks.long_runs compute --device cuda --output gpu.csv  --steps 20000
    python -m benchmarks.long_runs compare cpu.csv gpu.csv

`compute` needs MNIST (`upgd data fetch mnist`, or the folder UPGD_DATA), or `--data digits`, which is part of the package.
It writes the online accuracy and loss of every seed and window. Variants that are already in the file are skipped, so an
interrupted command continues where it stopped. On a CPU, numba makes the variants at least ten times faster. Methods
that reset units take fewer steps.

`compare` prints the difference of the means for every variant, and exits with status 1 if a variant differs.
"""

import argparse
import csv
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from benchmarks.gpu import compile_kernels
from upgd.data import load
from upgd.networks import MLP, ConvNet
from upgd.population import Learner, Population
from upgd.streams import Stream, make

Settings = dict[str, Any]
FIELDS = ["name", "problem", "network", "settings", "device", "backend", "seed", "end", "accuracy", "loss"]
METRICS = ("accuracy", "loss")

_UPGD: Settings = {"method": "upgd", "lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}
_ADAM: Settings = {"lr": 1e-4, "betas": (0.0, 0.99)}
#: Methods that reset units.
_RESETS: dict[str, Settings] = {
    "Continual Backprop": {"method": "continual-backprop", "replacement_rate": 3e-4, "lr": 0.01},
    "Continual Backprop with Adam": {
        "method": "continual-backprop",
        "replacement_rate": 3e-4,
        "optimizer": "adam",
        **_ADAM,
    },
    "ReDo": {"method": "redo", "lr": 0.01},
    "Self-Normalized Resets": {"method": "self-normalized-resets", "lr": 0.01},
}
#: Variants on an input-permuted problem with the network 784-300-150-10. Settings are such that every part of a rule matters.
DENSE: dict[str, Settings] = {
    "UPGD": _UPGD,
    "UPGD, local scaling": {**_UPGD, "scaling": "local"},
    "UPGD, anticorrelated noise": {**_UPGD, "noise": "anticorrelated"},
    "UPGD, not protecting": {**_UPGD, "method": "upgd-nonprotecting"},
    "UPGD, second order": {**_UPGD, "order": 2},
    "UPGD, second order, local scaling": {**_UPGD, "order": 2, "scaling": "local"},
    "UPGD, feature-wise": {**_UPGD, "granularity": "feature"},
    "UPGD, feature-wise, second order, local scaling": {
        **_UPGD,
        "granularity": "feature",
        "order": 2,
        "scaling": "local",
    },
    "UPGD, gates in the output layer": {**_UPGD, "gated": "output"},
    "UPGD, gates in hidden layers": {**_UPGD, "gated": "hidden"},
    "UPGD, normalized inputs": {**_UPGD, "normalize": 0.999},
    "AdaUPGD": {"method": "adaupgd", "lr": 1e-4, "sigma": 0.1, "beta_utility": 0.999},
    "AdamW": {"method": "adamw", "weight_decay": 0.01, **_ADAM},
    "RMSProp": {"method": "rmsprop", "lr": 1e-4},
    "SGDW": {"method": "sgdw", "lr": 0.01, "weight_decay": 0.01},
    "Momentum": {"method": "momentum", "lr": 1e-3},
    "PGD": {"method": "pgd", "lr": 0.01, "sigma": 0.1},
    "Anti-PGD": {"method": "anti-pgd", "lr": 0.01, "sigma": 0.3},
    "Shrink & Perturb": {"method": "shrink-and-perturb", "lr": 0.01, "sigma": 0.1, "weight_decay": 0.01},
    "Shrink & Perturb, initial scale": {
        "method": "shrink-and-perturb-init",
        "lr": 0.01,
        "sigma": 3.0,
        "weight_decay": 0.01,
    },
    "L2 Init": {"method": "l2-init", "lr": 0.01},
    "L2 Init with Adam": {"method": "l2-init", "optimizer": "adam", **_ADAM},
    "Weight clipping": {"method": "weight-clipping", "lr": 0.01, "clip": 1.0},
    "ObGD": {"method": "obgd", "lr": 0.1},
    "Streaming EWC": {"method": "s-ewc", "lr": 0.01, "kappa": 100.0},
    "Streaming MAS": {"method": "s-mas", "lr": 0.01, "kappa": 10.0},
    "Streaming SI": {"method": "s-si", "lr": 0.01, "kappa": 100.0},
    "Streaming RWalk": {"method": "s-rwalk", "lr": 0.01, "kappa": 30.0},
}
_SMALL_NOISE: Settings = {**_UPGD, "sigma": 0.01, "beta_utility": 0.999, "weight_decay": 0.001}
#: Variants on an output-permuted problem with the paper's ConvNet.
CONVOLUTIONAL: dict[str, Settings] = {
    "ConvNet: UPGD": _SMALL_NOISE,
    "ConvNet: UPGD, local scaling": {**_SMALL_NOISE, "scaling": "local"},
    "ConvNet: UPGD, second order": {**_SMALL_NOISE, "order": 2},
    "ConvNet: UPGD, feature-wise": {**_SMALL_NOISE, "granularity": "feature"},
    "ConvNet: AdamW": {"method": "adamw", "lr": 1e-3, "betas": (0.0, 0.99)},
    "ConvNet: AdaUPGD": {"method": "adaupgd", "lr": 1e-3, "sigma": 0.01, "beta_utility": 0.999},
    "ConvNet: L2 Init": {"method": "l2-init", "lr": 0.01, "regularization": 0.001},
    "ConvNet: SGDW": {"method": "sgdw", "lr": 0.01, "weight_decay": 1e-3},
}
#: Methods that reset units, on input-permuted digits with the network 64-100-50-10.
SMALL: dict[str, Settings] = {f"64-100-50-10: {name}": settings for name, settings in _RESETS.items()}
#: The same on the problem of ``DENSE``.
SHORT: dict[str, Settings] = {f"Short: {name}": settings for name, settings in _RESETS.items()}

KINDS = (DENSE, CONVOLUTIONAL, SMALL, SHORT)
#: The most steps and seeds of the variants of some kinds, for which the torch backend needs less than an hour on a CPU.
LIMITS = {2: (10_000, 10), 3: (3_000, 5)}
VARIANTS = {name: settings for kind in KINDS for name, settings in kind.items()}

# ------------------------------------------------------------------------------------------------------------- compute


class Problem(NamedTuple):
    name: str
    network: nn.Module
    stream: Stream


@cache
def problem(data: str, kind: int) -> Problem:
    """Return the problem of the variants ``KINDS[kind]``.

    The digits, 8 × 8 pixels, are enlarged to the size of MNIST's images, so that networks do not depend on the data set.
    """
    if KINDS[kind] is SMALL:
        return Problem(
            "input-permuted-digits", MLP((64, 100, 50, 10)), make("input-permuted-digits", task_length=5_000)
        )
    dataset = load(data)
    images = np.asarray(dataset.images)
    if data == "digits":
        images = np.pad(images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))
    if KINDS[kind] is not CONVOLUTIONAL:
        stream = make("input-permuted", data=(images, dataset.labels))
        return Problem(f"input-permuted-{data}", MLP((784, 300, 150, 10)), stream)
    # In the size of CIFAR-10: three channels that differ, so that a mix-up of channels would show.
    padded = np.pad(images[:10_000], ((0, 0), (2, 2), (2, 2)))
    colour = np.stack([padded, padded[:, :, ::-1], padded.transpose(0, 2, 1)], 1)
    stream = make("output-permuted", data=(colour, np.asarray(dataset.labels)[:10_000]))
    return Problem(f"output-permuted-{data}, 3 × 32 × 32", ConvNet((3, 32, 32), 10), stream)


def kind_of(name: str) -> int:
    """Return the index in ``KINDS`` of the variant."""
    return next(number for number, kind in enumerate(KINDS) if name in kind)


def runs_of(name: str, steps: int, seeds: int) -> tuple[int, int]:
    """Return the number of steps and seeds of a variant."""
    most_steps, most_seeds = LIMITS.get(kind_of(name), (steps, seeds))
    return min(steps, most_steps), min(seeds, most_seeds)


def compute(
    output: str,
    *,
    device: str,
    steps: int,
    seeds: int,
    names: Sequence[str] = tuple(VARIANTS),
    data: str = "mnist",
    backend: str = "auto",
    together: int | None = None,
    first_seed: int = 0,
) -> list[str]:
    """Run the variants that are not in the file, append their results to it, and return the names of those that failed.

    Args:
        output: The file, with a name that ends with .csv.
        device: "cpu" or "cuda".
        steps: Number of steps.
        seeds: Number of seeds.
        names: The variants.
        data: The data set, "mnist" or "digits".
        backend: The backend of the population.
        together: Number of variants in one population. Default: 5 on a GPU, which fills it; 1 on a CPU.
        first_seed: The first seed. Other seeds repeat a comparison independently of the first one.
    """
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ValueError(f"there is no variant {unknown[0]!r}; choose from {', '.join(map(repr, VARIANTS))}")
    known = read(output) if Path(output).exists() else {}
    _check_same_runs(output, known, steps, seeds, first_seed)
    missing = [name for name in names if name not in known]
    if len(missing) < len(names):
        print(f"{len(names) - len(missing)} of {len(names)} variants are already in {output}", flush=True)
    where = {"device": device, "backend": backend}
    if device != "cpu" and backend != "torch":
        begin = time.perf_counter()
        with suppress(Exception):  # an error appears again when the variant is run
            compile_kernels([_row(name, data) for name in missing])
        print(f"kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    size = together or (1 if device == "cpu" else 5)
    failed = []
    for kind in KINDS:
        own = [name for name in missing if name in kind]
        for batch in (own[i : i + size] for i in range(0, len(own), size)):
            failed += _tried(output, batch, data, steps, seeds, first_seed, where)
    return failed


def _row(name: str, data: str) -> tuple[str, nn.Module, list[Learner], Stream]:
    _, network, stream = problem(data, kind_of(name))
    return name, network, [Learner(seed=0, **VARIANTS[name])], stream


def _tried(output: str, names: list[str], *arguments: Any) -> list[str]:
    """Run some variants together; if this fails, one after the other. Return the names of those that failed."""
    try:
        _run(output, names, *arguments)
    except Exception as error:
        print(f"{', '.join(names)}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return names if len(names) == 1 else [n for name in names for n in _tried(output, [name], *arguments)]
    return []


def _run(
    output: str, names: list[str], data: str, steps: int, seeds: int, first_seed: int, where: dict[str, str]
) -> None:
    """Run some variants of one kind in one population, and append their results to the file."""
    own = problem(data, kind_of(names[0]))
    steps, seeds = runs_of(names[0], steps, seeds)
    learners = [
        Learner(seed=seed, **VARIANTS[name]) for name in names for seed in range(first_seed, first_seed + seeds)
    ]
    begin = time.perf_counter()
    population = Population(own.network, learners, **where)
    result = population.run(own.stream, steps)
    seconds = time.perf_counter() - begin
    rows = []
    for place, learner in enumerate(learners):
        name = names[place // seeds]
        common = {
            "name": name,
            "problem": own.name,
            "network": own.network.describe(),
            "settings": json.dumps(VARIANTS[name]),
            "device": where["device"],
            "backend": population.backends[place],
            "seed": learner.seed,
        }
        curves = zip(result.ends, result.accuracy[:, place], result.loss[:, place], strict=True)
        rows += [{**common, "end": end, "accuracy": f"{a:.7g}", "loss": f"{loss:.7g}"} for end, a, loss in curves]
    _append(output, rows)
    for number, name in enumerate(names):
        mine = slice(number * seeds, (number + 1) * seeds)
        print(
            f"{name:48} {population.backends[mine][0]:7} accuracy {result.mean_accuracy[mine].mean():.4f} "
            f"loss {result.mean_loss[mine].mean():.4f}",
            flush=True,
        )
    rate = len(learners) * steps / seconds
    print(f"{len(learners)} learners, {steps:,} steps: {seconds:.1f} s, {rate:,.0f} learner-steps/s", flush=True)


def _append(path: str, rows: list[dict[str, Any]]) -> None:
    new = not Path(path).exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _check_same_runs(path: str, known: "dict[str, Runs]", steps: int, seeds: int, first_seed: int) -> None:
    for name, runs in known.items():
        if name in VARIANTS and runs.what[-1] != json.dumps(VARIANTS[name]):
            raise ValueError(
                f"{path} has other settings of {name!r}: {runs.what[-1]}; remove its rows to compute them again"
            )
        wanted = runs_of(name, steps, seeds)
        if (runs.ends[-1], len(runs.seeds)) != wanted or runs.seeds[0] != first_seed:
            raise ValueError(
                f"{path} has {len(runs.seeds)} seeds from {runs.seeds[0]} × {runs.ends[-1]} steps of {name!r}, "
                f"not {wanted[1]} from {first_seed} × {wanted[0]}; choose another --output, or the same --seeds, "
                "--first-seed and --steps"
            )


# ------------------------------------------------------------------------------------------------------------- compare


class Runs(NamedTuple):
    """The runs of a variant on one device."""

    what: tuple[str, ...]  #: problem, network and settings
    backend: str
    seeds: tuple[int, ...]
    ends: tuple[int, ...]  #: of the windows
    curves: dict[str, np.ndarray]  #: by metric, (seeds, windows)

    def means(self, metric: str) -> np.ndarray:
        """Return the mean over all steps, for each seed."""
        return np.average(self.curves[metric], axis=1, weights=np.diff([0, *self.ends]))


class Difference(NamedTuple):
    """A metric of a variant in two files."""

    name: str
    metric: str
    backends: tuple[str, str]
    seeds: int
    means: tuple[float, float]
    error: float  #: the standard error of the difference
    p: float  #: the probability of a difference of at least this size if there is none in truth
    differs: bool = False

    @property
    def size(self) -> float:
        return self.means[1] - self.means[0]

    @property
    def in_errors(self) -> float:
        return self.size / self.error


def read(path: str | Path) -> dict[str, Runs]:
    """Return the runs in a file, a table that may be compressed with gzip."""
    by_name: dict[str, list[dict[str, str]]] = {}
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != FIELDS:
            raise ValueError(
                f"{path} is not a table of long runs; write it with python -m benchmarks.long_runs compute"
            )
        for row in rows:
            by_name.setdefault(row["name"], []).append(row)
    return {name: _runs(path, name, rows) for name, rows in by_name.items()}


def _runs(path: str | Path, name: str, rows: list[dict[str, str]]) -> Runs:
    seeds = tuple(dict.fromkeys(int(row["seed"]) for row in rows))
    ends = tuple(dict.fromkeys(int(row["end"]) for row in rows))
    if [(int(row["seed"]), int(row["end"])) for row in rows] != [(seed, end) for seed in seeds for end in ends]:
        raise ValueError(f"{path} is incomplete for {name!r}; remove its rows and compute them again")
    curves = {m: np.array([float(row[m]) for row in rows]).reshape(len(seeds), len(ends)) for m in METRICS}
    first = rows[0]
    return Runs((first["problem"], first["network"], first["settings"]), first["backend"], seeds, ends, curves)


#: Differences below this fraction of a mean are due to rounding; it matters only if runs hardly differ.
ROUNDING = 1e-5


def differences(one: dict[str, Runs], other: dict[str, Runs], *, level: float = 0.05) -> list[Difference]:
    """Compare the means over seeds of accuracy and loss.

    Seeds are paired. The difference of a metric, divided by its standard error, is compared with Student's distribution with
    ``seeds − 1`` degrees of freedom. ``differs`` is set by Holm's procedure over all variants and metrics: if no variant
    differs, the probability of any ``differs`` is at most ``level``.
    """
    _check_comparable(one, other)
    found = [_difference(name, m, one[name], other[name]) for name in one for m in METRICS]
    smallest_first = sorted(range(len(found)), key=lambda i: found[i].p)
    for rank, i in enumerate(smallest_first):
        if found[i].p > level / (len(found) - rank):
            break
        found[i] = found[i]._replace(differs=True)
    return found


def _difference(name: str, metric: str, one: Runs, other: Runs) -> Difference:
    from scipy.stats import t  # not needed for computing

    ours, theirs = one.means(metric), other.means(metric)
    pairs = theirs - ours
    error = float(np.hypot(pairs.std(ddof=1) / np.sqrt(len(pairs)), ROUNDING * abs(ours.mean())))
    diverged = not np.isfinite(error)
    p = 0.0 if diverged else float(2 * t.sf(abs(pairs.mean()) / error, len(pairs) - 1))
    backends, means = (one.backend, other.backend), (float(ours.mean()), float(theirs.mean()))
    return Difference(name, metric, backends, len(pairs), means, error, p)


def _check_comparable(one: dict[str, Runs], other: dict[str, Runs]) -> None:
    for name in (*one, *other):
        if name not in one or name not in other:
            which = "first" if name not in one else "second"
            raise ValueError(f"the {which} file has no runs of {name!r}; compute them with --names {name!r}")
        mine, theirs = one[name], other[name]
        for what, a, b in (
            ("problem, network or settings", mine.what, theirs.what),
            ("seeds", mine.seeds, theirs.seeds),
            ("windows", mine.ends, theirs.ends),
        ):
            if a != b:
                raise ValueError(f"{name!r} has other {what} in the second file ({b}) than in the first ({a})")
        if len(mine.seeds) < 2:
            raise ValueError(f"{name!r} has one seed; a comparison needs two or more")


def table(found: Sequence[Difference], labels: tuple[str, str] = ("A", "B")) -> str:
    """Return the comparison as a Markdown table, one row per variant."""
    columns = [f"{metric}, {label}" for metric in METRICS for label in (*labels, "difference")]
    lines = [f"| variant | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    rows: dict[str, list[str]] = {}
    for own in found:
        means = [f"{mean:.4f}" for mean in own.means]
        rows.setdefault(own.name, []).extend([*means, _in_words(own)])
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _in_words(own: Difference) -> str:
    if not np.isfinite(own.error):
        return "**diverged**"
    words = f"{own.size:+.5f} ± {own.error:.5f} ({own.in_errors:+.1f})"
    return f"**{words}**" if own.differs else words


def summary(found: Sequence[Difference]) -> str:
    """Return one paragraph about all comparisons."""
    from scipy.stats import t

    outside = sum(not abs(own.in_errors) < 2 for own in found)
    expected = sum(2 * t.sf(2, own.seeds - 1) for own in found)
    differing = list(dict.fromkeys(own.name for own in found if own.differs))
    verdict = f"These variants differ: {', '.join(differing)}" if differing else "No variant differs"
    return (
        f"Of {len(found)} differences, {len(found) - outside} are within two standard errors and {outside} are not; "
        f"if there is no difference in truth, {expected:.1f} are expected outside. {verdict}, by paired t-tests with "
        "Holm's correction for all of them, at a level of 5%."
    )


def compare(first: str, second: str) -> bool:
    """Print the comparison of two files; return whether all variants agree."""
    one, other = read(first), read(second)
    found = differences(one, other)
    print("Differences B − A of the means ± their standard errors (in standard errors)\n")
    print(table(found))
    for label, path, runs in (("A", first, one), ("B", second, other)):
        names = {backend: [n for n, own in runs.items() if own.backend == backend] for backend in ("kernel", "torch")}
        slow = f"; on the torch backend: {', '.join(names['torch'])}" if names["torch"] else ""
        print(f"\n{label}: {path}, {len(names['kernel'])} variants in kernels{slow}")
    print(f"\n{summary(found)}")
    return not any(own.differs for own in found)


# -------------------------------------------------------------------------------------------------------- command line


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    keep = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.long_runs", description=__doc__, formatter_class=keep)
    commands = parser.add_subparsers(dest="command", required=True)
    computing = commands.add_parser("compute", help="train the variants and write their accuracies and losses")
    computing.add_argument("--device", choices=("cpu", "cuda"), required=True)
    computing.add_argument("--output", required=True, metavar="FILE.csv", help="the results; existing ones are kept")
    computing.add_argument("--steps", type=int, default=50_000, help="default: %(default)s")
    computing.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    computing.add_argument("--first-seed", type=int, default=0, help="for an independent repetition; default: 0")
    computing.add_argument("--names", nargs="+", default=list(VARIANTS), metavar="NAME", help="default: all variants")
    computing.add_argument("--data", choices=("mnist", "digits"), default="mnist", help="default: %(default)s")
    computing.add_argument(
        "--backend", choices=("auto", "kernel", "torch"), default="auto", help="as in Population; default: %(default)s"
    )
    computing.add_argument(
        "--together", type=int, metavar="N", help="variants in one population; default: 5 on a GPU, 1 on a CPU"
    )
    comparing = commands.add_parser("compare", help="compare two files of results")
    comparing.add_argument("first", metavar="A.csv")
    comparing.add_argument("second", metavar="B.csv")
    commands.add_parser("list", help="print the names and settings of the variants")
    return parser.parse_args(given)


def _lines() -> Iterator[str]:
    for name, settings in VARIANTS.items():
        yield f"{name:48} {', '.join(f'{key}={value}' for key, value in settings.items())}"


def command(given: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = vars(_arguments(given))
    which = options.pop("command")
    try:
        if which == "list":
            print("\n".join(_lines()))
            return 0
        if which == "compare":
            return 0 if compare(**options) else 1
        failed = compute(**options)
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"These variants failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command())
