"""Compute one job in this process, for a while or to the end."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from upgd import plugins
from upgd.experiments.execution.jobs import Job, Snapshot
from upgd.population import Diagnostics, Population, Result, diagnostics
from upgd.population.choose import BackendChoice
from upgd.store import Record

__all__ = ["Pause", "Watch", "compute", "device_named", "most_learners", "uses"]

#: Called from time to time with the number of learner-steps done, the number of diverged learners, and a function that takes
#: a snapshot. It may raise :class:`Pause`.
Watch: TypeAlias = Callable[[int, int, Callable[[], Snapshot]], None]

#: Maximum number of learners that one device computes together. A GPU has room for many; on a CPU, more learners are not
#: faster and make the work harder to distribute.
_MOST_LEARNERS = {"cuda": 1024, "cpu": 32}
#: Seconds between counts of diverged learners.
_COUNTING_S = 2.0


class Pause(Exception):
    """Raised by a watch to stop; the job can resume from its snapshot."""


def compute(
    job: Job,
    device: str,
    backend: BackendChoice,
    begun: Snapshot | None,
    watch: Watch,
    look_every: int | None = None,
) -> list[Record]:
    """Compute a job to its end.

    Args:
        job: the learners and their problem.
        device: the device.
        backend: the backend.
        begun: the snapshot to resume from.
        watch: called at the start and after every block of about half a second.
        look_every: number of steps between diagnostics; None for no diagnostics.

    Returns:
        One record per learner.
    """
    stream, network = job.built
    population = Population(network, job.learners, device, backend)
    earlier = 0.0
    if begun is not None:
        population.restore(begun.state)
        earlier = begun.seconds
    start = looked = time.monotonic()
    diverged = 0

    def snapshot() -> Snapshot:
        return Snapshot(population.state(), earlier + time.monotonic() - start)

    def progress(_done: int, _total: int) -> None:
        nonlocal diverged, looked
        if time.monotonic() - looked > _COUNTING_S:  # counting waits for the GPU
            diverged, looked = int((population.diverged_at >= 0).sum()), time.monotonic()
        watch(population.step * len(job.learners), diverged, snapshot)

    watch(population.step * len(job.learners), diverged, snapshot)
    looking = None if look_every is None else Diagnostics(every=look_every)
    result = population.run(stream, job.steps - population.step, progress=progress, diagnostics=looking)
    seconds = earlier + time.monotonic() - start
    regression = stream.loss == "mse"
    return _records(
        job, result, regression, population.backends, device, seconds / len(job.learners), backend, look_every
    )


def uses(job: Job, backend: BackendChoice, look_every: int | None) -> list[tuple[str, str]]:
    """Return kind and name of everything in a job that may come from a plugin."""
    used = job.uses()
    if isinstance(backend, type):
        plugins.remember("backend", backend.__name__, backend)
        used.append(("backend", backend.__name__))
    return used if look_every is None else [*used, *(("diagnostic", name) for name in diagnostics.names())]


def device_named(name: str) -> str:
    """Return the device name, resolving ``"auto"`` to the GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails for "meta", which has no data
    except (RuntimeError, AssertionError) as error:
        # For other names, torch's message lists all kinds of devices.
        reason = f" ({str(error).splitlines()[0]})" if name.startswith("cuda") else ""
        names = "'auto', 'cpu', 'cuda' or 'cuda:1'" if torch.cuda.is_available() else "'auto' or 'cpu'"
        raise ValueError(f"device={name!r} cannot be used{reason}; use {names}") from error
    return str(device)


def most_learners(device: str) -> int:
    """Return the maximum number of learners of a job for this device."""
    return _MOST_LEARNERS.get(torch.device(device).type, 32)


def _records(
    job: Job,
    result: Result,
    regression: bool,
    backends: tuple[str, ...],
    device: str,
    seconds: float,
    backend: BackendChoice,
    look_every: int | None,
) -> list[Record]:
    used = {
        one.method: plugins.versions(uses(replace(job, learners=(one,)), backend, look_every)) or None
        for one in {learner.method: learner for learner in job.learners}.values()
    }
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return [
        Record(
            job.key(learner),
            window=result.window,
            loss=result.loss[:, i],
            accuracy=None if regression else result.accuracy[:, i],
            diverged_at=int(result.diverged_at[i]) if result.diverged_at[i] >= 0 else None,
            device=where,
            backend=backends[i],
            seconds=seconds,
            diagnostics=_looks(result, i),
            plugins=used[learner.method],
        )
        for i, learner in enumerate(job.learners)
    ]


def _looks(result: Result, learner: int) -> dict[str, list[Any]] | None:
    """Return the diagnostics of a learner; missing ones are omitted, and NaN becomes None."""
    if not len(result.diagnosed_at):
        return None
    own = {name: figures[:, learner] for name, figures in result.diagnostics.items()}
    return {"step": result.diagnosed_at.tolist()} | {
        name: [_plain(figure) for figure in figures] for name, figures in own.items() if np.isfinite(figures).any()
    }


def _plain(figure: Any) -> Any:
    """Round a number, or a list of numbers, to five digits."""
    if np.ndim(figure):
        return [_plain(part) for part in figure]
    return float(f"{figure:.5g}") if np.isfinite(figure) else None
