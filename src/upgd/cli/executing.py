"""What commands that compute for long have in common: who computes, and how they end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from upgd.cli.options import Execution, UsageError, store_path

if TYPE_CHECKING:
    from upgd.experiments import Experiment

__all__ = ["check", "executor_of", "terminable"]

#: Less than this is done before several processes have started; the threads of one use all cores, too.
_SMALL = 1_000_000


def executor_of(experiment: "Experiment", execution: Execution) -> tuple[str, int, Any]:
    """The device that units shall fill, how many at a time, and who computes them."""
    from upgd.experiments.units import Checkpoints
    from upgd.experiments.work import device_named
    from upgd.experiments.workers import Settings, in_process, in_processes, processes_that_help

    check(execution)
    checkpoints = Checkpoints.beside(store_path(execution.store))
    if execution.ray is not None:
        from upgd.distribute import on_ray

        return on_ray(
            execution.ray,
            execution.device,
            execution.backend,
            checkpoints,
            execution.checkpoint_every,
            look_every=execution.look_every,
        )
    device = device_named(execution.device)
    workers = execution.workers or (1 if experiment.learner_steps < _SMALL else processes_that_help(device))
    settings = Settings(
        device, execution.backend, checkpoints, execution.checkpoint_every, look_every=execution.look_every
    )
    return device, workers, in_process(settings) if workers == 1 else in_processes(settings, workers)


def check(execution: Execution) -> None:
    """Refuse numbers that make no sense."""
    for option, number in (("--workers", execution.workers), ("--look-every", execution.look_every)):
        if number is not None and number < 1:
            raise UsageError(f"{option} must be 1 or more, not {number}.")
    if not execution.checkpoint_every >= 0:
        raise UsageError(f"--checkpoint-every must be a number of seconds, not {execution.checkpoint_every}.")


@contextmanager
def terminable() -> Iterator[None]:
    """A polite kill, as batch systems send, saves the work as Ctrl-C does; also where Ctrl-C is ignored, as by ``nohup``."""
    killed = False

    def kill(*_: object) -> None:
        nonlocal killed
        killed = True
        signal.raise_signal(signal.SIGINT)  # and not an exception: a kernel at work holds Ctrl-C back until it can stop

    def interrupt(*_: object) -> None:
        if killed:
            raise KeyboardInterrupt

    usual = {signal.SIGTERM: signal.signal(signal.SIGTERM, kill)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        usual[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
