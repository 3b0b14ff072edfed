"""`upgd report` and `upgd watch`."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from upgd.cli.options import Shown, StorePath, store_files, store_path

__all__ = ["report", "watch"]


def report(
    *stores: Path,
    store: StorePath = None,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("report.html"),
    problem: str | None = None,
    title: str | None = None,
    metric: Shown = None,
    open_it: Annotated[bool, Parameter(name="--open", negative="")] = False,
) -> None:
    """Write one page about all results: tables, interactive curves, hyperparameters, divergences, commands.

    The page is a single file that opens without a network.

    Examples:

        upgd report upgd.db -o report.html --title "Permuted digits"

        upgd report before.db after.db

    Parameters
    ----------
    stores
        The file that has the results; several files are compared. The same as --store.
    store
        The file that has the results; upgd.db in this folder if neither this nor UPGD_STORE says otherwise.
    output
        Where the page goes.
    problem
        Only the results of this problem.
    title
        The page's title; by default the names of the files.
    metric
        What tables and curves show: by default accuracy, in regression loss. All but accuracy, loss and forgetting are
        recorded by --look-every.
    open_it
        Open the page in the browser.
    """
    from upgd.report import write

    path = write(store_files(stores, store), output, problem=problem, title=title, metric=metric)
    print(f"wrote {path}", file=sys.stderr)  # the page may go to the standard output
    if open_it:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def watch(
    store: Path | None = None,
    *,
    port: int = 0,
    problem: str | None = None,
    browser: bool = True,
) -> None:
    """Show the same page while a sweep runs; it refreshes by itself. Ctrl-C ends it.

    Parameters
    ----------
    store
        The file that has, or will have, the results; upgd.db in this folder if neither this nor UPGD_STORE says otherwise.
    port
        Where on this machine; by default any that is free.
    problem
        Only the results of this problem.
    browser
        Whether to open the page in the browser.
    """
    from upgd.report import Watch

    path = store_path(store)
    server = Watch(path, port, problem)
    print(f"watching {path} at {server.address} (Ctrl-C ends it)", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(server.address)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
