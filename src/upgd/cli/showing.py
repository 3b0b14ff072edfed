"""`upgd demo`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["demo"]


def demo(
    *,
    output: Path = Path("demo-output"),
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False,
) -> None:
    """See the method work, in about a minute: two streams that keep changing, five methods, a table and a page.

    Parameters
    ----------
    output
        The folder for the page, the picture and the results.
    quiet
        Show no progress.
    """
    from upgd.experiments.demo import demo as show_it

    show = show_it(output, progress=not quiet)
    print(show.table)
    print(f"\nOpen {show.page} in a browser.")
