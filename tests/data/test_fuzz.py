"""Damaged and hostile files, by the thousand: the answer is an array or one DataError, soon and in little memory.

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

#: Good files, and how what is in them gets packed after it was damaged: damage without, within, or both.
FILES = [b"", IDX, CIFAR, TAR, ZIP, gzip.compress(IDX), gzip.compress(CIFAR), gzip.compress(TAR), lzma.compress(IDX)]
PACKINGS = [
    bytes,
    bytes,
    lambda content: gzip.compress(content, 1),
    lambda content: lzma.compress(content, preset=0),
    lambda content: zip_bytes({"member": content}),
    lambda content: gzip.compress(tar_bytes({"data_batch_2.bin": content}), 1),
]

POSITION = st.floats(0, 1)
DAMAGE = st.one_of(
    st.tuples(st.just("overwrite"), POSITION, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), POSITION, st.binary(min_size=1, max_size=16)),
    st.tuples(st.just("cut off"), POSITION, st.just(b"")),
    st.tuples(st.just("cut out"), POSITION, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("flip"), POSITION, st.binary(min_size=1, max_size=1)),
    st.tuples(st.just("header"), st.floats(0, 0.02), st.binary(min_size=1, max_size=12)),
)


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    changed = bytearray(content)
    for kind, position, by in damage:
        at = int(position * len(changed))
        if kind in ("overwrite", "header"):
            changed[at : at + len(by)] = by
        elif kind == "insert":
            changed[at:at] = by
        elif kind == "cut off":
            del changed[at:]
        elif kind == "cut out":
            del changed[at : at + len(by)]
        elif at < len(changed):
            changed[at] ^= by[0]
    return bytes(changed)


HOSTILE = st.builds(
    lambda content, damage, pack, more: damaged(pack(damaged(content, damage)), more),
    st.sampled_from(FILES) | st.binary(max_size=200),
    st.lists(DAMAGE, max_size=4),
    st.sampled_from(PACKINGS),
    st.lists(DAMAGE, max_size=1),
)


def read_everything(path, content: bytes) -> None:
    """All ways in which a file gets read; whatever is not a DataError fails the test."""
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
