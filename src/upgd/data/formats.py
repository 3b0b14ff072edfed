"""Readers for the two formats that the data sets come in. They trust nothing and unpickle nothing.

IDX (MNIST, EMNIST)::

    0  0  8  d        two zeros, the code for unsigned bytes, the number of dimensions
    n₁ … n_d          sizes, 32-bit, most significant byte first
    n₁·…·n_d bytes

CIFAR-10, binary release: records of 3,073 bytes, a label and then the red, green and blue plane of a 32×32 image.

A file may be packed with gzip or xz, which is seen from its first bytes, not from its name. Whatever is wrong with it, the
answer is one :class:`~upgd.data.DataError`; memory stays below what the header promises, and that below ``LIMIT``.
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

#: The most bytes that any one file may unpack to: twice the largest IDX file that people use (EMNIST by class).
LIMIT = 1 << 30

CIFAR10_RECORD = 1 + 3 * 32 * 32
_MOST_DIMENSIONS = 8
_LONGEST_IDX_HEADER = 4 + 4 * _MOST_DIMENSIONS


def read_idx(path: str | Path) -> Bytes:
    """The array in an IDX file of unsigned bytes, plain or packed with gzip or xz.

    Example:
        >>> images = upgd.data.read_idx("train-images-idx3-ubyte.gz")  # doctest: +SKIP
        >>> images.shape  # doctest: +SKIP
        (60000, 28, 28)
    """
    return parse_idx(_content(Path(path)), str(path))


def read_cifar10(path: str | Path) -> dict[str, tuple[Bytes, Bytes]]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)`` of CIFAR-10's binary release, for "train" and "test".

    Args:
        path: The official ``cifar-10-binary.tar.gz``, or the folder with ``data_batch_1.bin`` … ``data_batch_5.bin`` and
            ``test_batch.bin``, each plain or packed as ``.bin.xz`` or ``.bin.gz``. What is not there is left out; but if an
            archive is damaged, nobody knows what is missing, and nothing is returned.
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
        raise DataError(f"{path}: {problems[0]}; put a good copy in its place, or take it away.")
    if not batches:
        raise DataError(f"{path} holds no data_batch_*.bin and no test_batch.bin, plain or as .xz or .gz.")
    test = [batches.pop("test_batch")] if "test_batch" in batches else []
    train = [batches[name] for name in sorted(batches)]
    return {split: _joined(parts) for split, parts in (("train", train), ("test", test)) if parts}


def parse_idx(data: bytes, name: str) -> Bytes:
    """The array in the bytes of an IDX file, packed or not. ``name`` is for the error message."""
    head = peek(data, _LONGEST_IDX_HEADER)
    start, shape = _idx_header(head, name)
    promised = math.prod(shape)
    if promised > LIMIT:
        raise DataError(
            f"{name} has a header that promises {promised:,} bytes, more than any data set of this kind has."
        )
    content = unpack(data, name, start + promised)
    if len(content) < start + promised:
        raise DataError(
            f"{name} is cut off: its header promises {promised:,} bytes and {max(0, len(content) - start):,} follow."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def parse_cifar10(data: bytes, name: str, limit: int = TAR_LIMIT) -> tuple[Bytes, Bytes]:
    """Images and labels in the bytes of one CIFAR-10 batch, packed or not. ``name`` is for the error message."""
    content = unpack(data, name, limit)
    if not content or len(content) % CIFAR10_RECORD:
        raise DataError(
            f"{name} is no CIFAR-10 batch or is cut off: "
            f"{len(content):,} bytes are no whole number of records of {CIFAR10_RECORD:,} bytes."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR10_RECORD)
    labels = records[:, 0]
    if labels.max() > 9:
        raise DataError(f"{name} is no CIFAR-10 batch: it has the label {labels.max()}, and labels go from 0 to 9.")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def idx_shape(head: bytes) -> tuple[int, ...] | None:
    """The shape that an IDX file promises in its first bytes, or None if that is no IDX file of unsigned bytes."""
    try:
        return _idx_header(head, "")[1]
    except DataError:
        return None


def _idx_header(head: bytes, name: str) -> tuple[int, tuple[int, ...]]:
    """Where the data begin, and their shape."""
    if len(head) < 4 or head[:2] != b"\0\0":
        raise DataError(
            f"{name} is no IDX file: it does not begin with two zero bytes, a type and a number of dimensions."
        )
    kind, dimensions = head[2], head[3]
    if kind != 8:
        raise DataError(f"{name} is no IDX file of unsigned bytes (type 8), but of type {kind}.")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise DataError(f"{name} has an IDX header of {dimensions} dimensions; images have 3, labels 1.")
    start = 4 + 4 * dimensions
    if len(head) < start:
        raise DataError(f"{name} is cut off within its IDX header.")
    shape = struct.unpack(f">{dimensions}I", head[4:start])
    if 0 in shape:
        raise DataError(f"{name} is empty: its IDX header promises the shape {shape}.")
    return start, shape


def _joined(batches: list[tuple[Bytes, Bytes]]) -> tuple[Bytes, Bytes]:
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a named pipe would wait for ever, and a device would never end
        raise DataError(f"{path} is no regular file; name the file that holds the images or labels.")
    if path.stat().st_size > LIMIT:
        raise DataError(f"{path} is larger than {LIMIT:,} bytes, too large for a data set of this kind.")
    return path.read_bytes()
