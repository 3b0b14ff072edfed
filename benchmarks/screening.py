"""How soon the best settings of a search can be recognized.

``python -m benchmarks.screening`` reads the search of every complete curve in docs/results/data. It prints the ranks of the
five best settings after the first quarter of the steps, the worst of these ranks as a share of the curve's settings, and what
a screening of that length would have kept. It takes seconds.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from upgd.experiments.analysis.compare import comparisons, ranked
from upgd.experiments.analysis.metrics import METRICS, Metric
from upgd.experiments.execution.jobs import whole
from upgd.experiments.paper.catalogue import STUDIES, Arm
from upgd.experiments.paper.pieces import shipped
from upgd.experiments.paper.plans import plan
from upgd.store import Record

DATA = Path(__file__).parents[1] / "docs" / "results" / "data"
BEST, KEEP = 5, 0.25
#: Curves with fewer settings are summarized separately, because five settings are a large part of them.
MANY = 40


class Curve(NamedTuple):
    """A completely searched curve.

    Attributes:
        study, name: its study; its name and what it fixes.
        settings: number of settings.
        ranks: the ranks after the first quarter, 1 for the best, of the best settings of the whole search, best first.
    """

    study: str
    name: str
    settings: int
    ranks: list[int]

    @property
    def share(self) -> float:
        """The worst of the ranks as a share of the settings."""
        return max(self.ranks) / self.settings

    @property
    def kept(self) -> list[bool]:
        """For each of the best settings, whether a screening of all settings would have kept it."""
        return [rank <= max(math.ceil(KEEP * self.settings), BEST) for rank in self.ranks]


def curves() -> Iterator[Curve]:
    """Iterate over all curves with more than five settings; those that several studies share are counted once."""
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
            early = [_early(run, search.chosen_by) for run in runs]
            best = [rank for run, rank in zip(runs, early, strict=True) if run.diverged_at is None][:BEST]
            ranks = [sum(other <= own for other in early) for own in best]
            yield Curve(study.name, _name(arm), len(runs), ranks)


def _early(run: Record, metric: Metric) -> float:
    """Return a sort key, smallest for the best run after the first quarter of the steps."""
    if run.diverged_at is not None and run.diverged_at < run.key.steps / 4:
        return math.inf
    curve = run.loss if run.accuracy is None else run.accuracy
    mean = float(curve[: len(curve) // 4].mean())
    return -mean if METRICS[metric].higher else mean


def _name(arm: Arm) -> str:
    """Return the curve's name and problem, and the settings that it fixes; the order is part of the name."""
    fixed = ((name, values[0]) for name, values in arm.fixed if len(values) == 1 and name != "order")
    words = (value if isinstance(value, str) else f"{name} {value:g}" for name, value in fixed)
    return ", ".join([arm.name, arm.problem, *words])


def table(found: Sequence[Curve]) -> str:
    """Return one row per curve, the worst first, and a summary of curves with many and with few settings."""
    lines = ["| study | curve | settings | ranks of the best | worst |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {one.study} | {one.name} | {one.settings} | {' '.join(map(str, one.ranks))} | {one.share:.0%} |"
        for one in sorted(found, key=lambda one: -one.share)
    ]
    many, few = ([one for one in found if (one.settings >= MANY) == large] for large in (True, False))
    for what, own in ((f"at least {MANY} settings", many), (f"{BEST + 1} to {MANY - 1} settings", few)):
        lines.append(
            f"\n{len(own)} curves with {what}: the best {BEST} rank among the best {max(one.share for one in own):.1%} after "
            f"the first quarter. A screening that keeps {KEEP:.0%} (at least {BEST}) keeps all of them on "
            f"{sum(all(one.kept) for one in own)} curves, and the best one on {sum(one.kept[0] for one in own)}."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(list(curves())))
