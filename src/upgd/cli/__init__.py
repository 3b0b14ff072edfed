"""The `upgd` command: a thin layer that converts arguments into calls of the package.

``commands`` assembles the application. ``running``, ``confirming`` and ``reproducing`` compute; ``results``, ``plotting``,
``reporting`` and ``showing`` show results; ``listing`` shows methods and problems; ``data`` and ``store`` manage files, and
``doctoring`` checks the installation. ``options`` defines shared options, ``executing`` contains helpers of the commands
that compute, and ``bare`` is the fallback without cyclopts. ``--plugin`` is an option of every command, and is processed
before the commands are created.
"""

import dis
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from upgd import __version__
from upgd.cli.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import MissingArgumentError

    from upgd.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'upgd.cli' has no attribute {name!r}")
    from upgd.cli.commands import app  # has an option for every setting of every method, so load plugins first

    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit.

    The status is 0 on success, 1 on failure, 2 for a usage error, 3 if the damaged part of a store was skipped, and 130 on
    Ctrl-C.
    """
    if not _streams_are_open():
        sys.exit(_failed(f"the standard output is closed; redirect it to a file, or to {os.devnull}", 1))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals without β should still show tables
    with _damage_reported() as damage:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    code = code or (3 if damage else 0)
    try:
        sys.stdout.flush()
    except OSError as error:
        # The disk is full, or the reader of the output is gone, as in `upgd data list | head`. Python would try to flush
        # again on exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            _failed(error.strerror or error, 1)
        code = code or 1
    sys.exit(code)


def _streams_are_open() -> bool:
    """Return whether there is a standard output; redirect closed streams to the null device.

    The next file that is opened would get the descriptor of a closed stream, so printed text could end up in a store.
    """
    output = sys.stdout
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends
    return output is not None


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:  # importing the application takes much longer
        print(__version__)
        return 0
    try:
        from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError
    except ModuleNotFoundError:
        from upgd.cli import bare

        return bare.run(arguments)
    from upgd import plugins

    try:
        arguments, modules = _without_plugins(arguments)
        plugins.load(*modules)
        from upgd.cli.commands import app

        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        return _failed(f"unexpected argument {words!r}; options are written --name value, and --help lists them", 2)
    except MissingArgumentError as error:
        return _failed(_missing(error), 2)
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
    except TypeError as error:
        if not _is_raised_by_upgd(error):
            raise
        return _failed(error, 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_about_memory(error):
            raise
        return _failed("out of memory; use a smaller --network, fewer --workers or another --device", 1)
    return result if isinstance(result, int) else 0


def _missing(error: "MissingArgumentError") -> object:
    """Return a message for a missing argument."""
    if error.argument is None or error.argument.index is None:
        return error  # an option without its value
    command, name = " ".join(["upgd", *(error.command_chain or ())]), error.argument.name.lstrip("-").upper()
    remedy = "`upgd problems` lists them" if name == "PROBLEM" else f"see `{command} --help`"
    return f"`{command}` needs {name}; {remedy}"


def _without_plugins(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--plugin MODULE``, and the modules."""
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
        raise UsageError("--plugin takes the name of a module, such as my_method for my_method.py")
    return rest, modules


def _is_raised_by_upgd(error: Exception) -> bool:
    """Return whether a statement of this package raised the error, such as a check of a plugin's stream or network.

    Python raises TypeErrors as well, for bugs of a plugin or of this package, which need their traceback.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    ours = trace.tb_frame.f_globals.get("__name__", "").startswith("upgd.")
    return ours and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _is_about_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; torch has a class for it on GPUs, but not on CPUs."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


@contextmanager
def _damage_reported() -> Iterator[set[str]]:
    """Context manager that prints and collects warnings about damaged stores, each once; they affect the exit status."""
    found: set[str] = set()
    with warnings.catch_warnings():
        # Compared by name, because importing the module takes as long as some commands.
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
