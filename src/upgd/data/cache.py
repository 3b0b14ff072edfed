"""The folder of data sets, stored for memory mapping.

::

    <cache>/mnist/manifest.json            description, origin and checksums
    <cache>/mnist/train-images.npy  …      uint8 arrays
    <cache>/.mnist.lock                    held while a process prepares mnist
    <cache>/.downloads/                    partial downloads, which can be resumed

A data set is written to a hidden folder and renamed once it is complete. Data sets are therefore never half-written, even
if the process is killed or several processes prepare the same one.
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
    """Description of a cached data set, as stored in its manifest.

    ``files`` lists the name, origin and SHA-256 of each original file; ``arrays`` lists the shape and SHA-256 of each
    ``.npy`` file.
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
    """Return the folder of data sets: ``UPGD_DATA`` if set, otherwise the user's cache folder for upgd.

    The default equals ``pooch.os_cache("upgd")`` but is computed without pooch, which reading data does not require.
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
    """Return the name if it is valid for a data set and its folder; otherwise raise DataError."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise DataError(
            f"{name!r} is not a valid name for a data set: use up to 64 lower-case letters, digits, '-', '_' and '.', "
            "starting with a letter or digit"
        )
    return name


def names() -> list[str]:
    """Return the names of the data sets in the cache."""
    return sorted(path.parent.name for path in folder().glob(f"[!.]*/{_MANIFEST}"))


def owner(path: Path) -> str | None:
    """Return the name of the data set whose folder contains the file, or None."""
    root = folder().resolve()
    if not path.is_relative_to(root):
        return None
    name = path.relative_to(root).parts[0]
    return name if (root / name / _MANIFEST).is_file() else None


def entry(name: str) -> Manifest | None:
    """Return the manifest of a data set, or None if it is not in the cache."""
    path = folder() / checked_name(name) / _MANIFEST
    if path.exists() and not path.is_file():
        raise _damaged(name, f"{_MANIFEST} is not a regular file")
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
    """Return a split as a data set with memory-mapped arrays."""
    if split not in found.counts:
        have = " and ".join(repr(s) for s in found.counts)
        raise DataError(f"split must be {have} for the data set {found.name!r}, not {split!r}")
    images, labels = (_mapped(found, f"{split}-{content}") for content in ("images", "labels"))
    return Dataset(found.name, images, labels, found.classes, found.white, found.transposed)


def is_intact(found: Manifest) -> bool:
    """Return whether every array still matches its checksum."""
    return all(
        path.is_file() and sha256(path) == array["sha256"]
        for path, array in ((_path(found, name), array) for name, array in found.arrays.items())
    )


def store(described: Manifest, arrays: Mapping[str, Bytes]) -> Manifest:
    """Store a data set under its name atomically, replacing any data set of that name.

    Must be called within :func:`locked`.
    """
    root = folder()
    staging = Path(tempfile.mkdtemp(prefix=f".{described.name}-", dir=root))
    try:
        # mkdtemp makes the folder private, but a cache may be shared.
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
    """Allow one process at a time to prepare a data set, and remove what a killed process left behind.

    The lock belongs to the operating system and is released when the process ends.
    """
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError as error:  # a dependency of torch, so normally installed
        raise ModuleNotFoundError(
            "preparing data needs filelock, which is not installed; run pip install 'upgd[run]'", name="filelock"
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
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _path(found: Manifest, array: str) -> Path:
    return folder() / found.name / f"{array}.npy"


def arrays(found: Manifest) -> dict[str, Bytes]:
    """Return all arrays of a data set by name, memory-mapped."""
    return {name: _mapped(found, name) for name in found.arrays}


def _mapped(found: Manifest, name: str) -> Bytes:
    path = _path(found, name)
    if path.exists() and not path.is_file():
        raise _damaged(found.name, f"{path.name} is not a regular file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(found.name, str(error)) from None
    if array.dtype != np.uint8 or list(array.shape) != found.arrays[name]["shape"]:
        raise _damaged(found.name, f"{name}.npy is {array.dtype} of shape {array.shape}")
    # A plain view of the mapped memory, because indexing numpy.memmap objects is slower.
    return np.asarray(array)


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"the data set {name!r} in {folder()} is damaged ({reason}); {how_to_replace(name)}.")


def how_to_replace(name: str) -> str:
    """Return a clause that tells the user how to replace a damaged data set."""
    from upgd.data.sources import OFFICIAL

    command = f"upgd data fetch {name}" if name in OFFICIAL else f"upgd data fetch --from FOLDER --as {name}"
    return f"`{command}` replaces it"


def _check_holds_nothing_else(target: Path) -> None:
    """Raise DataError if the folder contains other files, because storing a data set replaces the whole folder."""
    ours = (target / _MANIFEST).is_file()
    others = [
        path.name for path in target.glob("*") if not (ours and (path.name == _MANIFEST or path.suffix == ".npy"))
    ]
    if others or (target.exists() and not target.is_dir()):
        raise DataError(
            f"{target} is the folder of the data set {target.name!r}, but it contains other files"
            f"{f' ({min(others)})' if others else ''}; move them, or set UPGD_DATA to another folder"
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
