"""Run experiments: results in the store are not computed again, and interrupted runs resume.

:func:`run` runs one experiment; a :class:`Runner` runs several that share a store. The commands use the same functions.
"""

import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upgd import plugins
from upgd.experiments.analysis.results import Results
from upgd.experiments.analysis.wording import plural
from upgd.experiments.execution.jobs import Checkpoints, Job, plan, whole
from upgd.experiments.execution.progress import Display, Progress, display, published
from upgd.experiments.execution.time_limit import TimeLimit, TimeUp
from upgd.experiments.execution.work import device_named, most_learners
from upgd.experiments.execution.workers import Executor, Settings, in_process, in_processes, processes_that_help
from upgd.experiments.spec.declare import Experiment, Grid
from upgd.population.choose import BackendChoice, choose
from upgd.population.spec import groups
from upgd.store import Record, Store

__all__ = ["Options", "Runner", "TimeUp", "execute", "mistake", "pending", "run"]

log = logging.getLogger("upgd.experiments")

#: With less work than this, starting several processes does not pay off; the threads of one process use all cores anyway.
_SMALL = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for running experiments.

    Attributes:
        store: the file of results; None to keep them in memory only.
        workers: number of processes; None for as many as are useful.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: the population's backend: ``"auto"``, ``"torch"`` or ``"kernel"``, or a class.
        ray: the address of a Ray cluster to compute on; see :func:`upgd.experiments.execution.cluster.on_ray`.
        insecure: whether to accept a cluster without token authentication.
        look_every: number of steps between diagnostics; None for no diagnostics.
        checkpoint_every: seconds between snapshots of unfinished work.
        stop_after: seconds after which a :class:`Runner` saves its work and raises :class:`TimeUp`; None for no limit.
            Without a store, unfinished jobs are lost. One process then starts only jobs that, at the speed of the largest
            one so far, end within the limit; the last one has fewer learners if that is necessary.
        job_size: maximum number of learners per job; None for as many as are useful. Small jobs lose less work if snapshots
            do not outlive the machine.
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
        """The storage for unfinished work."""
        return None if self.store is None else Checkpoints.beside(self.store)

    def workers_for(self, experiment: Experiment, device: str) -> int:
        """Return the number of processes for an experiment on this machine."""
        return self.workers or (1 if experiment.learner_steps < _SMALL else processes_that_help(device))

    def executor_for(self, experiment: Experiment) -> tuple[str, int, Executor]:
        """Return the device of the jobs, the number of concurrent jobs, and the executor."""
        device = self.device if self.ray is not None else device_named(self.device)
        settings = Settings(device, self.backend, self.checkpoints, self.checkpoint_every, self.look_every)
        if self.ray is not None:
            from upgd.experiments.execution.cluster import on_ray

            return on_ray(self.ray, settings, insecure=self.insecure)
        workers = self.workers_for(experiment, device)
        return device, workers, in_process(settings) if workers == 1 else in_processes(settings, workers)


def mistake(options: Any, spelled: Callable[[str], str], with_value: str) -> str | None:
    """Return an error message for invalid options, without a full stop; None if they are valid.

    Args:
        options: :class:`Options`, or anything with the same attributes.
        spelled: maps the name of an option to the form that users write.
        with_value: a format string for an option with its value.
    """
    for name in ("workers", "look_every", "job_size"):
        number = getattr(options, name)
        if number is not None and number < 1:
            return f"{spelled(name)} must be at least 1, not {number}"
    for name in ("checkpoint_every", "stop_after"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds >= 0:
            remedy = "use 120 for two minutes" if name == "checkpoint_every" else "remove it to run without a limit"
            return f"{spelled(name)} must be a number of seconds of at least 0, not {seconds:g}; {remedy}"
    ray = spelled("ray")
    if options.insecure and options.ray is None:
        return f"{spelled('insecure')} applies to a Ray cluster only; remove it, or name the cluster with {ray}"
    if options.ray is not None and options.workers is not None:
        workers, cluster = spelled("workers"), with_value.format(ray, options.ray)
        return (
            f"{with_value.format(workers, options.workers)} cannot be combined with {cluster}, where the cluster determines "
            "the number of concurrent jobs; remove one of them"
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
    """Run an experiment, or the missing part of it, and return its results.

    Args:
        problem: An :class:`Experiment`, or its first argument.
        methods, declaration: Other arguments of :class:`Experiment`, if ``problem`` is a name.
        store: The file of results, created if necessary. Results in it are not computed again, and an interrupted run
            resumes. Default: None, results are only returned.
        workers: Number of processes. Default: 1; everything runs in this process, which uses all cores with threads. More
            processes require an importable script (``if __name__ == "__main__":``).
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Default: "auto".
        backend: The population's backend: ``"auto"``, ``"torch"`` or ``"kernel"``; or a custom class
            (:class:`upgd.population.backend.Backend`). Default: "auto".
        progress: Whether to show progress. Default: False.
        look_every: Record diagnostics of the learners every so many steps, for the report. This takes time and does not
            affect training. Learners that are already in the store are not run again. Default: None.
        ray: The address of a Ray cluster to compute on, ``HOST:PORT``, ``"auto"`` or ``"local"``.
        insecure: Whether to accept a cluster without token authentication. Default: False.
        checkpoint_every: Seconds between snapshots of unfinished work. Default: 120.
        stop_after: Seconds after which to save the work and raise
            :class:`upgd.experiments.execution.time_limit.TimeUp`; the same call resumes. Default: None.

    Returns:
        The results of all learners of the experiment, also of those that were in the store.

    Example:
        >>> small = {"seeds": 2, "steps": 40, "options": {"task_length": 20}, "backend": "torch"}
        >>> result = run("output-permuted-digits", {"sgd": {"lr": 0.03}}, **small)
        >>> result.records[0].ends.tolist()
        [20, 40]
    """
    experiment = problem if isinstance(problem, Experiment) else Experiment(problem, methods or (), **declaration)
    if isinstance(problem, Experiment) and (methods is not None or declaration):
        raise TypeError("pass an Experiment, or the arguments of one, not both")
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
    """Runs experiments one after the other into one store, which is opened when the first one starts.

    Use it in a ``with`` block, and call it with an experiment to get its results.

    Args:
        options: how to run them.
        progress: whether to show progress.

    Attributes:
        added: number of learners added to the store so far.
    """

    def __init__(self, options: Options, *, progress: bool = True) -> None:
        self.added = 0
        self._limit = None if options.stop_after is None else TimeLimit(options.stop_after)
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
        # Before the store is opened, so that an invalid device or a missing data set does not leave an empty file.
        device, workers, executor = options.executor_for(experiment)
        experiment.stream()
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
                limit=self._limit,
            )
        finally:
            self.added += len(store) - before

    @property
    def store(self) -> Store:
        """The store, opened on first use."""
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
    limit: TimeLimit | None = None,
) -> Results:
    """Compute everything that is not in the store, and store every job when it is finished.

    Args:
        experiment: the experiment.
        store: a store open for writing.
        executor: computes the jobs.
        workers: number of concurrent jobs.
        device: the device of the jobs.
        checkpoints: storage of unfinished jobs.
        show: called with the progress.
        own_backend: whether jobs run on a custom backend, which may support what ours do not.
        job_size: maximum number of learners per job; None for as many as are useful.
        limit: when to stop and raise :class:`TimeUp`; None for no limit.
    """
    everything = whole(experiment)
    reused = everything.digests & store.digests()
    jobs = pending(everything, store, workers, device, checkpoints, job_size)
    if not own_backend:
        _check_can_run(jobs)
    progress = Progress.of(jobs, already=len(everything.learners) - sum(len(job.learners) for job in jobs))
    with published(show, store.path) as tell:
        tell(progress)

        def watcher(job: Job, done: int, diverged: int) -> None:
            progress.update(job, done, diverged)
            tell(progress)
            if limit is not None:
                limit.check()

        batches: Iterable[Sequence[Job]] = [jobs] if jobs else []
        if limit is not None and checkpoints is None and workers == 1:  # a job that does not end in time is lost
            batches = limit.fitting(jobs)
        for batch in batches:
            # Closing the executor's generator, also on Ctrl-C, makes it save its work.
            with closing(executor(batch, watcher)) as finished:  # type: ignore[type-var]
                for job, records in finished:
                    store.add(records)
                    if checkpoints is not None:
                        checkpoints.remove(job)
                    progress.finish(job, sum(record.diverged_at is not None for record in records))
                    tell(progress)
    found = {
        record.key.digest: record for record in store.records(problem=everything.problem, digests=everything.digests)
    }
    _warn_of_other_sources([found[digest] for digest in reused], store.path)
    return Results([found[everything.digest_of[learner]] for learner in everything.learners])


def _warn_of_other_sources(reused: Iterable[Record], path: Path) -> None:
    """Warn if third-party code has changed since results were stored, because a key names components, not their code."""
    affected: dict[str, list[Record]] = {}
    for record in reused:
        for module in plugins.changed(record.plugins or {}):
            affected.setdefault(module, []).append(record)
    for module, records in affected.items():
        key = records[0].key  # all are of one experiment
        methods = ",".join(sorted({record.key.method for record in records}))
        chosen = ("--problem", key.problem, "--network", key.network, "--steps", str(key.steps), "--methods", methods)
        log.warning(
            "upgd: reused %s of an earlier source or version of %s; to compute them again, delete them with `%s`",
            plural(len(records), "result"),
            module,
            shlex.join(["upgd", "runs", "delete", *chosen, "--store", str(path)]),
        )


def _check_can_run(jobs: Iterable[Job]) -> None:
    """Raise ValueError before any work starts if the engine cannot run a method with this network."""
    seen: set[tuple[Any, ...]] = set()
    for job in jobs:
        for learner in job.learners:
            variant = (learner.method, learner.kind)
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
    """Return the jobs of an experiment, or of a single job, that are not in the store; unfinished jobs come first."""
    everything = wanted if isinstance(wanted, Job) else whole(wanted)
    _ = everything.built  # raises errors before any work starts
    there = store.digests()
    begun: list[Job] = []
    missing = everything.without(there)
    if checkpoints is not None:
        begun = checkpoints.unfinished(missing, there)
        missing = missing.without(there.union(*(job.digests for job in begun)))
    mixed = device.startswith("cuda")  # a GPU can run several groups at the same time
    most = job_size or most_learners(device)
    return begun + (plan(missing, workers, most, mixed=mixed) if missing.learners else [])
