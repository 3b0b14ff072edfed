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
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False,
) -> int:
    """Compare five methods on two streams in about a minute, and write a web page and an interactive report.

    Parameters
    ----------
    output
        Folder for the page, the figure, the report and the results.
    quiet
        Do not show progress.
    """
    load_torch()
    from upgd.experiments.analysis.layout import terminal_width
    from upgd.experiments.demo import demo as show_it
    from upgd.report import write

    try:
        with terminable():
            show = show_it(output, progress=not quiet)
    except KeyboardInterrupt:
        print("upgd: stopped; unfinished runs are saved; repeat the command to continue", file=sys.stderr)
        return 130
    print(show.table.text(terminal_width()))
    report = write(output / "upgd.db", output / "report.html")
    print(f"\nOpen {show.page} in a browser; {report} is an interactive report.")
    return 0
