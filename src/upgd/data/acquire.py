"""Add data sets to the cache, from downloads or local files."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from upgd.data import cache
from upgd.data.archives import Leaf, Problems, leaves
from upgd.data.cache import Manifest
from upgd.data.dataset import Bytes, DataError
from upgd.data.formats import CIFAR10_RECORD, LIMIT, idx_shape, parse_cifar10, parse_idx
from upgd.data.packing import is_packed, peek
from upgd.data.sources import OFFICIAL, Part, Source
from upgd.data.transfer import Progress, download

__all__ = ["adopt", "fetch", "fetch_from"]

_HEAD = 1 << 16


class _Found:
    """A verified file: its arrays by content ("images", "labels"), and its record for the manifest."""

    def __init__(self, arrays: Mapping[str, Bytes], name: str, origin: str, checksum: str) -> None:
        self.arrays = arrays
        self.record = {"name": name, "from": origin, "sha256": checksum}


def fetch(name: str, *, mirror: str | None = None, progress: Progress | None = None) -> Manifest:
    """Download an official data set into the cache, unless an intact copy is already there.

    Args:
        name: "mnist", "emnist" or "cifar10".
        mirror: URL of a folder with the files under their official names; tried before the public mirrors.
        progress: Called with a file's name, the number of bytes received, and the total number of bytes.

    Returns:
        The manifest of the data set: counts, checksums, origin.
    """
    source = _official(name)
    with cache.locked(name):
        if (present := _intact(name)) is not None:
            return present
        downloads = cache.folder() / ".downloads"
        found: dict[Part, _Found] = {}
        problems: Problems = []
        for wanted in source.downloads:
            downloads.mkdir(exist_ok=True)
            url = download(wanted, downloads, progress, mirror)
            found |= _find(source.parts, downloads / wanted.name, url, problems)
        entry = _keep(source, found, problems, "the download")
        for wanted in source.downloads:
            (downloads / wanted.name).unlink(missing_ok=True)
        with suppress(OSError):  # other downloads may be in progress there
            downloads.rmdir()
        return entry


def fetch_from(path: str | Path, names: Sequence[str] = ()) -> list[Manifest]:
    """Add official data sets from local files: a folder, including subfolders and archives, or one archive.

    Files are recognized by content, regardless of their names, verified by checksum, and copied.

    Args:
        path: The folder or archive.
        names: The data sets to add. Default: all that are complete.

    Returns:
        The manifest of each data set.
    """
    path = Path(path).expanduser()
    entries = {name: _intact(name) for name in names}
    wanted = [_official(name) for name in names or OFFICIAL if not entries.get(name)]
    problems: Problems = []
    found = _find([part for source in wanted for part in source.parts], path, str(path), problems) if wanted else {}
    if not names:
        wanted = [source for source in wanted if all(part in found for part in source.parts)]
        if not wanted:
            raise DataError(f"{path} contains no complete official data set ({', '.join(OFFICIAL)}){_told(problems)}")
    for source in wanted:
        with cache.locked(source.name):
            entries[source.name] = _intact(source.name) or _keep(source, found, problems, str(path))
    return [entry for entry in entries.values() if entry is not None]


def adopt(path: str | Path, name: str, *, transposed: bool = False, replace: bool = False) -> Manifest:
    """Add your own IDX files, such as a subset of EMNIST, under a new name.

    Results refer to data by name, so a name cannot be reused for different data unless ``replace`` is True.

    Args:
        path: A folder or archive with one or two pairs of IDX files, images and labels, with any file names. The larger
            pair is the training split and the other, if present, the test split.
        name: The name of the data set; must not be that of an official data set.
        transposed: Whether rows and columns of the images are swapped, as in EMNIST. Default: False.
        replace: Whether to replace a different data set of the same name. Default: False.

    Returns:
        The manifest of the data set.
    """
    path = Path(path).expanduser()
    if cache.checked_name(name) in (*OFFICIAL, "digits"):
        raise DataError(f"{name!r} is the name of an official data set; choose another, such as '{name}-subset'")
    found, problems = _all_idx(path)
    arrays = _paired([array for f in found for array in f.arrays.values()], path, problems)
    classes = 1 + max(int(array.max()) for key, array in arrays.items() if key.endswith("labels"))
    described = Manifest(name, classes, 255, transposed, False, _now(), [f.record for f in found])
    with cache.locked(name):
        present = _intact(name)
        if present is not None and not replace and not _same(present, arrays, transposed):
            raise DataError(
                f"a different data set {name!r} already exists, and results refer to it by that name; choose another name, "
                "or replace it (--replace) and delete its results"
            )
        return cache.store(described, arrays)


def _same(present: Manifest, arrays: Mapping[str, Bytes], transposed: bool) -> bool:
    stored = cache.arrays(present)
    same_pixels = stored.keys() == arrays.keys() and all(np.array_equal(stored[key], arrays[key]) for key in stored)
    return same_pixels and present.transposed == transposed


def _official(name: str) -> Source:
    if name not in OFFICIAL:
        raise DataError(f"there is no official data set {name!r}; choose one of {', '.join(OFFICIAL)}")
    return OFFICIAL[name]


def _intact(name: str) -> Manifest | None:
    try:
        present = cache.entry(name)
    except DataError:
        return None
    return present if present is not None and cache.is_intact(present) else None


def _find(parts: Sequence[Part], path: Path, origin: str, problems: Problems) -> dict[Part, _Found]:
    """Return the parts found in a file, folder or archive, each verified by its checksum."""
    found: dict[Part, _Found] = {}
    for leaf in leaves(path, problems):
        try:
            match = _match(leaf, parts)
        except DataError as error:
            problems.append(str(error).removesuffix("."))
            continue
        if match is not None:
            part, checksum, arrays = match
            found.setdefault(part, _Found(arrays, leaf.name, origin, checksum))
    return found


def _match(leaf: Leaf, parts: Sequence[Part]) -> tuple[Part, str, dict[str, Bytes]] | None:
    head = leaf.read(_HEAD)
    candidates = [part for part in parts if _may_be(part, head, leaf.size)]
    if not candidates:
        return None
    data = head + leaf.read(LIMIT)
    content = leaf.unpack(data, max(_size(part) for part in candidates))
    for form in (data, content) if is_packed(head) else (content,):
        checksum = hashlib.sha256(form).hexdigest()
        for part in candidates:
            if checksum in part.checksums:
                return part, checksum, _arrays(part, content, leaf.name)
    if candidates[0].content == "batch" and is_packed(head) and len(content) != _size(candidates[0]):
        return None  # a packed file of another kind
    raise DataError(
        f"{leaf.name} looks like {candidates[0]}, but its SHA-256 {checksum} does not match the official file"
    )


def _may_be(part: Part, head: bytes, size: int) -> bool:
    if part.content == "batch":
        return size == _size(part) or (is_packed(head) and idx_shape(peek(head, 64)) is None)
    return idx_shape(peek(head, 64)) == part.shape


def _size(part: Part) -> int:
    """Size of the unpacked file in bytes."""
    if part.content == "batch":
        return part.shape[0] * CIFAR10_RECORD
    return 4 + 4 * len(part.shape) + int(np.prod(part.shape))


def _arrays(part: Part, content: bytes, name: str) -> dict[str, Bytes]:
    if part.content == "batch":
        images, labels = parse_cifar10(content, name)
        return {"images": images, "labels": labels}
    return {part.content: parse_idx(content, name)}


def _keep(source: Source, found: Mapping[Part, _Found], problems: Problems, where: str) -> Manifest:
    missing = [str(part) for part in source.parts if part not in found]
    if missing:
        raise DataError(f"{where} does not contain all of {source.name}: missing {', '.join(missing)}{_told(problems)}")
    files = [found[part] for part in source.parts]
    arrays = {
        f"{split}-{content}": np.concatenate(
            [found[p].arrays[content] for p in source.parts if p.split == split and content in found[p].arrays]
        )
        for split in ("train", "test")
        for content in ("images", "labels")
    }
    described = Manifest(source.name, source.classes, 255, source.transposed, True, _now(), [f.record for f in files])
    return cache.store(described, arrays)


def _told(problems: Problems) -> str:
    return f" ({'; '.join(problems[:5])})" if problems else ""


def _all_idx(path: Path) -> tuple[list[_Found], Problems]:
    found, problems, total = [], Problems(), 0
    for leaf in leaves(path, problems):
        head = leaf.read(_HEAD)
        shape = idx_shape(peek(head, 64))
        if shape is not None and len(shape) in (1, 3):
            total += math.prod(shape)
            if total > LIMIT:
                raise DataError(f"{path} contains IDX files of more than {LIMIT:,} bytes, too many for one data set")
            data = head + leaf.read(LIMIT)
            checksum = hashlib.sha256(data).hexdigest()
            found.append(_Found({"array": parse_idx(data, leaf.name)}, leaf.name, str(path), checksum))
    return found, problems


def _paired(arrays: Sequence[Bytes], path: Path, problems: Problems) -> dict[str, Bytes]:
    """Pair images and labels by their number, and return them as arrays of the training and test split."""
    images = sorted((a for a in arrays if a.ndim == 3), key=len, reverse=True)
    labels = sorted((a for a in arrays if a.ndim == 1), key=len, reverse=True)
    counts = [len(a) for a in images]
    if not 1 <= len(counts) <= 2 or counts != [len(a) for a in labels] or len(set(counts)) < len(counts):
        raise DataError(
            f"{path} must contain one or two pairs of IDX files, images and labels, with different numbers of images; "
            f"it contains images of shapes {[a.shape for a in images]} and labels of shapes {[a.shape for a in labels]}"
            f"{_told(problems)}"
        )
    if len({a.shape[1:] for a in images}) > 1:
        raise DataError(f"{path} contains images of different sizes: {[a.shape for a in images]}")
    splits = ("train", "test")[: len(images)]
    return {f"{s}-images": a for s, a in zip(splits, images, strict=True)} | {
        f"{s}-labels": a for s, a in zip(splits, labels, strict=True)
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
