"""Output of the `upgd data` commands."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upgd.data import cache, registry
from upgd.data.acquire import adopt, fetch, fetch_from
from upgd.data.cache import Manifest
from upgd.data.dataset import DataError
from upgd.data.embedded import SOURCE, digits
from upgd.data.sources import OFFICIAL
from upgd.data.transfer import Progress

__all__ = ["adopt_command", "download_command", "list_command", "states", "take_command"]


def download_command(names: Sequence[str], mirror: str | None) -> None:
    """Download data sets with a progress bar, and print what is in the cache."""
    for name in names:
        with _progress_bar() as progress:
            entry = fetch(name, mirror=mirror, progress=progress)
        print(_described(entry))


def take_command(path: Path, names: Sequence[str]) -> None:
    """Add official data sets from local files, and print what was added."""
    print(f"searching {path} …", file=sys.stderr)
    for entry in fetch_from(path, names):
        print(_described(entry))


def adopt_command(path: Path, name: str, transposed: bool, replace: bool) -> None:
    """Add your own IDX files under a new name, and print what was added."""
    print(_described(adopt(path, name, transposed=transposed, replace=replace)))


def list_command(as_json: bool, verify: bool) -> bool:
    """Print all data sets, and return whether none is damaged."""
    rows = list(states(verify))
    if as_json:
        print(json.dumps({"folder": str(cache.folder()), "datasets": rows}, indent=2))
    else:
        print(f"Data sets in {cache.folder()}")
        width = 2 + max(len(row["name"]) for row in rows)
        for row in rows:
            first, *rest = _lines(row)
            print(f"\n{row['name']:<{width}}{first}")
            for line in rest:
                print(" " * width + line)
    return all(row["state"] != "damaged" for row in rows)


def states(verify: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a description of each data set: its name, its state and, if available, details."""
    embedded = digits()
    yield {
        "name": "digits",
        "state": "embedded",
        "counts": {"train": len(embedded)},
        "image_shape": list(embedded.images.shape[1:]),
        "classes": embedded.classes,
        "source": SOURCE,
    }
    registered = registry.names()
    for name in registered:
        yield {"name": name, "state": "registered"}
    for name in [*OFFICIAL, *(n for n in cache.names() if n not in (*OFFICIAL, *registered))]:
        yield {"name": name, **_row(name, verify)}


def _row(name: str, verify: bool) -> dict[str, Any]:
    try:
        entry = cache.entry(name)
        if entry is None:
            return {"state": "absent"}
        for split in entry.counts:
            cache.open_split(entry, split)
    except DataError as error:
        return {"state": "damaged", "reason": str(error)}
    if verify and not cache.is_intact(entry):
        return {
            "state": "damaged",
            "reason": f"checksums of {name} have changed since it was stored; {cache.how_to_replace(name)}.",
        }
    facts = asdict(entry)
    del facts["format"]
    state = "verified" if verify else "present"
    return facts | {"state": state, "counts": entry.counts, "image_shape": list(entry.image_shape)}


def _lines(row: dict[str, Any]) -> Iterator[str]:
    if row["state"] == "absent":
        yield f"not downloaded; run: upgd data fetch {row['name']}"
        return
    if row["state"] == "registered":
        yield "registered by a plugin"
        return
    if row["state"] == "damaged":
        yield f"DAMAGED: {row['reason']}"
        return
    yield _summary(row["counts"], row["image_shape"], row["classes"])
    if row["state"] == "embedded":
        yield str(row["source"])
        return
    kind = "official files" if row["official"] else "your own files, not an official data set"
    intact = "; intact" if row["state"] == "verified" else ""
    yield f"{kind}, stored {row['prepared'][:10]}{intact}"
    for origin in dict.fromkeys(_folder_of(file["from"]) for file in row["files"]):
        yield f"from {origin}"
    for file in row["files"]:
        yield f"sha256 {file['sha256']}  {file['name']}"


def _folder_of(origin: str) -> str:
    """Return the parent folder of a URL; return a local folder unchanged."""
    return origin.rpartition("/")[0] + "/" if origin.startswith("http") else origin


def _described(entry: Manifest) -> str:
    kind = "official, verified" if entry.official else "your own files"
    return f"{entry.name}: {_summary(entry.counts, entry.image_shape, entry.classes)} ({kind})"


def _summary(counts: dict[str, int], shape: Sequence[int], classes: int) -> str:
    numbers = " + ".join(f"{count:,} {split}" for split, count in counts.items())
    return f"{numbers} images of {'×'.join(map(str, shape))}, {classes} classes"


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show a progress bar per downloaded file; without a terminal, one line when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def progress(name: str, here: int, size: int) -> None:
        if name not in tasks:
            bars.start()
            tasks[name] = bars.add_task(name, total=size, completed=here)
        bars.update(tasks[name], completed=here)

    try:
        yield progress
    finally:
        bars.stop()
