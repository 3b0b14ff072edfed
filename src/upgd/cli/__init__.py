"""The `upgd` command: a thin layer that turns what is typed into calls of the package.

``commands`` puts it together. ``running``, ``confirming`` and ``reproducing`` compute; ``results``, ``plotting``,
``reporting`` and ``showing`` show what there is; ``data`` and ``store`` look after files, ``doctoring`` after the
installation. ``options`` has the options that several commands share, ``executing`` what commands that compute have in
common, and ``bare`` what is left where cyclopts is not installed. ``--plugin`` is an option of every command, and is
taken out before any of them is made.
"""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

try:
    from cyclopts import CycloptsError, UnusedCliTokensError
except ModuleNotFoundError:
    from upgd.cli.bare import leave

    leave(sys.argv[1:])

from upgd.cli.errors import UsageError

if TYPE_CHECKING:
    from upgd.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'upgd.cli' has no attribute {name!r}")
    from upgd.cli.commands import app  # it has an option for every setting of every method, so plug-ins must come first

    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit.

    The status is 0 if all went well, 1 if it could not be done, 2 if it was not understood, 3 if it was done without the
    damaged part of a store, 130 on Ctrl-C.
    """
    if not _streams_are_open():
        sys.exit(_failed(f"the standard output is closed; redirect it to a file, or to {os.devnull}", 1))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without β shall not cost anybody a table
    with _damage_reported() as damage:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    code = code or (3 if damage else 0)
    try:
        sys.stdout.flush()
    except OSError as error:
        # A full disk, or the reader of our output has gone, as in `upgd data list | head`, and that is no news to anybody.
        # Python would try once more when it exits, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            _failed(error.strerror or error, 1)
        code = code or 1
    sys.exit(code)


def _streams_are_open() -> bool:
    """Whether there is a standard output; what was closed leads nowhere from now on.

    The next file that is opened gets the number of one that is closed: what somebody prints could end up in a store.
    """
    output = sys.stdout
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives
    return output is not None


def _run(arguments: list[str]) -> int:
    from upgd import plugins

    try:
        arguments, modules = _without_plugins(arguments)
        plugins.load(*modules)
        from upgd.cli.commands import app

        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        return _failed(
            f"there is no use for {words!r} here; options are written --name value, and --help lists them", 2
        )
    except CycloptsError as error:
        return _failed(error, 2)
    except KeyboardInterrupt:
        return _failed("stopped", 130)
    except BrokenPipeError:
        return 1
    except OSError as error:
        named = error.filename is not None and error.strerror
        return _failed(f"{error.filename}: {error.strerror}" if named else error.strerror or error, 1)
    except (ValueError, ImportError) as error:
        return _failed(error, 2 if isinstance(error, UsageError) else 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_about_memory(error):
            raise
        return _failed("memory does not suffice; use a smaller --network, fewer --workers or another --device", 1)
    return result if isinstance(result, int) else 0


def _without_plugins(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without ``--plugin MODULE``, and the modules."""
    rest, modules, words = [], [], iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--plugin":
            modules.append(next(words, ""))
        elif word.startswith("--plugin="):
            modules.append(word.removeprefix("--plugin="))
        else:
            rest.append(word)
    if any(not name or name.startswith("-") for name in modules):
        raise UsageError("--plugin takes the name of a module, such as my_method for my_method.py.")
    return rest, modules


def _is_about_memory(error: Exception) -> bool:
    """Torch has a class of its own for this on a GPU, and on a CPU none."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


@contextmanager
def _damage_reported() -> Iterator[set[str]]:
    """Print every warning about a damaged store once, like an error, and collect them: the exit status depends on them."""
    found: set[str] = set()
    with warnings.catch_warnings():
        # By the name of the module, because to import it takes as long as some commands do.
        warnings.filterwarnings("always", module=r"upgd\.store\.file$")
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if category.__name__ != "DamagedStoreWarning":
                others(message, category, *rest)
            elif str(message) not in found:
                found.add(str(message))
                _failed(message, 3)

        warnings.showwarning = show  # type: ignore[assignment]
        yield found


def _failed(reason: object, code: int) -> int:
    print(f"upgd: {' '.join(str(reason).split())}", file=sys.stderr)
    return code
