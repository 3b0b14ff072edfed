"""`upgd doctor`."""

from typing import Annotated

from cyclopts import Parameter

from upgd.cli.checkup import checkup

__all__ = ["doctor"]


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Show versions, hardware, kernels, data sets, caches and plug-ins for bug reports.

    The exit status is 1 if something that `upgd demo` needs is missing.

    Parameters
    ----------
    as_json
        Print JSON.
    """
    return checkup(as_json=as_json)
