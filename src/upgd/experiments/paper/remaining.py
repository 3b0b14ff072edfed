"""What is computed of a plan and what is left, by stage of every curve. Counting does not need the data sets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from upgd.experiments.execution.jobs import Job, whole
from upgd.experiments.execution.running import pending
from upgd.experiments.paper.catalogue import Arm, Panel
from upgd.experiments.paper.plans import Plan
from upgd.experiments.paper.reproduce import Reproduction, reproduce, stored
from upgd.experiments.spec.declare import Experiment
from upgd.store import Store

__all__ = ["STAGES", "Remaining", "Stage"]

STAGES = ("screening", "search", "shortlist", "final runs")


@dataclass(frozen=True)
class Stage:
    """A stage of some curves.

    Attributes:
        wanted: number of learners.
        missing: those that are not computed, one job per problem, network and length.
    """

    wanted: int
    missing: tuple[Job, ...]

    @property
    def learners(self) -> int:
        """Number of missing learners."""
        return sum(len(job.learners) for job in self.missing)

    @property
    def learner_steps(self) -> int:
        """Number of missing learner-steps."""
        return sum(job.learner_steps for job in self.missing)

    @property
    def computed(self) -> int:
        """Number of learners that are computed."""
        return self.wanted - self.learners


class Remaining:
    """What is left of a plan in a store.

    While the screening or the search of a curve is unfinished, its first settings stand for the best ones, which take equally
    long.

    Args:
        plan: the plan.
        store: the results so far.

    Attributes:
        found: the results so far.
        stages: the stages of the plan.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self.found = reproduce(plan, stored(store))
        self.stages = STAGES if plan.screening() else STAGES[1:]
        self._there = {record.key.digest for record in self.found.records}
        expected = self.found.plan.expected()
        self._jobs = {arm: _jobs(self.found, expected, arm, self._there) for arm in plan.arms()}

    def stage(self, name: str, panel: Panel | None = None) -> Stage:
        """Return a stage of a panel's curves, or of all curves."""
        arms = [arm for arm in self._jobs if panel is None or arm in panel.arms]
        jobs = _together(job for arm in arms for job in self._jobs[arm][STAGES.index(name)])
        missing = [job.without(self._there) for job in jobs]
        return Stage(sum(len(job.learners) for job in jobs), tuple(job for job in missing if job.learners))

    def planned(self, stages: Iterable[str], store: Store, workers: int, device: str) -> list[Job]:
        """Return the missing learners of some stages as jobs for a device; this creates the streams and networks."""
        missing = [job for name in stages for job in self.stage(name).missing]
        return [part for job in missing for part in pending(job, store, workers, device)]


def _jobs(found: Reproduction, plan: Plan, arm: Arm, there: set[str]) -> tuple[Sequence[Job], ...]:
    """Return the learners of each stage of an expected plan."""
    finding = found.findings.get(arm)
    search = _whole(plan.sweep([arm]))
    settings = plan.swept(arm)
    candidates, chosen = settings[: plan.shortlist], settings[:1]
    if finding is not None and not any(job.without(there).learners for job in search):
        candidates = [dict(one) for one in found.candidates[arm]]
        chosen = [one.settings for one in (finding, finding.papers) if one is not None]
    return (
        _whole(plan.screening([arm])),
        search,
        _whole(plan.again({arm: candidates}) if plan.shortlist else []),
        _whole(plan.final({arm: chosen})),
    )


def _whole(experiments: Iterable[Experiment]) -> list[Job]:
    return [whole(experiment) for experiment in experiments]


def _together(jobs: Iterable[Job]) -> list[Job]:
    """Join jobs of the same problem, network and length, without duplicate learners."""
    found: dict[tuple[str, str, int], Job] = {}
    for job in jobs:
        place = (job.problem, job.network, job.steps)
        joined = dict.fromkeys((*found[place].learners, *job.learners)) if place in found else job.learners
        found[place] = replace(job, learners=tuple(joined))
    return list(found.values())
