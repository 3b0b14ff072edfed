"""Timing on a machine that is never quiet."""

import time
from collections.abc import Callable, Mapping


def interleaved(jobs: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """The best time of each job, in seconds, over rounds in which each job runs once, in turn.

    Whatever else the machine does meets all jobs alike, and the best round is the one it disturbed least.
    """
    best = dict.fromkeys(jobs, float("inf"))
    for job in jobs.values():
        job()
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
