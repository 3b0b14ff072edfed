"""A time limit for a series of jobs."""

import time
from collections.abc import Iterable, Iterator, Sequence

from upgd.experiments.execution.jobs import Job
from upgd.population import Learner

__all__ = ["TimeLimit", "TimeUp"]


class TimeUp(KeyboardInterrupt):
    """The time limit is reached. As after Ctrl-C, finished results are stored and unfinished work is saved."""


class TimeLimit:
    """The time at which to stop, and the speed of the largest job of each problem and network so far.

    A small job may not fill a GPU, so its speed would underestimate that of larger ones.

    Args:
        seconds: from now.
    """

    #: A job is started if it is expected to take at most this part of the time left.
    _PART = 0.9
    #: The smallest part of a job that is started instead of the whole; smaller ones may not fill a GPU.
    _SMALLEST = 0.25

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        #: Number of learners and learner-steps per second of the largest job, of equally large ones the latest.
        self._largest: dict[tuple[str, str], tuple[int, float]] = {}

    def check(self) -> None:
        """Raise :class:`TimeUp` if the time is up."""
        if time.monotonic() >= self._deadline:
            raise TimeUp

    def fitting(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Iterate over the jobs, or parts of them, that can end in time, each of which must be finished before the next;
        then raise :class:`TimeUp` if some are left."""
        for job in jobs:
            left: Sequence[Learner] = job.learners
            while left:
                start = time.monotonic()
                now, left = self._divided(job, left, start)
                if not now:
                    raise TimeUp
                yield [job.part(now)]
                self._measure(job, len(now), time.monotonic() - start)

    def _divided(self, job: Job, left: Sequence[Learner], now: float) -> tuple[Sequence[Learner], Sequence[Learner]]:
        """Return which of the job's learners to compute next, none if too few can be computed in time, and the others."""
        if (job.problem, job.network) not in self._largest:
            return left, ()
        _, speed = self._largest[job.problem, job.network]
        possible = int(self._PART * (self._deadline - now) * speed / job.steps)
        if possible < self._SMALLEST * len(left):
            return (), left
        # If the speed of a smaller job underestimates that of this one, the others follow at the speed of this part.
        return left[:possible], left[possible:]

    def _measure(self, job: Job, learners: int, seconds: float) -> None:
        """Remember the speed of a part of a job if it is the largest so far."""
        largest, _ = self._largest.get((job.problem, job.network), (0, 0.0))
        if learners >= largest:
            self._largest[job.problem, job.network] = learners, learners * job.steps / max(seconds, 1e-9)
