"""Strict readers for the two file formats of the data sets. They never unpickle.

IDX (MNIST, EMNIST)::

    0  0  8  d        two zeros, the code for unsigned bytes, the number of dimensions
    n₁ … n_d          sizes, 32-bit, most significant byte first
    n₁·…·n_d bytes

CIFAR-10, binary release: records of 3,073 bytes, a label and then the red, green and blue plane of a 32×32 image.

Files may be packed with gzip or xz, which is detected from the first bytes, not from the name. Every malformed file raises
a :class:`~upgd.data.DataError`. Memory use is bounded by the size in the header, which must not exceed ``LIMIT``.
"""

import math
import re
import struct
from pathlib import Path

import numpy as np

from upgd.data.archives import TAR_LIMIT, Problems, leaves
from upgd.data.dataset import Bytes, DataError
from upgd.data.packing import peek, unpack

__all__ = ["CIFAR10_RECORD", "LIMIT", "idx_shape", "parse_cifar10", "parse_idx", "read_cifar10", "read_idx"]

#: Limit on the unpacked size of a file in bytes: twice the largest IDX file in common use (EMNIST by class).
LIMIT = 1 << 30

CIFAR10_RECORD = 1 + 3 * 32 * 32
_MOST_DIMENSIONS = 8
_LONGEST_IDX_HEADER = 4 + 4 * _MOST_DIMENSIONS


def read_idx(path: str | Path) -> Bytes:
    """Read an IDX file of unsigned bytes, plain or packed with gzip or xz.

    Example:
        >>> images = upgd.data.read_idx("train-images-idx3-ubyte.gz")  # doctest: +SKIP
        >>> images.shape  # doctest: +SKIP
        (60000, 28, 28)
    """
    return parse_idx(_content(Path(path)), str(path))


def read_cifar10(path: str | Path) -> dict[str, tuple[Bytes, Bytes]]:
    """Read the binary release of CIFAR-10.

    Args:
        path: The official ``cifar-10-binary.tar.gz``, or the folder with ``data_batch_1.bin`` … ``data_batch_5.bin`` and
            ``test_batch.bin``, each plain or packed as ``.bin.xz`` or ``.bin.gz``. Missing batches are left out. A damaged
            archive raises an error, because what is missing is unknown.

    Returns:
        Images ``(n, 3, 32, 32)`` and labels ``(n,)`` for "train" and "test".
    """
    problems: Problems = []
    batches: dict[str, tuple[Bytes, Bytes]] = {}
    left = TAR_LIMIT
    for leaf in leaves(Path(path), problems):
        name = re.fullmatch(r"(data_batch_\d|test_batch)\.bin(\.xz|\.gz)?", leaf.name.rsplit("/", 1)[-1])
        if name:
            batches[name[1]] = parse_cifar10(leaf.read(left), f"{path}: {leaf.name}", left)
            left -= batches[name[1]][0].nbytes
    if problems:
        raise DataError(f"{path}: {problems[0]}; replace it with an intact copy, or remove it")
    if not batches:
        raise DataError(f"{path} contains neither data_batch_*.bin nor test_batch.bin, plain or as .xz or .gz")
    test = [batches.pop("test_batch")] if "test_batch" in batches else []
    train = [batches[name] for name in sorted(batches)]
    return {split: _joined(parts) for split, parts in (("train", train), ("test", test)) if parts}


def parse_idx(data: bytes, name: str) -> Bytes:
    """Parse the bytes of an IDX file, packed or not. ``name`` is used in error messages."""
    head = peek(data, _LONGEST_IDX_HEADER)
    start, shape = _idx_header(head, name)
    promised = math.prod(shape)
    if promised > LIMIT:
        raise DataError(
            f"{name} has a header that declares {promised:,} bytes, more than any data set of this kind has"
        )
    content = unpack(data, name, start + promised)
    if len(content) < start + promised:
        raise DataError(
            f"{name} is truncated: its header declares {promised:,} bytes, but {max(0, len(content) - start):,} follow"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def parse_cifar10(data: bytes, name: str, limit: int = TAR_LIMIT) -> tuple[Bytes, Bytes]:
    """Parse the bytes of a CIFAR-10 batch, packed or not, into images and labels. ``name`` is used in error messages."""
    content = unpack(data, name, limit)
    if not content or len(content) % CIFAR10_RECORD:
        raise DataError(
            f"{name} is not a CIFAR-10 batch or is truncated: "
            f"{len(content):,} bytes are not a whole number of {CIFAR10_RECORD:,}-byte records"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR10_RECORD)
    labels = records[:, 0]
    if labels.max() > 9:
        raise DataError(f"{name} is not a CIFAR-10 batch: it contains the label {labels.max()}, but labels are 0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def idx_shape(head: bytes) -> tuple[int, ...] | None:
    """Return the shape declared in the first bytes of an IDX file, or None if it is not an IDX file of unsigned bytes."""
    try:
        return _idx_header(head, "")[1]
    except DataError:
        return None


def _idx_header(head: bytes, name: str) -> tuple[int, tuple[int, ...]]:
    """Return the offset of the data and their shape."""
    if len(head) < 4 or head[:2] != b"\0\0":
        raise DataError(
            f"{name} is not an IDX file: it does not start with two zero bytes, a type and a number of dimensions"
        )
    kind, dimensions = head[2], head[3]
    if kind != 8:
        raise DataError(f"{name} is not an IDX file of unsigned bytes (type 8), but of type {kind}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise DataError(f"{name} has an IDX header of {dimensions} dimensions; images have 3, labels 1")
    start = 4 + 4 * dimensions
    if len(head) < start:
        raise DataError(f"{name} is truncated within its IDX header")
    shape = struct.unpack(f">{dimensions}I", head[4:start])
    if 0 in shape:
        raise DataError(f"{name} is empty: its IDX header declares the shape {shape}")
    return start, shape


def _joined(batches: list[tuple[Bytes, Bytes]]) -> tuple[Bytes, Bytes]:
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # reading from a named pipe or a device would never end
        raise DataError(f"{path} is not a regular file; give the file that contains the images or labels")
    if path.stat().st_size > LIMIT:
        raise DataError(f"{path} is larger than {LIMIT:,} bytes, too large for a data set of this kind")
    return path.read_bytes()
