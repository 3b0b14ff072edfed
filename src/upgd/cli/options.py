"""Options shared by several commands, and their parsing."""

import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter, Token

from upgd.cli.errors import UsageError
from upgd.experiments.spec.settings import MOST_LEARNERS, known, of_methods
from upgd.methods import METHODS
from upgd.methods.registry import ALIASES

__all__ = [
    "DEFAULTS",
    "Declaration",
    "Execution",
    "MethodName",
    "MethodNames",
    "Steps",
    "StorePath",
    "UsageError",
    "load_torch",
    "once",
    "plain_digits",
    "read_options",
    "read_seeds",
    "read_steps",
    "read_values",
    "store_files",
    "store_path",
]


T = TypeVar("T")


def _shown_default(value: Any) -> str | None:
    """Return a default for the help; None for a flag, and for an option that can be repeated."""
    return None if value is None or value is False or value == () else str(value)


#: How all commands show defaults, and that only options with another ``negative`` have an opposite, such as --no-legend.
DEFAULTS = Parameter(show_default=_shown_default, negative=())
StorePath = Annotated[Path | None, Parameter(name="--store", env_var="UPGD_STORE")]
#: The metrics of tables, figures and pages; the names of upgd.experiments.analysis.metrics.
Shown = (
    Literal[
        "accuracy",
        "loss",
        "plasticity",
        "loss-of-plasticity",
        "forgetting",
        "dormant-units",
        "effective-rank",
        "weight-norm",
    ]
    | None
)
Json = Annotated[bool, Parameter(name="--json")]


def read_steps(text: str) -> int:
    """Parse an integer, such as 30000, 30_000 or 1e6."""
    for read in (int, float):  # 1e6 is how people write a million
        with suppress(ValueError, OverflowError):
            number = read(plain_digits(text))
            if number == int(number) and abs(number) < 2**63:  # as large as a store can hold
                return int(number)
    raise ValueError(f"it takes a whole number below 2⁶³, such as 30000 or 1e6, not {text!r}")


def plain_digits(text: str) -> str:
    """Return the text, unless it has digits of other scripts, which Python also accepts."""
    if not text.isascii():
        raise ValueError(f"{text!r} is not a number in the digits 0 to 9")
    return text


def _steps(_: Any, tokens: Sequence[Token]) -> int:
    return read_steps(tokens[0].value)


MethodName = Annotated[str | None, Parameter(help="Name of the method; `upgd methods` lists them and their settings.")]
MethodNames = Annotated[
    str | None, Parameter(help="Names of the methods, separated by commas; `upgd methods` lists them.")
]
Steps = Annotated[int | None, Parameter(converter=_steps)]


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """Options that define an experiment. The settings of all methods are added below as fields."""

    seeds: str | None = None
    steps: Steps = None
    network: str | None = None
    option: tuple[str, ...] = ()

    def settings(self) -> dict[str, list[Any]]:
        """Return the given settings as lists of values."""
        given = {name: getattr(self, name) for name in known()}
        return {name: read_values(name, text) for name, text in given.items() if text is not None}

    def rest(self) -> dict[str, Any]:
        """Return the other arguments of an experiment."""
        given: dict[str, Any] = {
            "steps": self.steps,
            "network": self.network,
            "options": read_options(self.option) or None,
        }
        if self.seeds is not None:
            given["seeds"] = read_seeds(self.seeds)
        return {name: value for name, value in given.items() if value is not None}


_OTHER_HELP = {
    "seeds": "Number of seeds (20), or a list (0,5,7). Default: 20, or 10 on CIFAR-10, as in the paper.",
    "steps": "Number of steps per learner. Default: 1e6, as in the paper; 30,000 on the embedded digits.",
    "network": "Hidden sizes such as 300-150 (300-150:tanh for another activation), linear, conv, conv-authors, or "
    "the name of a registered network. Default: that of the paper.",
    "option": "An option of the problem, such as task_length=500; can be repeated.",
}


def option_name(setting: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{setting.replace('_', '-')}"


_SETTINGS = Group("Settings of methods", sort_key=1)
_EXECUTION = Group("Execution", sort_key=2)


def _field(name: str) -> tuple[str, Any, Any]:
    older = [option_name(old) for old, present in ALIASES.items() if present == name]
    annotated = Annotated[str | None, Parameter(name=[option_name(name), *older], group=_SETTINGS)]
    return name, annotated, field(default=None)


def _help(name: str) -> str:
    """Describe a setting; if methods define it differently, describe all definitions."""
    texts: dict[str, list[str]] = {}
    for method in METHODS.values():
        if name in method.settings:
            texts.setdefault(method.settings[name].help, []).append(method.name)
    first, *others = texts
    return " ".join([first, *(f"For {', '.join(texts[text])}: {text or 'see the method.'}" for text in others)]).strip()


def _documentation() -> str:
    """Return the docstring that ``--help`` is made from."""
    lines = {name: _help(name) for name in known()}
    lines["lr"] = "Learning rate. Separate several values by commas, here and below."
    parts = [f"{name}\n    {text or 'See the method.'}" for name, text in {**lines, **_OTHER_HELP}.items()]
    return "Options that define an experiment.\n\nParameters\n----------\n" + "\n".join(parts)


if TYPE_CHECKING:
    Declaration = _Declared
else:
    # One option per setting of every registered method, including plug-ins.
    Declaration = Parameter(name="*")(
        make_dataclass(
            "Declaration",
            [_field(name) for name in known()],
            bases=(_Declared,),
            namespace={"__doc__": _documentation(), "__module__": __name__},
            frozen=True,
            kw_only=True,
        )
    )


@Parameter(name="*", group=_EXECUTION)
@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options that control execution.

    Parameters
    ----------
    store
        The file that stores results. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    workers
        Number of processes. Default: the number of cores or GPUs; one for less than a million learner-steps.
    ray
        Address of a Ray cluster to run on ("auto": the one of this machine; "local": start one).
    insecure
        Allow a Ray cluster without token authentication: anyone who can reach it can run code there.
    device
        auto, cpu, cuda, cuda:1 …
    backend
        Backend: auto, torch or kernel.
    look_every
        Record diagnostics (gates, dormant units, norms, ranks, plasticity) every N steps, for the report and for --metric.
    checkpoint_every
        Seconds between checkpoints of unfinished work.
    stop_after
        Stop after this many seconds with exit status 0. Finished runs are stored, unfinished ones are saved, and the same
        command continues them.
    job_size
        Maximum number of learners per job. Default: chosen automatically.
    quiet
        Do not show progress.
    """

    store: StorePath = None
    workers: int | None = None
    ray: str | None = None
    insecure: bool = False
    device: str = "auto"
    backend: Literal["auto", "torch", "kernel"] = "auto"
    look_every: int | None = None
    checkpoint_every: float = 120.0
    stop_after: float | None = None
    job_size: int | None = None
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False


def load_torch() -> None:
    """Import torch, with Ctrl-C ending the process immediately.

    torch swallows a KeyboardInterrupt during its import of NumPy, and the command would continue with a partial NumPy.
    """
    usual = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and usual is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, _leave)
    try:
        import upgd.experiments.execution.running  # noqa: F401
    finally:
        if mine:
            signal.signal(signal.SIGINT, usual)


def _leave(*_: object) -> None:
    print("upgd: stopped", file=sys.stderr, flush=True)
    os._exit(130)


def store_path(given: Path | None) -> Path:
    """Return the path of the store: the given one, ``UPGD_STORE``, or the default."""
    return given or Path(os.environ.get("UPGD_STORE") or "upgd.db")


def store_files(named: Sequence[Path], option: Path | None) -> list[Path]:
    """Return the stores of a command: positional as in ``upgd table a.db``, ``--store``, or ``UPGD_STORE``."""
    everywhere = os.environ.get("UPGD_STORE")  # sets the option, but does not conflict with a positional argument
    if named and option is not None and not (everywhere and option == Path(everywhere)):
        raise UsageError(f"two stores are named, {named[0]} and --store {option}; leave one of them out")
    if named and (methods := [str(path) for path in named if str(path) in METHODS and not path.exists()]):
        raise UsageError(f"there is no store {methods[0]}; methods are chosen with --methods {','.join(methods)}")
    return list(named) or [store_path(option)]


def read_values(setting: str, text: str) -> list[Any]:
    """Parse comma-separated values of a setting: numbers, words, or two numbers joined by a slash."""
    return [_value(setting, part.strip()) for part in text.split(",")]


def _value(name: str, text: str) -> Any:
    option, settings = option_name(name), of_methods(name)
    if not text:
        raise UsageError(f"{option} needs a value, or several separated by commas, such as {settings[0].example}")
    for choice in (choice for setting in settings for choice in setting.choices):
        if str(choice) == text:
            return choice
    with suppress(ValueError):
        if any(setting.pair for setting in settings):
            one, other = plain_digits(text).split("/")
            return float(one), float(other)
    with suppress(ValueError):
        if any(not (setting.is_switch or setting.pair) for setting in settings):
            return float(plain_digits(text))
    if any(setting.is_switch for setting in settings):
        return text  # the method checks it
    if settings[0].pair:
        raise UsageError(f"{option} takes two numbers joined by a slash, such as 0.9/0.999, not {text!r}")
    raise UsageError(f"{option} takes numbers separated by commas, such as 0.1,0.01; not {text!r}")


def read_seeds(text: str) -> int | list[int]:
    """Parse a number of seeds, or a list of seeds."""
    seeds: int | list[int] = 0
    with suppress(ValueError):
        digits = plain_digits(text)
        seeds = [int(part) for part in digits.split(",") if part] if "," in digits else int(digits)
    if not seeds or (isinstance(seeds, int) and seeds < 0):
        raise UsageError(
            "--seeds takes a number of at least 1 (20), or seeds separated by commas (0,5,7; seed 0 alone is written 0,), "
            f"not {text!r}"
        )
    if isinstance(seeds, int) and seeds > MOST_LEARNERS:
        raise UsageError(f"--seeds takes {MOST_LEARNERS:,} at most, not {text}; use fewer")
    return seeds


def read_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs; values other than numbers, true and false are text."""
    options = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--option takes NAME=VALUE, such as task_length=500, not {pair!r}")
        name, parsed = name.strip().replace("-", "_"), value
        with suppress(tomllib.TOMLDecodeError):
            parsed = tomllib.loads(f"value = {value}")["value"]
        options.append((name, parsed))
    return once("--option", options)


def once(option: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the values of an option that can be repeated, by name, of which each may be given once."""
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            named = f"{option} {name}".strip()
            raise UsageError(f"{named} is given twice, as {found[name]} and {value}; remove one of them")
        found[name] = value
    return found
