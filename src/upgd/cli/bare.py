"""The command line without its optional packages: help and doctor only."""

import sys
from collections.abc import Sequence

from upgd.cli.checkup import checkup

__all__ = ["run"]

_REMEDY = "the command line needs more packages: pip install 'upgd[run]'"


def run(arguments: Sequence[str]) -> int:
    """Answer ``--help`` and ``doctor``, refuse everything else, and return the exit status."""
    if list(arguments) in ([], ["-h"], ["--help"]):
        print(f"Usage: upgd COMMAND\n\nIn this installation, only `upgd doctor` and `upgd --version` work; {_REMEDY}")
        return 0
    if list(arguments) in (["doctor"], ["doctor", "--json"]):
        return checkup(as_json="--json" in arguments)
    print(f"upgd: {_REMEDY}", file=sys.stderr)
    return 1
