"""`upgd data …`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from upgd.cli.options import DEFAULTS, Json, UsageError

__all__ = ["data"]

data = App(name="data", default_parameter=DEFAULTS, help="Download and list data sets.")


@data.command
def fetch(
    *names: Literal["mnist", "emnist", "cifar10"],
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    rename: Annotated[str | None, Parameter(name=("--as", "--subset"))] = None,
    transposed: bool = False,
    replace: bool = False,
    mirror: str | None = None,
) -> None:
    """Download data sets, or copy local files, into the cache (the folder UPGD_DATA, if set).

    Downloads are verified, resumed after interruptions, and use the first of several mirrors that works.

    Examples:

        upgd data fetch mnist emnist cifar10

        upgd data fetch --from ~/Downloads

        upgd data fetch --from ~/my-emnist --as emnist-subset --transposed

    Parameters
    ----------
    names
        The data sets; with --from, none means all that are found.
    source
        A folder or archive with local files, which are recognized by content, verified by checksum and copied.
    rename
        Add IDX files that are not an official data set under this name.
    transposed
        With --as: the images are stored transposed, as in EMNIST.
    replace
        With --as: replace different data of that name. Delete results that were computed with the old data.
    mirror
        URL of a folder with the official files, tried before the public mirrors.
    """
    from upgd.cli import data_sets

    if source is None:
        if rename is not None or transposed or replace:
            raise UsageError(
                "--as, --transposed and --replace apply to local files; give their folder with --from FOLDER"
            )
        if not names:
            raise UsageError("name the data sets to fetch: mnist, emnist, cifar10")
        data_sets.download_command(names, mirror)
    elif mirror is not None:
        raise UsageError("--mirror and --from are mutually exclusive: download, or use local files")
    elif rename is not None:
        if names:
            raise UsageError(
                f"--as {rename} is for files that are not an official data set; leave out {', '.join(names)}"
            )
        data_sets.adopt_command(source, rename, transposed, replace)
    elif transposed or replace:
        raise UsageError("--transposed and --replace apply only to files added with --as NAME")
    else:
        data_sets.take_command(source, names)


@data.command(name="list")
def list_(
    *,
    as_json: Json = False,
    verify: bool = False,
) -> int:
    """List data sets with sizes, checksums and sources.

    Parameters
    ----------
    as_json
        Print JSON.
    verify
        Verify all checksums; the exit status is 1 if one is wrong.
    """
    from upgd.cli.data_sets import list_command

    return 0 if list_command(as_json, verify) else 1
