"""A time limit for a series of jobs."""

import time
from collections.abc import Iterable, Iterator

from upgd.experiments.execution.jobs import Job

__all__ = ["TimeLimit", "TimeUp"]


class TimeUp(KeyboardInterrupt):
    """The time limit is reached. As after Ctrl-C, finished results are stored and unfinished work is saved."""


class TimeLimit:
    """The time at which to stop, and the speed of the last job of each problem and network.

    Args:
        seconds: from now.
    """

    #: A job is started if it is expected to take at most this part of the time left.
    _PART = 0.9
    #: The smallest part of a job that is started instead of the whole; smaller ones may not fill a GPU.
    _SMALLEST = 0.25

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._speeds: dict[tuple[str, str], float] = {}

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
            self._speeds[job.problem, job.network] = job.learner_steps / max(time.monotonic() - start, 1e-9)

    def _room(self, job: Job, now: float) -> int:
        """Return how many of the job's learners can be computed in time; all if the speed is not known."""
        speed = self._speeds.get((job.problem, job.network))
        if speed is None:
            return len(job.learners)
        possible = int(self._PART * (self._deadline - now) * speed / job.steps)
        return 0 if possible < self._SMALLEST * len(job.learners) else min(possible, len(job.learners))
