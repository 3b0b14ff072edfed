"""Progress of a sweep: bars in a terminal or a notebook, plain lines in a file."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

if TYPE_CHECKING:  # jobs need torch, but durations are also used when only reading results
    from upgd.experiments.execution.jobs import Job

__all__ = ["Display", "Progress", "ProgressFile", "display", "duration", "published"]

#: Minimum seconds between plain lines, and as a fraction of the time so far, which keeps logs of long runs short.
_FIRST_LINE_S, _LATER_LINES = 10.0, 0.1

#: Seconds after which a rate is shown, even if little has been done.
_SOME_TIME_S = 60.0

#: Seconds between updates of the file that other processes read.
_FILE_S = 1.0

#: Minimum width of a bar with its name and percentage.
_BAR_WIDTH = 40


@dataclass
class Progress:
    """The progress of a sweep.

    Attributes:
        total: learner-steps of all jobs.
        jobs: number of jobs.
        already: number of learners in the store at the start.
        done: learner-steps of each running job, by the name of the job.
        names: description and total learner-steps of each job that has begun.
        finished: number of finished jobs; ``finished_steps`` is the number of their learner-steps.
        learners: number of finished learners.
        wanted: number of learners at the end, including those already in the store.
    """

    total: int
    jobs: int
    already: int = 0
    done: dict[str, int] = field(default_factory=dict)
    names: dict[str, tuple[str, int]] = field(default_factory=dict)
    finished: int = 0
    finished_steps: int = 0
    learners: int = 0
    wanted: int = 0
    _diverged: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _at_work: tuple[float, int] | None = None  #: time and number of learner-steps at the first sign of work

    @classmethod
    def of(cls, jobs: "Sequence[Job]", already: int = 0) -> "Progress":
        wanted = already + sum(len(job.learners) for job in jobs)
        return cls(sum(job.learner_steps for job in jobs), len(jobs), already, wanted=wanted)

    def update(self, job: "Job", done: int, diverged: int) -> None:
        """Record the progress of a job."""
        self.names.setdefault(job.name, (job.describe(), job.learner_steps))
        self._first.setdefault(job.name, done)
        # Steps lost with a dead worker are repeated, but they count as work when estimating the speed.
        self._first[job.name] -= max(0, self.done.get(job.name, done) - done)
        self.done[job.name] = done
        self._diverged[job.name] = diverged
        self._note_first_work()

    def finish(self, job: "Job", diverged: int) -> None:
        """Record that a job is stored."""
        self._first.setdefault(job.name, 0)
        self._diverged[job.name] = diverged
        self.done.pop(job.name, None)
        self.finished += 1
        self.finished_steps += job.learner_steps
        self.learners += len(job.learners)
        self._note_first_work()

    def _note_first_work(self) -> None:
        if self._at_work is None and self._since_it_began > 0:
            self._at_work = time.monotonic(), self._since_it_began

    @property
    def steps(self) -> int:
        """Number of learner-steps done."""
        return self.finished_steps + sum(self.done.values())

    @property
    def share(self) -> float:
        """Fraction of the learner-steps that are done."""
        return self.steps / self.total if self.total else 1.0

    @property
    def diverged(self) -> int:
        """Number of diverged learners so far."""
        return sum(self._diverged.values())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def rate(self) -> float:
        """Learner-steps per second, excluding the time before the first step as soon as possible, because compilation may
        take longer than the rest."""
        since, before = self._at_work or (self._began, 0)
        if self._since_it_began == before:
            since, before = self._began, 0
        return (self._since_it_began - before) / max(time.monotonic() - since, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """The estimated remaining seconds; None while there is too little data."""
        return None if self._little else (self.total - self.steps) / self.rate

    @property
    def _little(self) -> bool:
        """Whether too little has been done to estimate the speed; the time may have been spent on preparation."""
        return self._since_it_began <= 0.01 * self.total

    @property
    def _since_it_began(self) -> int:
        return self.steps - sum(self._first.values())

    def line(self) -> str:
        """Return a one-line summary."""
        return ", ".join([f"{self.share:4.0%}", *self.parts().values()])

    def parts(self) -> dict[str, str]:
        """Return the parts of the summary other than the percentage."""
        learners = self.learners + self.already
        parts = {
            "jobs": f"{self.finished}/{self.jobs} jobs" if self.jobs else "nothing left to compute",
            "learners": f"{learners} learner{'' if learners == 1 else 's'} stored",
        }
        if self.rate > 0 and (self.seconds >= _SOME_TIME_S or not self._little):
            parts["rate"] = f"{count(self.rate)} learner-steps/s"
        if self.jobs and self._since_it_began == 0:
            parts["starting"] = "starting (compiles the first time)"
        if self.seconds_left and self.finished < self.jobs:
            parts["left"] = f"{duration(self.seconds_left)} left"
        if self.diverged:
            parts["diverged"] = f"{self.diverged} diverged"
        return parts


Display: TypeAlias = Callable[[Progress], None]


class ProgressFile:
    """The progress of a store's sweep for other processes: a small file next to the store, which exists during the sweep.

    Example:
        >>> ProgressFile.beside(Path("upgd.db")).read() is None
        True
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = -_FILE_S

    @classmethod
    def beside(cls, store: Path) -> "ProgressFile":
        """Return the progress file of a store; symbolic links are resolved."""
        store = store.resolve()
        return cls(store.with_name(f"{store.name}.progress"))

    def write(self, progress: Progress) -> None:
        """Write the progress, at most once per interval. Errors are ignored, so that they cannot end a sweep."""
        if time.monotonic() - self._written < _FILE_S:
            return
        self._written = time.monotonic()
        learners = f"{progress.learners + progress.already:,} of {progress.wanted:,} learners stored"
        content = {
            "at": time.time(),
            "share": progress.share,
            "text": ", ".join((progress.parts() | {"learners": learners}).values()),
        }
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                partial.write_text(json.dumps(content), encoding="utf-8")
                partial.replace(self.path)
            finally:
                partial.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Return ``share`` (0 to 1), ``text`` and ``age``, the seconds since it was written; None if no sweep is running."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            age = max(0.0, time.time() - float(content["at"]))
            return {"share": float(content["share"]), "text": str(content["text"]), "age": age}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove(self) -> None:
        """Remove the file at the end of the sweep."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


@contextmanager
def published(show: Display, store: Path) -> Iterator[Display]:
    """Context manager: a display that also writes the :class:`ProgressFile` of a store and removes it at the end."""
    if str(store) == ":memory:":
        yield show
        return
    file = ProgressFile.beside(store)

    def both(progress: Progress) -> None:
        show(progress)
        file.write(progress)

    try:
        yield both
    finally:
        file.remove()


@contextmanager
def display(mode: Literal["auto", "plain", "none"] = "auto", stream: TextIO | None = None) -> Iterator[Display]:
    """Show progress during the ``with`` block: bars in a terminal or notebook, lines elsewhere, or nothing."""
    stream = stream or sys.stderr
    if mode == "none":
        yield lambda progress: None
    elif mode == "auto" and (bars := _bars(stream)) is not None:
        with bars:
            yield bars
    else:
        yield _Lines(stream)


def duration(seconds: float) -> str:
    """Format seconds for people: 42 s, 3 min 10 s, 2 h 5 min, 3 d 4 h."""
    for size, unit, smaller, rest in ((86_400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // rest)} {smaller}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def count(number: float) -> str:
    """Format a number with three digits and a metric prefix: 1.2 M."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"


class _Lines:
    """Prints a line from time to time, and one at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._of: Progress | None = None
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress is not self._of:  # a search is followed by final runs, each with its own clock
            self._of, self._next = progress, 0.0
        over = progress.finished == progress.jobs
        if over or progress.seconds >= self._next:
            with suppress(OSError):  # a closed pipe, as after `… | head`, must not stop the work
                print(progress.line(), file=self._stream, flush=True)
            self._next = progress.seconds + max(_FIRST_LINE_S, _LATER_LINES * progress.seconds)


def _bars(stream: TextIO) -> "_Bars | None":
    """Return bars if the stream supports them and rich is installed, otherwise None."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    console = Console(file=stream)
    return _Bars(console) if console.is_terminal or console.is_jupyter else None


class _Bars:
    """A bar for all jobs and one for each running job."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Bars(*columns, console=console, refresh_per_second=4)
        self._console = console
        self._tasks: dict[str, Any] = {}
        self._overall: Any = None

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if self._overall is None:
            self._overall = self._bars.add_task("[bold]all", note="")
        done = progress.steps if progress.total else 1
        self._bars.update(self._overall, total=max(progress.total, 1), completed=done, note=self._note(progress))
        for name in set(self._tasks) - set(progress.done):
            self._bars.remove_task(self._tasks.pop(name))
        for name, steps in progress.done.items():
            label, total = progress.names[name]
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(label, total=total, note="")
            self._bars.update(self._tasks[name], completed=steps)

    def _note(self, progress: Progress) -> str:
        """Return the text that fits next to a bar; the remaining time is dropped last."""
        parts = progress.parts()
        for name in ("learners", "rate", "jobs", "starting"):
            if len(", ".join(parts.values())) <= self._console.width - _BAR_WIDTH:
                break
            parts.pop(name, None)
        return ", ".join(parts.values())
