"""Run settings whose results others have published: ``python -m benchmarks.public_numbers [STORE]``.

Each setting runs for a million steps with three seeds. With a store, the runs that it lacks are computed and
docs/results/data/public-numbers.csv.gz is extended; without one, nothing is computed. Either way the table in
docs/results/public-numbers.md is rewritten from that file.
"""

import argparse
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from upgd.experiments import run
from upgd.experiments.analysis import portable
from upgd.experiments.execution.jobs import whole
from upgd.experiments.spec.declare import Listed
from upgd.methods import METHODS
from upgd.population import Learner
from upgd.store import Record

RESULTS = Path(__file__).parents[1] / "docs" / "results"
DATA = RESULTS / "data" / "public-numbers.csv.gz"
SEEDS = range(3)
STEPS = 1_000_000
MNIST, EMNIST = "input-permuted-mnist", "output-permuted-emnist-subset"


class Case(NamedTuple):
    """A setting, and the accuracy that others report for it."""

    problem: str
    settings: dict
    public: float | None

    @property
    def experiment(self) -> Listed:
        learners = [Learner(seed=seed, **self.settings) for seed in SEEDS]
        return Listed(self.problem, "300-150", STEPS, {}, learners)

    @property
    def name(self) -> str:
        """The method's label and its settings."""
        method = self.settings["method"]
        values = ", ".join(f"{name} {value}" for name, value in self.settings.items() if name != "method")
        return f"{METHODS[method].label}: {values}"


_UPGD_MNIST = {"method": "upgd", "lr": 0.01, "sigma": 0.1, "beta_utility": 0.9999, "weight_decay": 0.01}
_UPGD_EMNIST = {"method": "upgd", "lr": 0.01, "sigma": 0.001, "beta_utility": 0.9, "weight_decay": 0.0}
_CBP = {"method": "continual-backprop", "optimizer": "adam", "lr": 1e-4, "betas": (0.0, 0.99), "replacement_rate": 3e-4}
#: The sources give no learning rate for SGD and L2-Init with normalized inputs, so several are tried.
CASES = [
    Case(MNIST, _UPGD_MNIST, 0.779),
    Case(MNIST, _UPGD_MNIST | {"normalize": 0.999}, 0.854),
    *(Case(MNIST, {"method": "sgd", "lr": lr, "normalize": 0.99}, 0.862) for lr in (0.01, 0.005, 0.003, 0.001)),
    *(
        Case(MNIST, {"method": "sgdw", "lr": lr, "weight_decay": decay, "normalize": 0.99}, 0.862)
        for lr in (0.01, 0.005, 0.003, 0.001)
        for decay in (0.01, 0.001)
    ),
    *(
        Case(MNIST, {"method": "l2-init", "lr": lr, "regularization": 0.01, "normalize": 0.99}, 0.865)
        for lr in (0.01, 0.005, 0.003)
    ),
    Case(MNIST, {"method": "adamw", "lr": 1e-4, "betas": (0.0, 0.99), "weight_decay": 0.0}, None),
    Case(MNIST, _CBP, 0.801),
    Case(EMNIST, _UPGD_EMNIST, None),
    Case(EMNIST, _UPGD_EMNIST | {"sigma": 0.0}, None),
    Case(EMNIST, _UPGD_EMNIST | {"normalize": 0.999}, 0.716),
    Case(EMNIST, _UPGD_EMNIST | {"normalize": 0.9999}, 0.716),
    Case(EMNIST, _UPGD_EMNIST | {"gated": "output"}, 0.701),
]


def compute(store: str) -> None:
    """Run what the store lacks, one problem after the other, and add everything to the file."""
    for problem in (MNIST, EMNIST):
        learners = [one for case in CASES if case.problem == problem for one in case.experiment.learners()]
        found = run(Listed(problem, "300-150", STEPS, {}, learners), store=store, progress=True)
        portable.merge(DATA, (portable.coarsened(record, portable.SUMMARY) for record in found.records))


def table(records: Iterable[Record]) -> str:
    """Return one row per setting that has been run, with the mean over its seeds."""
    means = {record.key.digest: float(record.accuracy @ record.lengths) / record.key.steps for record in records}
    lines = ["| problem | setting | public | here | range of the seeds |", "|---|---|---:|---:|---:|"]
    for case in CASES:
        own = [means[digest] for digest in whole(case.experiment).digests if digest in means]
        if own:
            public = "" if case.public is None else f"{case.public:.3f}"
            lines.append(
                f"| {'MNIST' if case.problem == MNIST else 'EMNIST'} | {case.name} | {public} | {statistics.mean(own):.3f} "
                f"| {min(own):.4f} – {max(own):.4f} |"
            )
    return "\n".join(lines)


def write_page() -> None:
    """Put the table on the page."""
    page = RESULTS / "public-numbers.md"
    new = f"<!-- table -->\n\n{table(portable.read(DATA))}\n\n<!-- end of table -->"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"<!-- table -->.*<!-- end of table -->", lambda _: new, text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", metavar="STORE", help="compute what is missing, and keep it in this store")
    if store := parser.parse_args().store:
        compute(store)
    write_page()
