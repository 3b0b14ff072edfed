"""What the command can do where only torch and numpy are installed: say its version, and what it lacks."""

from collections.abc import Sequence
from typing import NoReturn

from upgd import __version__

__all__ = ["leave"]

_REMEDY = "the command line needs a few more packages: pip install 'upgd[run]'"


def leave(arguments: Sequence[str]) -> NoReturn:
    """Answer ``--version`` and ``--help``, refuse everything else, and exit."""
    if list(arguments) == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    if list(arguments) in ([], ["-h"], ["--help"]):
        print(f"Usage: upgd COMMAND\n\nLearning from streams that never stop changing; {_REMEDY}")
        raise SystemExit(0)
    raise SystemExit(f"upgd: {_REMEDY}")
