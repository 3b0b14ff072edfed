"""Executors that compute jobs in this process, or in several processes on this machine.

An executor is a function of jobs and a :class:`Watcher` that yields each job with its records when it is finished. Work that
is unfinished when it is closed is saved in the checkpoints.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

from upgd import plugins
from upgd.experiments.execution.jobs import Checkpoints, Job, Snapshot
from upgd.experiments.execution.work import compute, uses
from upgd.population.choose import BackendChoice, mute_slow_backend, say_slow_backend
from upgd.population.interrupt import say_stopping
from upgd.population.threads import share
from upgd.store import Record

__all__ = ["Executor", "Settings", "Watcher", "in_process", "in_processes", "processes_that_help"]

#: Called from time to time with a job, its number of learner-steps done, and its number of diverged learners.
Watcher: TypeAlias = Callable[[Job, int, int], None]
Finished: TypeAlias = Iterator[tuple[Job, list[Record]]]
Executor: TypeAlias = Callable[[Sequence[Job], Watcher], Finished]

#: Number of attempts for a job whose process dies.
_ATTEMPTS = 3
_PATIENCE_S = 20.0

#: Signals that users and batch systems send, often to all processes at once; only the parent handles them.
_TOLD_TO_STOP = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class Settings:
    """Options for computing jobs.

    Attributes:
        device: a torch device; on a Ray cluster also ``"auto"``.
        backend: the population's backend; a class must be importable if there are several processes.
        checkpoints: storage for snapshots of unfinished jobs; None for no snapshots.
        every: seconds between snapshots.
        look_every: number of steps between diagnostics; None for no diagnostics.
    """

    device: str = "cpu"
    backend: BackendChoice = "auto"
    checkpoints: Checkpoints | None = None
    every: float = 120.0
    look_every: int | None = None


def in_process(settings: Settings) -> Executor:
    """Compute jobs one after the other in this process. On Ctrl-C, the running job is saved."""

    def execute(jobs: Sequence[Job], watcher: Watcher) -> Finished:
        for job in jobs:
            yield job, _attend(job, settings, partial(watcher, job))

    return execute


def in_processes(settings: Settings, workers: int) -> Executor:
    """Compute jobs in several processes on this machine.

    On a CPU, the processes share the cores. With GPUs, each process uses one of them.
    """

    def execute(jobs: Sequence[Job], watcher: Watcher) -> Finished:
        if settings.backend == "auto" and torch.device(settings.device).type == "cpu" and not find_spec("numba"):
            say_slow_backend("numba is not installed (run pip install 'upgd[run]')")
        for job in jobs:
            plugins.check_elsewhere(uses(job, settings.backend, settings.look_every), runs_main=True)
        pool = _Pool(settings, min(workers, len(jobs)), watcher)
        try:
            yield from pool.run(jobs)
        except KeyboardInterrupt:
            say_stopping()
            raise
        finally:
            pool.stop()

    return execute


def processes_that_help(device: str) -> int:
    """Return the number of processes that saturates this machine: one per core, or per GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.device_count() if torch.device(device).index is None else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _attend(job: Job, settings: Settings, tell: Callable[[int, int], None]) -> list[Record]:
    """Compute a job from its last snapshot to its end, saving snapshots periodically and on interruption."""
    checkpoints = settings.checkpoints
    saved = time.monotonic()
    latest: Callable[[], Snapshot] | None = None

    def watch(done: int, diverged: int, snapshot: Callable[[], Snapshot]) -> None:
        nonlocal saved, latest
        latest = snapshot
        tell(done, diverged)
        if checkpoints is not None and time.monotonic() - saved >= settings.every:
            checkpoints.save(job, snapshot())
            saved = time.monotonic()

    try:
        begun = checkpoints.load(job) if checkpoints is not None else None
        return compute(job, settings.device, settings.backend, begun, watch, settings.look_every)
    except KeyboardInterrupt:
        if checkpoints is not None and latest is not None:
            checkpoints.save(job, latest())
        raise


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None


@dataclass
class _Pool:
    """Processes that receive one job after the other, each through a pipe."""

    settings: Settings
    size: int
    watcher: Watcher
    workers: list[_Worker] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job]) -> Finished:
        waiting = list(reversed(jobs))
        for number in range(self.size):  # one by one, so that started workers can be stopped at any time
            self.workers.append(self._start(number))
        for worker in self.workers:
            self._give(worker, waiting.pop())
        while busy := [worker for worker in self.workers if worker.job is not None]:
            for pipe in wait([worker.pipe for worker in busy]):
                worker = next(w for w in busy if w.pipe is pipe)
                job = worker.job
                assert job is not None
                kind, *content = self._message(worker)
                if kind == "progress":
                    self.watcher(job, *content)
                    continue
                if kind == "failed":
                    error, trace = content
                    error.add_note(f"in a worker:\n{trace}")
                    raise error
                if kind == "done":
                    worker.job = None
                    yield job, content[0]
                elif kind == "died":
                    self._judge_death(worker, job)
                    waiting.append(job)
                    number = self.workers.index(worker)
                    worker = self.workers[number] = self._start(number)
                if waiting:
                    self._give(worker, waiting.pop())

    def stop(self) -> None:
        """Make the workers save their work, and end them; at once if Ctrl-C is pressed again."""
        for worker in self.workers:
            worker.pipe.close()
        deadline = time.monotonic() + _PATIENCE_S
        try:
            for worker in self.workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self.workers:
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()

    def _start(self, number: int) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        device = self.settings.device
        if device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        threads = max(1, processes_that_help("cpu") // self.size)
        settings = replace(self.settings, device=device)
        process = context.Process(
            target=_serve,
            args=(theirs, settings, threads, plugins.modules()),
            name=f"upgd-worker-{number}",
            daemon=True,
        )
        with _signals_stay_here():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.job = job
        with suppress(OSError):  # a dead worker is detected when reading its next message
            worker.pipe.send((job, plugins.third_party(job.uses())))

    def _message(self, worker: _Worker) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = worker.pipe.recv()
            return message
        except (EOFError, OSError):
            return ("died",)

    def _judge_death(self, worker: _Worker, job: Job) -> None:
        worker.pipe.close()
        worker.process.join()
        self.attempts[job.name] = self.attempts.get(job.name, 0) + 1
        if self.attempts[job.name] >= _ATTEMPTS:
            # Python exited with a traceback: a new process runs the script from the top and starts workers itself.
            ended_by_python = worker.process.exitcode == 1
            remedy = (
                "put what starts it under `if __name__ == '__main__':`" if ended_by_python else "use fewer --workers"
            )
            raise ChildProcessError(
                f"the process that computed {job.describe()} of {job.problem} died {_ATTEMPTS} times (exit code "
                f"{worker.process.exitcode}); if {'this is a script' if ended_by_python else 'memory is short'}, {remedy}"
            )


@contextmanager
def _signals_stay_here() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in processes that start inside this block. Terminals and batch systems send them to all
    processes; the parent tells the workers instead, so that they can save their work."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks both signals (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, settings: Settings, threads: int, modules: Sequence[str]) -> None:
    """Run a worker: compute jobs from the pipe until the parent closes it or dies."""
    for number in _TOLD_TO_STOP:
        signal.signal(number, signal.SIG_IGN)
    share(threads)
    mute_slow_backend()  # the parent gives the warning

    def tell(done: int, diverged: int) -> None:
        try:
            if pipe.poll():
                raise KeyboardInterrupt  # a busy worker receives no messages, so this is the end of the pipe
            pipe.send(("progress", done, diverged))
        except OSError:
            raise KeyboardInterrupt from None

    job: Job | None = None
    try:
        while True:
            following, needed = pipe.recv()
            job = following.like(job)
            try:
                plugins.load_elsewhere(modules, needed)
                records = _attend(job, settings, tell)
            except Exception as error:
                try:
                    pipe.send(("failed", _portable(error), traceback.format_exc()))
                except OSError:  # the parent has stopped and assumes that the work was saved
                    print(f"upgd: {error}", file=sys.stderr, flush=True)
                    raise
            else:
                pipe.send(("done", records))
    except (EOFError, OSError, KeyboardInterrupt):
        sys.exit(0)


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent through the pipe; not every class can be recreated from its message."""
    plain = type(error) in (ValueError, TypeError, OSError, RuntimeError, plugins.PluginError)
    return type(error)(str(error)) if plain else RuntimeError(f"{type(error).__name__}: {error}")
