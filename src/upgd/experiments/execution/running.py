"""Running experiments: what is in the store already is not computed again; what is killed goes on."""

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from upgd.experiments.analysis.results import Results
from upgd.experiments.execution.jobs import Checkpoints, Job, plan, whole
from upgd.experiments.execution.progress import Display, Progress, display, published
from upgd.experiments.execution.work import device_named, most_learners
from upgd.experiments.execution.workers import Executor, Settings, in_process, in_processes
from upgd.experiments.spec.declare import Experiment, Grid
from upgd.population.choose import BackendChoice, choose
from upgd.population.spec import groups
from upgd.store import Store

__all__ = ["execute", "pending", "run"]


def run(
    problem: str | Experiment,
    methods: str | Iterable[str] | Mapping[str, Grid] | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    workers: int = 1,
    device: str = "auto",
    backend: BackendChoice = "auto",
    progress: bool = False,
    look_every: int | None = None,
    **declaration: Any,
) -> Results:
    """Run an experiment, or what is missing of it, and give its results.

    Args:
        problem: an :class:`Experiment`; or the first of its arguments.
        methods, declaration: the other arguments of :class:`Experiment`, unless there is one already.
        store: the file that keeps the results, made if it is not there. What it has is not computed again, and a run that
            was interrupted goes on. By default nothing is kept but what is returned.
        workers: how many processes. With one, everything happens in this process, which uses all cores by threads anyway.
            More need a script that can be imported (``if __name__ == "__main__":``).
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: the population's: ``"auto"``, ``"torch"`` or ``"kernel"``; or a class of your own
            (:class:`upgd.population.backend.Backend`).
        progress: whether to show how far it is.
        look_every: look inside the learners every so many steps; the report shows what was seen. It takes time and does not
            change what they do; learners that the store has already are not run again for it.

    Example:
        >>> small = {"seeds": 2, "steps": 40, "options": {"task_length": 20}, "backend": "torch"}
        >>> result = run("output-permuted-digits", {"sgd": {"lr": 0.03}}, **small)
        >>> result.records[0].ends.tolist()
        [20, 40]
    """
    experiment = problem if isinstance(problem, Experiment) else Experiment(problem, methods or (), **declaration)
    if isinstance(problem, Experiment) and (methods is not None or declaration):
        raise TypeError("give an Experiment, or the arguments of one, not both")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if look_every is not None and look_every < 1:
        raise ValueError(f"look_every must be at least 1, not {look_every}")
    device = device_named(device)
    path = ":memory:" if store is None else Path(store)
    checkpoints = None if store is None else Checkpoints.beside(Path(store))
    settings = Settings(device, backend, checkpoints, look_every=look_every)
    executor = in_process(settings) if workers == 1 else in_processes(settings, workers)
    with Store.write(path) as opened, display("auto" if progress else "none") as show:
        return execute(
            experiment,
            opened,
            executor,
            workers=workers,
            device=device,
            show=show,
            checkpoints=checkpoints,
            own_backend=isinstance(backend, type),
        )


def execute(
    experiment: Experiment,
    store: Store,
    executor: Executor,
    *,
    workers: int,
    device: str,
    checkpoints: Checkpoints | None = None,
    show: Display = lambda progress: None,
    own_backend: bool = False,
) -> Results:
    """Have an executor compute what the store does not have, and store every job as it is finished.

    Args:
        experiment: what is wanted.
        store: open for writing.
        executor: who computes.
        workers: how many jobs there should be at the same time.
        device: what the jobs shall fill.
        checkpoints: where unfinished jobs are.
        show: told about the progress.
        own_backend: whether jobs run on a backend of the user's, which may be able to run what ours cannot.
    """
    everything = whole(experiment)
    jobs = pending(everything, store, workers, device, checkpoints)
    if not own_backend:
        _check_can_run(jobs)
    progress = Progress.of(jobs, already=len(everything.learners) - sum(len(job.learners) for job in jobs))
    with published(show, store.path) as tell:
        tell(progress)

        def watcher(job: Job, done: int, diverged: int) -> None:
            progress.update(job, done, diverged)
            tell(progress)

        if jobs:
            # Closing the executor's generator, on Ctrl-C too, lets it save what it is doing.
            with closing(executor(jobs, watcher)) as finished:  # type: ignore[type-var]
                for job, records in finished:
                    store.add(records)
                    if checkpoints is not None:
                        checkpoints.remove(job)
                    progress.finish(job, sum(record.diverged_at is not None for record in records))
                    tell(progress)
    found = {
        record.key.digest: record for record in store.records(problem=everything.problem, digests=everything.digests)
    }
    return Results([found[everything.digest_of[learner]] for learner in everything.learners])


def _check_can_run(jobs: Iterable[Job]) -> None:
    """Refuse methods that the engine cannot run with this network before any work begins."""
    seen: set[tuple[Any, ...]] = set()
    for job in jobs:
        for learner in job.learners:
            variant = (learner.method, *(value for _, value in learner.values if isinstance(value, str | int)))
            if variant not in seen:
                seen.add(variant)
                ((group, _),) = groups([learner], [0])
                choose("torch", job.built[1], group, torch.device("cpu"), torch.float32)


def pending(
    wanted: Experiment | Job, store: Store, workers: int, device: str, checkpoints: Checkpoints | None = None
) -> list[Job]:
    """What of an experiment, or of a single job, the store does not have; jobs that were begun come first, as they were."""
    everything = wanted if isinstance(wanted, Job) else whole(wanted)
    _ = everything.built  # says what is wrong, if something is, before any work begins
    there = store.digests()
    begun: list[Job] = []
    missing = everything.without(there)
    if checkpoints is not None:
        begun = checkpoints.unfinished(missing, lambda digests: digests <= there)
        missing = missing.without(there.union(*(job.digests for job in begun)))
    mixed = device.startswith("cuda")  # a GPU has room for several groups at the same time
    return begun + (plan(missing, workers, most_learners(device), mixed=mixed) if missing.learners else [])
