"""Execution options and interruption of long-running commands."""

import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from upgd.cli.options import Execution, UsageError, option_name, store_path

if TYPE_CHECKING:
    from upgd.experiments.execution.running import Options

__all__ = ["check", "check_folder", "given_options", "option_names", "options_of", "terminable"]


def options_of(execution: Execution) -> "Options":
    """Convert execution options for the package."""
    from upgd.experiments.execution.running import Options

    check(execution)
    given = {one.name: getattr(execution, one.name) for one in fields(Options)}
    return Options(**given | {"store": store_path(execution.store)})


def check(execution: Execution, *, dry_run: bool = False) -> None:
    """Reject invalid numbers and incompatible options."""
    from upgd.experiments.execution.running import mistake

    if dry_run and execution.ray is not None:
        raise UsageError("--dry-run measures this machine; leave out --ray")
    if wrong := mistake(execution, option_name, "{} {}"):
        raise UsageError(wrong)


def check_folder(output: Path, named: str) -> None:
    """Check before computing whether pages and figures can be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UsageError(f"{named}: nothing can be written there ({error.strerror}); choose another folder") from error


def given_options(execution: Execution) -> set[str]:
    """Return the execution options that a study without a choice of execution cannot use."""
    given = {one.name for one in fields(Execution) if getattr(execution, one.name) != one.default} - {"quiet"}
    everywhere = os.environ.get("UPGD_STORE")  # does not count as an option of this command
    return given - {"store"} if everywhere is not None and execution.store == Path(everywhere) else given


def option_names(arguments: Iterable[str]) -> str:
    """Return arguments as typed: --only, --steps and --sweep-seeds."""
    from upgd.experiments.analysis.wording import enumerated

    return enumerated(sorted(map(option_name, arguments)))


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM, as sent by batch systems, and a closed terminal save the work as Ctrl-C does, even where Ctrl-C is
    ignored.

    Under ``nohup``, a closed terminal is ignored.
    """
    told = False
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def stop(*_: object) -> None:
        nonlocal told
        told = True
        for number in terminals:
            if not os.isatty(number):  # it was closed: writing to it would raise an error and prevent saving the work
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        signal.raise_signal(signal.SIGINT)  # instead of an exception: a running kernel defers Ctrl-C until it can stop

    def interrupt(*_: object) -> None:
        if told:
            raise KeyboardInterrupt

    usual = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        usual[signal.SIGHUP] = signal.signal(signal.SIGHUP, stop)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        usual[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
