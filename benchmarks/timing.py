"""Timing on a machine with other load."""

import time
from collections.abc import Callable, Mapping


def interleaved(jobs: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Return the best time of each job, in seconds, over rounds in which each job runs once, in turn.

    Other load on the machine affects all jobs equally, and the best round is the least disturbed one.
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
