"""Run a sweep on a Ray cluster.

Jobs are sent to the cluster in slices: a task resumes a job, computes for a while, and returns either the finished records
or a snapshot. Only the driver writes: records to the store, snapshots to the checkpoints next to it. Losing a node therefore
costs one slice, which Ray assigns to another node, and a driver that is stopped can resume.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from upgd import plugins
from upgd.experiments.execution.jobs import Job, Snapshot
from upgd.experiments.execution.work import Pause, compute, device_named, uses
from upgd.experiments.execution.workers import Executor, Settings, Watcher
from upgd.population.choose import BackendChoice
from upgd.store import Record

__all__ = ["on_ray"]

#: Number of times that Ray retries a slice after its worker is lost.
_RETRIES = 10
_START = "start one with `ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`"


def on_ray(address: str, settings: Settings, *, insecure: bool = False) -> tuple[str, int, Executor]:
    """Connect to a Ray cluster.

    Args:
        address: The address of the head, ``HOST:PORT``; ``"auto"`` for the cluster that this machine belongs to; ``"local"``
            to start one on this machine, which ends with the process.
        settings: How to compute jobs. The device ``"auto"`` uses the cluster's GPUs if it has any, one per job. Snapshots
            are those of the driver; losing a node costs at most the time between them.
        insecure: Accept a cluster without token authentication: anyone who can reach its ports may run code.

    Returns:
        The kind of device, the number of jobs that the cluster computes at a time, and the executor.
    """
    ray = _connected(address, insecure)
    device, checkpoints = settings.device, settings.checkpoints
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    on_gpu = device.startswith("cuda") or (device == "auto" and gpus > 0)
    if on_gpu and not gpus:
        raise ValueError(f"device={device!r} needs a GPU, but the Ray cluster at {address} has none; use --device cpu")
    slots = gpus if on_gpu else max(1, int(resources.get("CPU", 1)))
    kind = "cuda" if on_gpu else "cpu"
    needs = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
    task = ray.remote(**needs, max_retries=_RETRIES)(compute_slice)

    def execute(jobs: Sequence[Job], watcher: Watcher) -> Iterator[tuple[Job, list[Record]]]:
        waiting = list(reversed(jobs))
        running: dict[Any, Job] = {}

        def submit(job: Job, begun: Snapshot | None) -> None:
            how = settings.backend, begun, settings.every, settings.look_every
            running[task.remote(job, kind, *how, modules, plugins.third_party(job.uses()), path)] = job

        for job in jobs:
            plugins.check_elsewhere(uses(job, settings.backend, settings.look_every), runs_main=False)
        modules, path = plugins.modules(), tuple(sys.path)
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    job = waiting.pop()
                    submit(job, checkpoints.load(job) if checkpoints is not None else None)
                (ready, *_), _ = ray.wait(list(running), num_returns=1)
                job = running.pop(ready)
                records, snapshot, done, diverged = _got(ray, ready)
                if records is not None:
                    yield job, records
                    continue
                if checkpoints is not None and snapshot is not None:
                    checkpoints.save(job, snapshot)
                submit(job, snapshot)
                watcher(job, done, diverged)
        finally:
            # The tasks end with the driver. Cancelling them first would race with their results, in which case Ray (2.60)
            # ends the whole process.
            ray.shutdown()

    return kind, slots, execute


def compute_slice(
    job: Job,
    device: str,
    backend: BackendChoice,
    begun: Snapshot | None,
    seconds: float,
    look_every: int | None = None,
    modules: Sequence[str] = (),
    needed: Sequence[tuple[str, str]] = (),
    path: Sequence[str] = (),
) -> tuple[list[Record] | None, Snapshot | None, int, int]:
    """Compute a job for ``seconds``, or to its end, with the driver's plugins. These must be installed here or in a folder of
    the driver's path that exists on this machine.

    Returns:
        The records, or None and a snapshot; and the number of learner-steps done and of diverged learners.
    """
    plugins.load_elsewhere(modules, needed, path)
    deadline = time.monotonic() + seconds
    seen: list[Any] = []

    def watch(done: int, diverged: int, snapshot: Callable[[], Snapshot]) -> None:
        began = bool(seen)
        seen[:] = [snapshot, done, diverged]
        if began and done < job.learner_steps and time.monotonic() >= deadline:  # at least one block
            raise Pause

    try:
        records = compute(job, device_named(device), backend, begun, watch, look_every)
        return records, None, job.learner_steps, 0
    except Pause:
        snapshot, done, diverged = seen
        return None, snapshot(), done, diverged


def _connected(address: str, insecure: bool) -> Any:
    if address == "local" and not insecure and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it on import and creates the token
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("a Ray cluster needs ray, which is not installed; run pip install 'upgd[ray]'") from None
    if not ray.is_initialized():
        _check_reachable(address)
        if not insecure and not _asks_for_a_token(ray.__version__):
            _refuse_or_warn(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"no Ray cluster responds at {address} ({first}); {_START}") from error
    return ray


def _asks_for_a_token(version: str) -> bool:
    """Return whether clusters of this version of Ray, with the settings of this environment, require a token."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < (2, 52):
        return False  # it does not know tokens
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None:
        return mode.lower() == "token"
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return numbers >= (2, 60) and bool(given or Path.home().joinpath(".ray", "auth_token").exists())


def _refuse_or_warn(address: str) -> None:
    """Refuse or warn about an open cluster: Ray listens on all interfaces and runs code for anyone who connects."""
    if address == "local":
        raise ValueError(
            "ray='local' would start a cluster that runs code for anyone who can reach this machine; set "
            "RAY_AUTH_MODE=token (Ray 2.52 or newer), or accept this with --insecure (insecure=True)"
        )
    logging.getLogger("upgd.experiments.execution.cluster").warning(
        "upgd: the Ray cluster at %s requires no token, so anyone who can reach it can run code there; set "
        "RAY_AUTH_MODE=token on all its machines, or silence this with --insecure",
        address,
    )


def _check_reachable(address: str) -> None:
    """Raise ValueError if nothing responds at an address; Ray itself would end the whole process."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"the address of a Ray cluster is HOST:PORT, such as 10.0.0.5:6379, or auto; not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster responds at {address} ({error.strerror or error}); {_START}") from error


def _got(ray: Any, reference: Any) -> tuple[list[Record] | None, Snapshot | None, int, int]:
    """Return the result of a task; its exceptions are raised with their original type."""
    try:
        answer: tuple[list[Record] | None, Snapshot | None, int, int] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from error
    return answer
