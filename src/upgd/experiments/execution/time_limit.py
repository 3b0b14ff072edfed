"""A time limit for a series of jobs."""

import time
from collections.abc import Iterable, Iterator

from upgd.experiments.execution.jobs import Job

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
        """Iterate over the jobs that can end in time, each of which must be finished before the next; then raise
        :class:`TimeUp` if some are left."""
        for job in jobs:
            start = time.monotonic()
            learners = self._room(job, start)
            if learners == 0:
                raise TimeUp
            yield [job if learners == len(job.learners) else job.part(job.learners[:learners])]
            if learners < len(job.learners):
                raise TimeUp
            seconds = max(time.monotonic() - start, 1e-9)
            largest, _ = self._largest.get((job.problem, job.network), (0, 0.0))
            if learners >= largest:
                self._largest[job.problem, job.network] = learners, job.learner_steps / seconds

    def _room(self, job: Job, now: float) -> int:
        """Return how many of the job's learners can be computed in time; all if the speed is not known."""
        if (job.problem, job.network) not in self._largest:
            return len(job.learners)
        _, speed = self._largest[job.problem, job.network]
        possible = int(self._PART * (self._deadline - now) * speed / job.steps)
        return 0 if possible < self._SMALLEST * len(job.learners) else min(possible, len(job.learners))
