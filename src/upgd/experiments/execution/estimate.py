"""Estimate how long a sweep will take, from a short measurement on this machine."""

import math
import time
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any

import torch
from torch import nn

from upgd.experiments.execution.jobs import Job
from upgd.experiments.execution.workers import processes_that_help
from upgd.population import Learner, Population
from upgd.population.choose import BackendName
from upgd.streams import Stream

__all__ = ["estimate", "learner_steps_per_second"]


def estimate(jobs: Sequence[Job], workers: int, device: str, backend: BackendName, seconds: float = 0.5) -> float:
    """Return the estimated seconds for the jobs, after measuring each kind of computation for at most ``seconds``."""
    if not jobs:
        return 0.0
    stream, network = jobs[0].built
    workers = min(workers, len(jobs))
    rates: dict[Any, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, processes_that_help("cpu") // workers))
    try:
        for job in jobs:
            if _kinds(job) not in rates:
                rates[_kinds(job)] = learner_steps_per_second(
                    network, stream, job.learners, device, backend, seconds, job.steps
                )
    finally:
        torch.set_num_threads(threads)
    busy = [0.0] * workers
    for job in jobs:  # each job goes to the worker that is free first
        heapreplace(busy, busy[0] + job.learner_steps / rates[_kinds(job)])
    return max(busy)


def _kinds(job: Job) -> tuple[Any, ...]:
    """Return the kinds of computation in a job; on a CPU there is only one."""
    return tuple(dict.fromkeys(learner.kind for learner in job.learners))


def learner_steps_per_second(
    network: nn.Module,
    stream: Stream,
    learners: Sequence[Learner],
    device: str = "cpu",
    backend: BackendName = "auto",
    seconds: float = 0.5,
    most_steps: float = math.inf,
) -> float:
    """Measure the speed of learners, after a few steps of warm-up for compilers and caches, until ``seconds`` have passed or
    ``most_steps`` are done.

    Learning rates are set to almost zero: diverged learners are not computed, so a grid with large steps would seem fast.
    """
    population = Population(network, [learner.but(lr=1e-9) for learner in learners], device, backend)
    population.run(stream, 4)
    steps, done, best = 8, 0, 0.0
    began = time.perf_counter()
    while done < most_steps and (left := seconds - (time.perf_counter() - began)) > 0:
        start = time.perf_counter()
        population.run(stream, steps)
        took = time.perf_counter() - start
        done += steps
        best = max(best, steps * len(learners) / took)
        steps = max(1, min(2 * steps, int(left / took * steps)))
    return best
