"""The `upgd` command: a thin layer that turns what is typed into calls of the package.

Each module has the commands of one family; ``options.py`` has the options that several of them share.
"""

import io
import os
import sys
from importlib.metadata import version

try:
    from cyclopts import App, CycloptsError, UnusedCliTokensError
except ModuleNotFoundError:
    raise SystemExit("upgd: the command line needs a few more packages: pip install 'upgd[run]'") from None

from upgd.cli.data import data
from upgd.cli.options import UsageError
from upgd.cli.reporting import report, watch
from upgd.cli.reproducing import reproduce
from upgd.cli.results import best, export, runs, table
from upgd.cli.running import bench, run, sweep
from upgd.cli.showing import demo

__all__ = ["app", "main"]

app = App(
    name="upgd",
    help="Learning from streams that never stop changing: utility-based perturbed gradient descent.",
    version=version("upgd"),
    suppress_keyboard_interrupt=False,  # or it would end the process without a word
)
for command in (demo, run, sweep, best, table, report, watch, reproduce, export, runs, data, bench):
    app.command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0 if all went well, 1 if it could not be done, 2 if it was not understood, 130 on Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without β shall not cost anybody a table
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        return _failed(
            f"there is no use for {words!r} here; options are written --name value, and --help lists them", 2
        )
    except (CycloptsError, UsageError) as error:
        return _failed(error, 2)
    except KeyboardInterrupt:
        return _failed("stopped", 130)
    except BrokenPipeError:
        # The reader of our output has gone, as in `upgd data list | head`; nothing may be written when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = error.filename is not None and error.strerror
        return _failed(f"{error.filename}: {error.strerror}" if named else error, 1)
    except (ValueError, ImportError) as error:
        return _failed(error, 1)
    return result if isinstance(result, int) else 0


def _failed(reason: object, code: int) -> int:
    print(f"upgd: {' '.join(str(reason).split())}", file=sys.stderr)
    return code
