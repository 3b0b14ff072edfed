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
    legend: Annotated[bool | None, Parameter(negative="--no-legend")] = None,
    band: Literal["ci", "sd", "range", "none"] = "ci",
    metric: Shown = None,
) -> None:
    """Plot the online curves of every method at its best setting, as PNG, SVG or PDF.

    Each problem has its own panel. The figure follows your matplotlibrc.

    Example:

        upgd plot upgd.db -o curves.pdf --methods upgd,sgd --legend --band sd

    Parameters
    ----------
    stores
        The file of results, as for --store. Several files are compared.
    output
        The output file, ending with .png, .svg or .pdf; without an ending (/dev/stdout), a PNG.
    title
        The figure's title; by default the problem's name.
    legend
        Draw a legend. By default, labels are placed at the ends of the curves; --no-legend omits both.
    band
        Band around the mean: 95% confidence interval (ci), one standard deviation over seeds (sd), range over seeds, or
        none.
    metric
        The metric to plot. Default: accuracy, or loss for regression. All but accuracy, loss and forgetting need
        --look-every.
    """
    from upgd import writing
    from upgd.experiments.analysis import figures

    figures.check()
    kind = output.suffix[1:].lower() or "png"  # a device has no ending
    if kind not in _FORMATS:
        raise UsageError(f"{output} must end with .png, .svg or .pdf")
    writing.check(output)
    comparisons = which.results(stores).comparisons(metric)
    figure = figures.panels(comparisons, title=title, legend=legend, band=None if band == "none" else band)
    figures.write(figure, output, kind)
    print(f"wrote {output}", file=sys.stderr)  # the figure may be written to standard output
