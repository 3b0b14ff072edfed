"""`upgd plot`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from upgd.cli.options import Shown, UsageError
from upgd.cli.results import Filter

__all__ = ["plot"]

_FORMATS = ("png", "svg", "pdf")


def plot(
    *stores: Path,
    which: Filter = Filter(),  # noqa: B008  # frozen
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("curves.png"),
    title: str | None = None,
    legend: bool | None = None,
    band: Literal["ci", "sd", "range", "none"] = "ci",
    metric: Shown = None,
) -> None:
    """Draw the online curves of every method at its best setting, as PNG, SVG or PDF.

    Several problems get a panel each. The figure follows your matplotlibrc.

    Example:

        upgd plot upgd.db -o curves.pdf --methods upgd,sgd --legend --band sd

    Parameters
    ----------
    stores
        The file that has the results; the same as --store. Several files are compared.
    output
        Where the figure goes; the name ends with .png, .svg or .pdf.
    title
        The figure's title; by default the problem's name.
    legend
        Draw a legend. By default the curves' names stand at their ends; --no-legend draws neither.
    band
        Around the mean: its 95 % confidence interval (ci), one standard deviation of the seeds (sd), the range of all
        seeds, or none.
    metric
        What to draw: by default accuracy, in regression loss. All but accuracy, loss and forgetting are recorded by
        --look-every.
    """
    from upgd import writing
    from upgd.experiments.analysis import figures

    figures.check()
    kind = output.suffix[1:].lower() or "png"  # a device has no ending
    if kind not in _FORMATS:
        raise UsageError(f"{output} must end with .png, .svg or .pdf.")
    writing.check(output)
    comparisons = which.results(stores).comparisons(metric)
    figure = figures.panels(comparisons, title=title, legend=legend, band=None if band == "none" else band)
    figures.write(figure, output, kind)
    print(f"wrote {output}", file=sys.stderr)  # the figure may go to the standard output
