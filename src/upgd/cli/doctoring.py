"""`upgd doctor`."""

from upgd.cli.checkup import checkup
from upgd.cli.options import Json

__all__ = ["doctor"]


def doctor(*, as_json: Json = False) -> int:
    """Show versions, hardware, kernels, data sets, caches and plug-ins for bug reports.

    The exit status is 1 if something that `upgd demo` needs is missing.

    Parameters
    ----------
    as_json
        Print JSON.
    """
    return checkup(as_json=as_json)
