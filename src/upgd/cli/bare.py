"""The command line without its optional packages: version, help and doctor only."""

from collections.abc import Sequence
from typing import NoReturn

from upgd import __version__
from upgd.cli.checkup import checkup

__all__ = ["leave"]

_REMEDY = "the command line needs more packages: pip install 'upgd[run]'"


def leave(arguments: Sequence[str]) -> NoReturn:
    """Answer ``--version``, ``--help`` and ``doctor``, refuse everything else, and exit."""
    if list(arguments) == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    if list(arguments) in ([], ["-h"], ["--help"]):
        print(f"Usage: upgd COMMAND\n\nIn this installation, only `upgd doctor` and `upgd --version` work; {_REMEDY}")
        raise SystemExit(0)
    if list(arguments) in (["doctor"], ["doctor", "--json"]):
        raise SystemExit(checkup(as_json="--json" in arguments))
    raise SystemExit(f"upgd: {_REMEDY}")
