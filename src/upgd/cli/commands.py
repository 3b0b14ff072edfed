"""The application with all commands."""

from cyclopts import App

from upgd import __version__
from upgd.cli.confirming import confirm
from upgd.cli.data import data
from upgd.cli.doctoring import doctor
from upgd.cli.plotting import plot
from upgd.cli.reporting import report, watch
from upgd.cli.reproducing import reproduce
from upgd.cli.results import best, export, import_, runs, table
from upgd.cli.running import bench, run, sweep
from upgd.cli.showing import demo
from upgd.cli.store import store

__all__ = ["app"]

app = App(
    name="upgd",
    help="Continual learning from non-stationary streams: utility-based perturbed gradient descent.",
    help_epilogue="Every command accepts --plugin MODULE, which may be repeated: a module that registers methods, streams, "
    "networks, data sets or diagnostics. UPGD_PLUGINS names such modules for all commands.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # otherwise it would end the process silently
)
for command in (
    demo,
    run,
    sweep,
    confirm,
    best,
    table,
    plot,
    report,
    watch,
    reproduce,
    export,
    runs,
    store,
    data,
    bench,
    doctor,
):
    app.command(command)
app.command(import_, name="import")
