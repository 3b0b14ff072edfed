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
    open_it: Annotated[bool, Parameter(name="--open")] = False,
) -> None:
    """Write an HTML report of all results: tables, interactive curves, hyperparameters, divergences, commands.

    The report is a single file that works offline.

    Examples:

        upgd report upgd.db -o report.html --title "Permuted digits"

        upgd report before.db after.db

    Parameters
    ----------
    stores
        The file of results, as for --store. Several files are compared.
    store
        The file of results. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    output
        The output file.
    problem
        Show only the results of this problem.
    title
        The page's title; by default the names of the files.
    metric
        The metric of tables and curves. Default: accuracy, or loss for regression. All but accuracy, loss and forgetting
        need --look-every.
    open_it
        Open the page in the browser.
    """
    from upgd.report import write

    path = write(store_files(stores, store), output, problem=problem, title=title, metric=metric)
    print(f"wrote {path}", file=sys.stderr)  # the page may be written to standard output
    if open_it:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def watch(
    store: Path | None = None,
    *,
    port: int = 0,
    problem: str | None = None,
    browser: Annotated[bool, Parameter(negative="--no-browser")] = True,
) -> None:
    """Serve the report during a sweep and refresh it automatically. Ctrl-C stops the server.

    Parameters
    ----------
    store
        The file of results, which need not exist yet. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    port
        Port of the server. Default: any free port.
    problem
        Show only the results of this problem.
    browser
        Open the page in the browser.
    """
    from upgd.report import Watch
    from upgd.store import Store

    path = store_path(store)
    if path.exists():
        Store.read(path).close()  # reports a folder, or another file, before the browser shows an error
    server = Watch(path, port, problem)
    print(f"watching {path} at {server.address} (Ctrl-C to stop)", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(server.address)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
