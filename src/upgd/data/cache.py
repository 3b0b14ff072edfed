"""The folder where data sets are kept, ready to be memory-mapped.

::

    <cache>/mnist/manifest.json            what it is, where it came from, checksums
    <cache>/mnist/train-images.npy  …      uint8 arrays
    <cache>/.mnist.lock                    held while somebody prepares mnist
    <cache>/.downloads/                    files on their way; one that was broken off continues

A data set is written to a hidden folder and appears under its name by one rename, when it is complete. So there are no
half-written data sets, whatever happens and however many processes want the same one.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from upgd.data.dataset import Bytes, DataError, Dataset

__all__ = [
    *("Manifest", "arrays", "checked_name", "entry", "folder", "how_to_replace", "is_intact", "locked", "names"),
    *("open_split", "owner", "sha256", "store"),
]

_FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What the cache knows about a data set, as it stands in the manifest.

    ``files`` says of each original file what it was called, where it came from and its SHA-256; ``arrays`` gives shape and
    SHA-256 of each ``.npy`` file.
    """

    name: str
    classes: int
    white: int
    transposed: bool
    official: bool
    prepared: str
    files: list[dict[str, str]]
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = _FORMAT

    @property
    def counts(self) -> dict[str, int]:
        """Number of images of each split."""
        return {
            name.removesuffix("-labels"): a["shape"][0] for name, a in self.arrays.items() if name.endswith("-labels")
        }

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of one image."""
        return tuple(self.arrays["train-images"]["shape"][1:])


def folder() -> Path:
    """Where data sets are kept: ``UPGD_DATA`` if that is set, else the user's cache folder for upgd.

    The same folder as ``pooch.os_cache("upgd")``, found without pooch, because reading data should not need it.
    """
    if chosen := os.environ.get("UPGD_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local, "upgd", "upgd", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "upgd"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "upgd")


def checked_name(name: str) -> str:
    """The name, if it can be that of a data set and of its folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise DataError(
            f"{name!r} cannot be the name of a data set: use up to 64 small letters, digits, '-', '_' and '.', "
            "beginning with a letter or digit."
        )
    return name


def names() -> list[str]:
    """The data sets that are there."""
    return sorted(path.parent.name for path in folder().glob(f"[!.]*/{_MANIFEST}"))


def owner(path: Path) -> str | None:
    """The data set whose folder a file is in; None if it is in none."""
    root = folder().resolve()
    if not path.is_relative_to(root):
        return None
    name = path.relative_to(root).parts[0]
    return name if (root / name / _MANIFEST).is_file() else None


def entry(name: str) -> Manifest | None:
    """What is known about a data set; None if it is not there."""
    path = folder() / checked_name(name) / _MANIFEST
    if path.exists() and not path.is_file():
        raise _damaged(name, f"{_MANIFEST} is no regular file")
    try:
        found = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        if found.format != _FORMAT or found.name != name or not found.counts or not found.image_shape:
            raise ValueError("it was written by another version of upgd")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise _damaged(name, f"{_MANIFEST}: {error}") from None
    return found


def open_split(found: Manifest, split: str) -> Dataset:
    """A split as a data set whose arrays are mapped into memory, not read."""
    if split not in found.counts:
        have = " and ".join(repr(s) for s in found.counts)
        raise DataError(f"split must be {have} for the data set {found.name!r}, not {split!r}.")
    images, labels = (_mapped(found, f"{split}-{content}") for content in ("images", "labels"))
    return Dataset(found.name, images, labels, found.classes, found.white, found.transposed)


def is_intact(found: Manifest) -> bool:
    """Whether every array still has the checksum that it was written with."""
    return all(
        path.is_file() and sha256(path) == array["sha256"]
        for path, array in ((_path(found, name), array) for name, array in found.arrays.items())
    )


def store(described: Manifest, arrays: Mapping[str, Bytes]) -> Manifest:
    """Keep a data set under its name, whole or not at all; what had that name before gives way.

    Call it within :func:`locked`.
    """
    root = folder()
    staging = Path(tempfile.mkdtemp(prefix=f".{described.name}-", dir=root))
    try:
        # mkdtemp lets nobody else in, but a cache may be shared.
        staging.chmod(0o777 & ~_umask())
        for name, array in arrays.items():
            path = staging / f"{name}.npy"
            with path.open("wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                _to_disk(file)
            described.arrays[name] = {"shape": list(array.shape), "sha256": sha256(path)}
        with (staging / _MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(asdict(described), text, indent=2)
            _to_disk(text)
        _publish(staging, root / described.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return described


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time prepare a data set, and sweep up what a killed one left.

    The lock is the operating system's and falls with the process that holds it.
    """
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError as error:  # torch brings it, unless somebody has taken it away
        raise ModuleNotFoundError(
            "preparing data needs filelock, which is not installed; pip install 'upgd[run]' brings it", name="filelock"
        ) from error
    root = folder()
    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / f".{checked_name(name)}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logging.getLogger("upgd.data").warning("another process is preparing %s; waiting for it", name)
        lock.acquire(poll_interval=0.1)
    try:
        for left_behind in root.glob(f".{name}-????????"):
            shutil.rmtree(left_behind, ignore_errors=True)
        _check_holds_nothing_else(root / name)
        yield
    finally:
        lock.release()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _path(found: Manifest, array: str) -> Path:
    return folder() / found.name / f"{array}.npy"


def arrays(found: Manifest) -> dict[str, Bytes]:
    """All arrays of a data set by name, mapped into memory."""
    return {name: _mapped(found, name) for name in found.arrays}


def _mapped(found: Manifest, name: str) -> Bytes:
    path = _path(found, name)
    if path.exists() and not path.is_file():
        raise _damaged(found.name, f"{path.name} is no regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(found.name, str(error)) from None
    if array.dtype != np.uint8 or list(array.shape) != found.arrays[name]["shape"]:
        raise _damaged(found.name, f"{name}.npy is {array.dtype} of shape {array.shape}")
    # A plain view of the mapped memory: numpy's memmap class makes every indexing slower and adds nothing.
    return np.asarray(array)


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"the data set {name!r} in {folder()} is damaged ({reason}); {how_to_replace(name)}.")


def how_to_replace(name: str) -> str:
    """What to type where a data set is damaged."""
    from upgd.data.sources import OFFICIAL

    command = f"upgd data fetch {name}" if name in OFFICIAL else f"upgd data fetch --from FOLDER --as {name}"
    return f"`{command}` replaces it"


def _check_holds_nothing_else(target: Path) -> None:
    """A data set replaces its folder as a whole, which must not take files along that somebody else has put there."""
    ours = (target / _MANIFEST).is_file()
    others = [
        path.name for path in target.glob("*") if not (ours and (path.name == _MANIFEST or path.suffix == ".npy"))
    ]
    if others or (target.exists() and not target.is_dir()):
        raise DataError(
            f"{target} is where the data set {target.name!r} belongs, but it holds other files"
            f"{f' ({min(others)})' if others else ''}; move them away, or set UPGD_DATA to another folder."
        )


def _publish(staging: Path, target: Path) -> None:
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        target.rename(old / "old")
        staging.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(target)


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
