"""`upgd demo`."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from upgd.cli.executing import terminable
from upgd.cli.options import load_torch

__all__ = ["demo"]


def demo(
    *,
    output: Path = Path("demo-output"),
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")] = False,
) -> int:
    """See the method work, in about a minute: two streams that keep changing, five methods, a table, a page and a report.

    Parameters
    ----------
    output
        The folder for the page, the picture, the report and the results.
    quiet
        Show no progress.
    """
    load_torch()
    from upgd.experiments.analysis.layout import terminal_width
    from upgd.experiments.demo import demo as show_it
    from upgd.report import write

    try:
        with terminable():
            show = show_it(output, progress=not quiet)
    except KeyboardInterrupt:
        print("upgd: stopped; what was begun is saved: give the same command again to go on", file=sys.stderr)
        return 130
    print(show.table.text(terminal_width()))
    report = write(output / "upgd.db", output / "report.html")
    print(f"\nOpen {show.page} in a browser; {report} has the same curves to play with.")
    return 0
