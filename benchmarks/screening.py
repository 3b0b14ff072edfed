"""How soon the best settings of a search can be recognized.

``python -m benchmarks.screening`` reads the search of every complete curve in docs/results/data. It prints the ranks of the
five best settings after the first quarter of the steps, the worst of these ranks as a share of the curve's settings, and what
a screening of that length would have kept. ``--steps 100_000`` ranks settings by their shorter runs instead, for all curves
that were also searched at that length. It takes seconds.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from upgd.experiments.analysis import portable
from upgd.experiments.analysis.compare import comparisons, ranked
from upgd.experiments.analysis.metrics import METRICS, Metric
from upgd.experiments.execution.jobs import whole
from upgd.experiments.paper.catalogue import STUDIES, Arm
from upgd.experiments.paper.pieces import shipped
from upgd.experiments.paper.plans import plan
from upgd.store import Record

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
BEST = 5
QUARTER = 0.25
#: Curves with fewer settings are summarized separately, because five settings are a large part of them.
MANY = 40


class Curve(NamedTuple):
    """A completely searched curve.

    Attributes:
        study, name: its study; its name and what it fixes.
        settings: number of settings.
        ranks: the early ranks, 1 for the best, of the best settings of the whole search, best first.
    """

    study: str
    name: str
    settings: int
    ranks: list[int]

    @property
    def share(self) -> float:
        """The worst of the ranks as a share of the settings."""
        return max(self.ranks) / self.settings

    def kept(self, share: float) -> list[bool]:
        """Return for each of the best settings whether a screening of all settings would have kept it."""
        return [rank <= max(math.ceil(share * self.settings), BEST) for rank in self.ranks]


def curves(steps: int | None = None) -> Iterator[Curve]:
    """Iterate over all curves with more than five settings; those that several studies share are counted once.

    Settings are ranked after the first quarter; with ``steps``, by runs of that length, and curves without them are left out.
    """
    seen = set()
    for study in STUDIES.values():
        if not study.panels:
            continue
        chosen = plan(study.name, data={"emnist": "emnist-subset"})
        found = shipped(chosen, DATA)
        for arm in chosen.arms():
            (experiment,) = chosen.sweep([arm])
            digests = whole(experiment).digests
            if len(digests) <= BEST or digests in seen or not found.searched(arm):
                continue
            seen.add(digests)
            (search,) = comparisons(record for record in found.records if record.key.digest in digests)
            runs = [run for entry in ranked(search, arm.method) for run in entry.records.values()]
            shorter = runs if steps is None else _of_length(runs, steps)
            if len(shorter) < len(runs):
                continue
            early = [_score(run, search.chosen_by, QUARTER if steps is None else 1.0) for run in shorter]
            best = [rank for run, rank in zip(runs, early, strict=True) if run.diverged_at is None][:BEST]
            ranks = [sum(other <= own for other in early) for own in best]
            yield Curve(study.name, _name(arm), len(runs), ranks)


def _of_length(runs: Sequence[Record], steps: int) -> list[Record]:
    """Return the shorter runs of the same learners, as far as they are shipped."""
    wanted = (replace(run.key, steps=steps).digest for run in runs)
    there = _shipped(runs[0].key.problem)
    return [there[digest] for digest in wanted if digest in there]


@cache
def _shipped(problem: str) -> dict[str, Record]:
    return {run.key.digest: run for run in portable.read(DATA / f"{problem}.csv.gz")}


def _score(run: Record, metric: Metric, share: float) -> float:
    """Return a sort key, smallest for the best run in the first share of the steps."""
    if run.diverged_at is not None and run.diverged_at < run.key.steps * share:
        return math.inf
    curve = run.loss if run.accuracy is None else run.accuracy
    mean = float(curve[: round(len(curve) * share)].mean())
    return -mean if METRICS[metric].higher else mean


def _name(arm: Arm) -> str:
    """Return the curve's name and problem, and the settings that it fixes; the order is part of the name."""
    fixed = ((name, values[0]) for name, values in arm.fixed if len(values) == 1 and name != "order")
    words = (value if isinstance(value, str) else f"{name} {value:g}" for name, value in fixed)
    return ", ".join([arm.name, arm.problem, *words])


def table(found: Sequence[Curve], keep: float = 0.25, when: str = "the first quarter") -> str:
    """Return one row per curve, the worst first, and a summary of curves with many and with few settings."""
    lines = ["| study | curve | settings | ranks of the best | worst |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {one.study} | {one.name} | {one.settings} | {' '.join(map(str, one.ranks))} | {one.share:.0%} |"
        for one in sorted(found, key=lambda one: -one.share)
    ]
    many, few = ([one for one in found if (one.settings >= MANY) == large] for large in (True, False))
    for what, own in ((f"at least {MANY} settings", many), (f"{BEST + 1} to {MANY - 1} settings", few)):
        if own:
            kept = [one.kept(keep) for one in own]
            lines.append(
                f"\n{len(own)} curves with {what}: the best {BEST} rank among the best {max(one.share for one in own):.1%} "
                f"after {when}. A screening that keeps {keep:.0%} (at least {BEST}) keeps all of them on "
                f"{sum(map(all, kept))} curves, and the best one on {sum(best for best, *_ in kept)}."
            )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="rank settings by runs of this length")
    parser.add_argument("--keep", type=float, default=0.25, help="the fraction that the screening keeps")
    given = parser.parse_args()
    if not (found := list(curves(given.steps))):
        parser.error(f"no curve in {DATA} was searched with runs of {given.steps:,} steps; use --steps 100_000")
    print(table(found, given.keep, "the first quarter" if given.steps is None else f"{given.steps:,} steps"))
