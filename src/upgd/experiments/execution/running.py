"""Running experiments: what is in the store already is not computed again; what is killed goes on.

:func:`run` runs one experiment, a :class:`Runner` several that share a store. The commands do the same.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upgd.experiments.analysis.results import Results
from upgd.experiments.execution.jobs import Checkpoints, Job, plan, whole
from upgd.experiments.execution.progress import Display, Progress, display, published
from upgd.experiments.execution.work import device_named, most_learners
from upgd.experiments.execution.workers import Executor, Settings, in_process, in_processes, processes_that_help
from upgd.experiments.spec.declare import Experiment, Grid
from upgd.population.choose import BackendChoice, choose
from upgd.population.spec import groups
from upgd.store import Store

__all__ = ["Options", "Runner", "TimeUp", "execute", "mistake", "pending", "run"]

#: Less than this is done before several processes have started; the threads of one use all cores, too.
_SMALL = 1_000_000


class TimeUp(KeyboardInterrupt):
    """The time that was given is over; as after Ctrl-C, what is finished is stored and what was begun is saved."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How experiments are run.

    Attributes:
        store: the file that keeps the results; None: only what is returned is kept.
        workers: how many processes; None: as many as help.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: the population's: ``"auto"``, ``"torch"`` or ``"kernel"``, or a class.
        ray: the address of a Ray cluster that computes instead; see :func:`upgd.experiments.execution.cluster.on_ray`.
        insecure: whether the cluster may be one that asks for no token.
        look_every: how many steps from one look inside the learners to the next; None: nobody looks.
        checkpoint_every: seconds from one snapshot of unfinished work to the next.
        stop_after: after so many seconds a :class:`Runner` saves its work and raises :class:`TimeUp`; None: never.
        job_size: how many learners a job has at most; None: as many as help. Small jobs lose less where snapshots do not
            outlive the machine.
    """

    store: Path | None = None
    workers: int | None = None
    device: str = "auto"
    backend: BackendChoice = "auto"
    ray: str | None = None
    insecure: bool = False
    look_every: int | None = None
    checkpoint_every: float = 120.0
    stop_after: float | None = None
    job_size: int | None = None

    def __post_init__(self) -> None:
        if wrong := mistake(self, lambda name: name, "{}={!r}"):
            raise ValueError(wrong)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where unfinished work is kept."""
        return None if self.store is None else Checkpoints.beside(self.store)

    def workers_for(self, experiment: Experiment, device: str) -> int:
        """How many processes compute an experiment on this machine."""
        return self.workers or (1 if experiment.learner_steps < _SMALL else processes_that_help(device))

    def executor_for(self, experiment: Experiment) -> tuple[str, int, Executor]:
        """The device that jobs shall fill, how many at a time, and who computes them."""
        if self.ray is not None:
            from upgd.experiments.execution.cluster import on_ray

            return on_ray(
                self.ray,
                self.device,
                self.backend,
                self.checkpoints,
                self.checkpoint_every,
                look_every=self.look_every,
                insecure=self.insecure,
            )
        device = device_named(self.device)
        workers = self.workers_for(experiment, device)
        settings = Settings(device, self.backend, self.checkpoints, self.checkpoint_every, look_every=self.look_every)
        return device, workers, in_process(settings) if workers == 1 else in_processes(settings, workers)


def mistake(options: Any, spelled: Callable[[str], str], with_value: str) -> str | None:
    """What is wrong with options, in words without a full stop; None if nothing is.

    Args:
        options: :class:`Options`, or anything with the same attributes.
        spelled: how users write the name of an option.
        with_value: how they write it with its value, as a format.
    """
    for name in ("workers", "look_every", "job_size"):
        number = getattr(options, name)
        if number is not None and number < 1:
            return f"{spelled(name)} must be 1 or more, not {number}"
    for name in ("checkpoint_every", "stop_after"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds >= 0:
            return f"{spelled(name)} must be a number of seconds, not {seconds}"
    ray = spelled("ray")
    if options.insecure and options.ray is None:
        return f"{spelled('insecure')} is about a Ray cluster; leave it out, or name the cluster with {ray}"
    if options.ray is not None and options.workers is not None:
        workers, cluster = spelled("workers"), with_value.format(ray, options.ray)
        return (
            f"{with_value.format(workers, options.workers)} has no meaning with {cluster}, where the cluster says how many "
            "jobs are computed at a time; leave one of them out"
        )
    return None


def run(
    problem: str | Experiment,
    methods: str | Iterable[str] | Mapping[str, Grid] | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    device: str = "auto",
    backend: BackendChoice = "auto",
    progress: bool = False,
    look_every: int | None = None,
    ray: str | None = None,
    insecure: bool = False,
    checkpoint_every: float = 120.0,
    stop_after: float | None = None,
    **declaration: Any,
) -> Results:
    """Run an experiment, or what is missing of it, and give its results.

    Args:
        problem: an :class:`Experiment`; or the first of its arguments.
        methods, declaration: the other arguments of :class:`Experiment`, unless there is one already.
        store: the file that keeps the results, made if it is not there. What it has is not computed again, and a run that
            was interrupted goes on. By default nothing is kept but what is returned.
        workers: how many processes, by default one: everything happens in this process, which uses all cores by threads
            anyway. More need a script that can be imported (``if __name__ == "__main__":``).
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: the population's: ``"auto"``, ``"torch"`` or ``"kernel"``; or a class of your own
            (:class:`upgd.population.backend.Backend`).
        progress: whether to show how far it is.
        look_every: look inside the learners every so many steps; the report shows what was seen. It takes time and does not
            change what they do; learners that the store has already are not run again for it.
        ray: the address of a Ray cluster that computes instead, ``HOST:PORT``, ``"auto"`` or ``"local"``.
        insecure: whether the cluster may be one that asks for no token.
        checkpoint_every: seconds from one snapshot of unfinished work to the next.
        stop_after: after so many seconds, save the work and raise :class:`TimeUp`; the same call goes on.

    Example:
        >>> small = {"seeds": 2, "steps": 40, "options": {"task_length": 20}, "backend": "torch"}
        >>> result = run("output-permuted-digits", {"sgd": {"lr": 0.03}}, **small)
        >>> result.records[0].ends.tolist()
        [20, 40]
    """
    experiment = problem if isinstance(problem, Experiment) else Experiment(problem, methods or (), **declaration)
    if isinstance(problem, Experiment) and (methods is not None or declaration):
        raise TypeError("give an Experiment, or the arguments of one, not both")
    options = Options(
        store=None if store is None else Path(store),
        workers=1 if workers is None and ray is None else workers,
        device=device,
        backend=backend,
        ray=ray,
        insecure=insecure,
        look_every=look_every,
        checkpoint_every=checkpoint_every,
        stop_after=stop_after,
    )
    with Runner(options, progress=progress) as runner:
        return runner(experiment)


class Runner:
    """Runs experiments one after the other, all into one store, which is opened when the first one begins.

    Use it in a ``with`` block, and call it with an experiment to get its results.

    Args:
        options: how.
        progress: whether to show how far it is.

    Attributes:
        added: how many learners the store has got so far.
    """

    def __init__(self, options: Options, *, progress: bool = True) -> None:
        self.added = 0
        self._deadline = None if options.stop_after is None else time.monotonic() + options.stop_after
        self._options = options
        self._progress = progress
        self._exit = ExitStack()
        self._store: Store | None = None

    def __enter__(self) -> "Runner":
        self._show = self._exit.enter_context(display("auto" if self._progress else "none"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def __call__(self, experiment: Experiment) -> Results:
        options = self._options
        # Before the store is opened: who names a device that is not there shall not find an empty file.
        device, workers, executor = options.executor_for(experiment)
        store = self.store
        before = len(store)
        try:
            return execute(
                experiment,
                store,
                executor,
                workers=workers,
                device=device,
                checkpoints=options.checkpoints,
                show=self._show,
                own_backend=isinstance(options.backend, type),
                job_size=options.job_size,
                deadline=self._deadline,
            )
        finally:
            self.added += len(store) - before

    @property
    def store(self) -> Store:
        """Where the results go; to ask for it opens it."""
        if self._store is None:
            path = ":memory:" if self._options.store is None else self._options.store
            self._store = self._exit.enter_context(Store.write(path))
        return self._store


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
    job_size: int | None = None,
    deadline: float | None = None,
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
        job_size: how many learners a job has at most; None: as many as help.
        deadline: when, by :func:`time.monotonic`, to stop and raise :class:`TimeUp`; None: never.
    """
    everything = whole(experiment)
    jobs = pending(everything, store, workers, device, checkpoints, job_size)
    if not own_backend:
        _check_can_run(jobs)
    progress = Progress.of(jobs, already=len(everything.learners) - sum(len(job.learners) for job in jobs))
    with published(show, store.path) as tell:
        tell(progress)

        def watcher(job: Job, done: int, diverged: int) -> None:
            progress.update(job, done, diverged)
            tell(progress)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeUp

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
    wanted: Experiment | Job,
    store: Store,
    workers: int,
    device: str,
    checkpoints: Checkpoints | None = None,
    job_size: int | None = None,
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
    most = job_size or most_learners(device)
    return begun + (plan(missing, workers, most, mixed=mixed) if missing.learners else [])
