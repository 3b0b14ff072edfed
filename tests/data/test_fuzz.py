"""Fuzzing with damaged and malicious files: the result is an array or a DataError, fast and in little memory.

A few hundred inputs each time; a hundred thousand with ``-m slow``.
"""

import contextlib
import gzip
import lzma
import resource

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_files import cifar_bytes, idx_bytes, tar_bytes, zip_bytes

from upgd.data import DataError, fetch_from, read_cifar10, read_idx
from upgd.data.archives import leaves
from upgd.data.formats import parse_cifar10, parse_idx

IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
IDX = idx_bytes(IMAGES)
CIFAR = cifar_bytes(np.ones((2, 3, 32, 32), np.uint8), np.array([3, 9], np.uint8))
MEMBERS = {"x/data_batch_1.bin": CIFAR, "x/test_batch.bin": lzma.compress(CIFAR), "x/labels.gz": gzip.compress(IDX)}
TAR, ZIP = tar_bytes(MEMBERS), zip_bytes(MEMBERS)

#: Valid files, and how their content is packed after it was damaged: damage outside, inside, or both.
FILES = [
    b"",
    IDX,
    IDX,
    CIFAR,
    TAR,
    ZIP,
    gzip.compress(IDX),
    gzip.compress(CIFAR),
    gzip.compress(TAR),
    lzma.compress(IDX),
]
PACKINGS = [
    bytes,
    bytes,
    lambda content: gzip.compress(content, 1),
    lambda content: lzma.compress(content, preset=0),
    lambda content: zip_bytes({"member": content}),
    lambda content: gzip.compress(tar_bytes({"data_batch_2.bin": content}), 1),
]


def damaged(content: bytes, recipe: bytes) -> bytes:
    """Modify the content by a recipe of five-byte steps: operation, position (two bytes), length and value."""
    changed = bytearray(content)
    for kind, high, low, amount, value in zip(*[iter(recipe)] * 5, strict=False):
        at = (high << 8 | low) * len(changed) >> 16
        if kind % 8 < 2:
            at = low % 64  # headers matter most
        length = 1 + amount % 16
        match kind // 8 % 6:
            case 0:
                changed[at : at + length] = bytes([value]) * length
            case 1:
                changed[at:at] = bytes([value]) * length
            case 2:
                del changed[at : at + length]
            case 3:
                del changed[at:]
            case 4:
                changed[at : at + 1] = bytes(byte ^ 1 << value % 8 for byte in changed[at : at + 1])
            case 5:
                changed[at:at] = changed[: length * 8]
    return bytes(changed)


HOSTILE = st.builds(
    lambda content, inside, pack, outside: damaged(pack(damaged(content, inside)), outside),
    st.sampled_from(FILES),
    st.binary(max_size=20),
    st.sampled_from(PACKINGS),
    st.binary(max_size=9),
)


def read_everything(path, content: bytes) -> None:
    """Read the file in all ways; any exception other than DataError fails the test."""
    path.write_bytes(content)
    for read in (
        lambda: parse_idx(content, "file"),
        lambda: parse_cifar10(content, "file"),
        lambda: read_idx(path),
        lambda: read_cifar10(path),
        lambda: [leaf.read(1 << 20) for leaf in leaves(path, [])],
        lambda: fetch_from(path),
    ):
        with contextlib.suppress(DataError):
            read()


# One file that takes longer than this counts as a hang, however busy the machine is.
common = settings(deadline=10_000, database=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file"


@given(st.binary(max_size=400))
@settings(common, max_examples=100)
def test_random_bytes(path, content):
    read_everything(path, content)


@given(HOSTILE)
@settings(common, max_examples=400)
def test_hostile_files(path, content):
    read_everything(path, content)


@pytest.mark.slow
def test_a_hundred_thousand_hostile_files(path):
    count = 0

    @given(HOSTILE)
    @settings(common, max_examples=100_000, derandomize=False)
    def run(content):
        nonlocal count
        count += 1
        read_everything(path, content)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert count >= 100_000
    assert grown < 500_000, f"the largest memory use grew by {grown} kB"
