"""The application with all commands."""

from typing import Any

from cyclopts import App, Group

from upgd import __version__
from upgd.cli.confirming import confirm
from upgd.cli.data import data
from upgd.cli.doctoring import doctor
from upgd.cli.listing import methods, problems
from upgd.cli.options import DEFAULTS
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
    default_parameter=DEFAULTS,
    suppress_keyboard_interrupt=False,  # otherwise it would end the process silently
)
_GROUPS: dict[str, tuple[Any, ...]] = {
    "Run experiments": (demo, run, sweep, confirm, reproduce, bench),
    "Show results": (best, table, plot, report, watch),
    "Methods, problems and data": (methods, problems, data),
    "Manage results and the installation": (runs, export, import_, store, doctor),
}
for _place, (_title, _commands) in enumerate(_GROUPS.items()):
    _group = Group(_title, sort_key=_place)
    for _order, _command in enumerate(_commands):
        if isinstance(_command, App):
            _command.group, _command.sort_key = _group, _order
            app.command(_command)
        else:
            app.command(_command, name=_command.__name__.rstrip("_"), group=_group, sort_key=_order)
_options = Group("Options", sort_key=len(_GROUPS))
for _flag in ("--help", "--version"):
    app[_flag].group = _options
