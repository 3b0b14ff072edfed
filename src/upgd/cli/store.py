"""`upgd store check` and `upgd store repair`."""

import sys
from pathlib import Path

from cyclopts import App

from upgd.cli.options import DEFAULTS, store_path

__all__ = ["store"]

store = App(
    name="store",
    default_parameter=DEFAULTS,
    help="Check a store for damage, or save the intact part of a damaged store.",
)


@store.command
def check(file: Path | None = None) -> None:
    """Check the structure of a store and the checksum of every row. The exit status is 3 if something is damaged.

    Parameters
    ----------
    file
        The store. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    """
    from upgd.experiments.analysis.wording import plural
    from upgd.store import Store

    path = store_path(file)
    with Store.read(path) as opened:
        for finding in opened.damage:
            print(finding)
        print(f"{plural(len(opened), 'learner')} in {path} {'is' if len(opened) == 1 else 'are'} intact")


@store.command
def repair(file: Path, new: Path) -> None:
    """Copy the intact part of a damaged store to a new one. The damaged store is not changed.

    Parameters
    ----------
    file
        The damaged store.
    new
        The new store; the file must not exist.
    """
    from upgd.experiments.analysis.wording import plural
    from upgd.store import repair as copy_intact

    saved, lost = copy_intact(file, new)
    print(f"{plural(saved, 'learner')} of {file} saved to {new}")
    if lost:
        rows = f"{'row' if len(lost) == 1 else 'rows'} {', '.join(map(str, lost))}"
        print(
            f"upgd: {rows} of {file} could not be saved; run the same experiments again to replace them",
            file=sys.stderr,
        )
