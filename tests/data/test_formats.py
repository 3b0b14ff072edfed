"""The readers, with hand-made files and with all kinds of malformed files."""

import gzip
import lzma
import os
import re
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from made_files import cifar_bytes, idx_bytes, tar_bytes

from upgd.data import DataError, packing, read_cifar10, read_idx
from upgd.data.formats import parse_cifar10, parse_idx
from upgd.data.packing import unpack

IMAGES = np.arange(60, dtype=np.uint8).reshape(5, 4, 3)


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, lzma.compress, lambda b: gzip.compress(b[:19], mtime=0) + gzip.compress(b[19:])]
)
@pytest.mark.parametrize("array", [IMAGES, IMAGES[:, 0, 0].copy()])
def test_idx_is_read_plain_or_packed_regardless_of_its_name(tmp_path, pack, array):
    path = tmp_path / "some.file"
    path.write_bytes(pack(idx_bytes(array)))
    np.testing.assert_array_equal(read_idx(path), array)


def test_idx_by_hand():
    np.testing.assert_array_equal(
        parse_idx(b"\0\0\x08\x02\0\0\0\x02\0\0\0\x03abcdef", "x"), [[97, 98, 99], [100, 101, 102]]
    )


def test_cifar10_by_hand():
    record = bytes([7]) + b"r" * 1024 + b"g" * 1024 + b"b" * 1023 + b"!"
    images, labels = parse_cifar10(record * 2, "x")
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [7, 7]
    assert (images[0, 0] == ord("r")).all()
    assert (images[0, 1] == ord("g")).all()
    assert images[1, 2, 31, 31] == ord("!")


@pytest.mark.parametrize("form", ["bin", "bin.xz", "bin.gz", "tar.gz", "tar"])
def test_cifar10_is_read_from_a_folder_or_archive(tmp_path, form):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (3, 4, 3, 32, 32), np.uint8), random.integers(0, 10, (3, 4), np.uint8)
    names = ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"]
    files = {name: cifar_bytes(i, k) for name, i, k in zip(names, images, labels, strict=True)}
    path = tmp_path / "release"
    if form.startswith("tar"):
        content = tar_bytes({f"cifar-10-batches-bin/{n}": c for n, c in files.items()} | {"readme.html": b"hello"})
        path.write_bytes(gzip.compress(content, mtime=0) if form == "tar.gz" else content)
    else:
        (path / "deeper").mkdir(parents=True)
        pack = {"bin": bytes, "bin.xz": lzma.compress, "bin.gz": gzip.compress}[form]
        for name, content in files.items():
            (path / "deeper" / name.replace("bin", form)).write_bytes(pack(content))
    splits = read_cifar10(path)
    np.testing.assert_array_equal(splits["train"][0], images[:2].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(splits["train"][1], labels[:2].reshape(-1))
    np.testing.assert_array_equal(splits["test"][0], images[2])
    np.testing.assert_array_equal(splits["test"][1], labels[2])


def header(kind=8, shape=(5, 4, 3), zeros=b"\0\0"):
    return zeros + bytes([kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


PLAIN = idx_bytes(IMAGES)
PACKED = gzip.compress(PLAIN, mtime=0)
XZ = lzma.compress(PLAIN)

BAD_IDX = {
    "empty file": (b"", "is not an IDX file"),
    "wrong magic": (b"\x80\x04" + PLAIN[2:], "is not an IDX file: it does not start with two zero bytes"),
    "a pickle": (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x08builtins\x94\x8c\x04exec\x94\x93\x94.", "is not an IDX file"),
    "another type": (header(kind=13) + bytes(240), "of type 13"),
    "no dimensions": (b"\0\0\x08\0", "0 dimensions"),
    "255 dimensions": (b"\0\0\x08\xff" + bytes(2000), "255 dimensions"),
    "cut in the header": (PLAIN[:9], "truncated within its IDX header"),
    "cut in the data": (PLAIN[:-1], "is truncated: its header declares 60 bytes, but 59 follow"),
    "nothing but a header": (PLAIN[:16], "declares 60 bytes, but 0 follow"),
    "empty dimension": (header(shape=(0, 4, 3)), "is empty"),
    "huge empty shape": (header(shape=(0, 2**32 - 1, 2**32 - 1)), "is empty"),
    "oversized header": (header(shape=(2**32 - 1,) * 3) + bytes(60), "header that declares 79,228,162,458,924,"),
    "oversized header, packed": (gzip.compress(header(shape=(2**31, 28, 28)) + bytes(60)), "more than any data set"),
    "large header": (header(shape=(1000, 1000, 1000)) + bytes(60), "declares 1,000,000,000 bytes, but 60 follow"),
    "too much": (PLAIN + b"x", "contains more than the expected 76 bytes"),
    "too much, packed": (gzip.compress(PLAIN + b"x", mtime=0), "contains more than the expected 76 bytes"),
    "too much in xz": (lzma.compress(PLAIN + b"x"), "contains more than the expected 76 bytes"),
    "gzip cut off": (PACKED[:-9], "is truncated"),
    "gzip cut in its checksum": (PACKED[:-2], "is truncated"),
    "gzip with a wrong checksum": (PACKED[:-6] + bytes([PACKED[-6] ^ 1]) + PACKED[-5:], "is damaged: CRC check failed"),
    "gzip, garbage after it": (PACKED + b"garbage", "is damaged: Not a gzipped file"),
    "gzip, garbage in it": (PACKED[:20] + b"\xff\xff\xff\xff" + PACKED[24:], "is"),
    "gzip header alone": (PACKED[:3], "is not an IDX file"),
    "xz cut off": (XZ[:-5], "is truncated"),
    "xz, garbage after it": (XZ + b"garbage", "there is data after the end of its xz stream"),
    "xz with a wrong checksum": (XZ[:-20] + b"\xff" + XZ[-19:], "is"),
}


@pytest.mark.parametrize(("content", "says"), BAD_IDX.values(), ids=BAD_IDX.keys())
def test_a_bad_idx_file_gets_one_sentence_that_names_it(tmp_path, content, says):
    path = tmp_path / "bad-file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(says)) as raised:
        read_idx(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes are not a whole number of 3,073-byte records"),
        (bytes(3072), "3,072 bytes are not a whole number of 3,073-byte records"),
        (bytes([10]) + bytes(3072), "it contains the label 10"),
        (gzip.compress(bytes(3073), mtime=0)[:-10], "is truncated"),
        (lzma.compress(bytes(3073))[:-10], "is truncated"),
    ],
)
def test_a_bad_cifar10_batch_gets_one_sentence(content, says):
    with pytest.raises(DataError, match=re.escape(says)):
        parse_cifar10(content, "batch")


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_a_damaged_cifar10_archive_is_refused(tmp_path, in_a_folder):
    """Truncated between two batches: the files before that could be read."""
    random = np.random.default_rng(0)
    batch = cifar_bytes(random.integers(0, 256, (4, 3, 32, 32), np.uint8), np.zeros(4, np.uint8))
    long = random.integers(0, 256, 100_000, np.uint8).tobytes()
    before, after = {"data_batch_1.bin": batch, "readme.html": long}, {"data_batch_2.bin": batch}
    whole = gzip.compress(tar_bytes(before | after), mtime=0)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(whole[: len(gzip.compress(tar_bytes(before), mtime=0)) - len(long) // 2])
    with pytest.raises(
        DataError, match=r"cifar-10-binary.tar.gz is truncated; replace it with an intact copy"
    ) as raised:
        read_cifar10(tmp_path if in_a_folder else path)
    assert str(raised.value).startswith(str(tmp_path))
    path.write_bytes(whole)
    assert len(read_cifar10(path)["train"][1]) == 8


def test_a_folder_without_cifar10_gets_one_sentence(tmp_path):
    with pytest.raises(DataError, match="contains neither data_batch"):
        read_cifar10(tmp_path)
    with pytest.raises(DataError, match="there is no file or folder"):
        read_cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize("pack", [gzip.compress, lambda content: lzma.compress(content, preset=0)])
def test_a_bomb_is_stopped_at_the_declared_size(pack):
    bomb = pack(PLAIN + bytes(60_000_000))
    tracemalloc.start()
    with pytest.raises(DataError, match="contains more than the expected 76 bytes"):
        parse_idx(bomb, "bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_xz_that_asks_for_gigabytes_of_memory_is_refused():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    packed = bytearray(lzma.compress(PLAIN, filters=filters))
    # The dictionary size is one byte of the block header (offset 12: size, flags, filter id, size of properties, it).
    assert packed[14:16] == b"\x21\x01"
    packed[16] = 40  # 4 GiB − 1
    size = (packed[12] + 1) * 4
    packed[12 + size - 4 : 12 + size] = struct.pack("<I", zlib.crc32(packed[12 : 12 + size - 4]))
    with pytest.raises(DataError):
        parse_idx(bytes(packed), "greedy")
    with pytest.raises(DataError, match="Memory usage limit"):
        unpack(bytes(packed), "greedy", 100)


def test_thousands_of_empty_gzip_members_take_no_time():
    with pytest.raises(DataError):
        parse_idx(gzip.compress(b"", mtime=0) * 20_000, "members")


def test_a_file_above_the_limit_is_not_even_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("upgd.data.formats.LIMIT", 50)
    path = tmp_path / "large"
    path.write_bytes(PLAIN)
    with pytest.raises(DataError, match="larger than 50 bytes"):
        read_idx(path)


@pytest.mark.parametrize("pack", [gzip.compress, lambda content: lzma.compress(content, preset=0)])
def test_a_high_compression_ratio_is_refused(monkeypatch, pack):
    monkeypatch.setattr(packing, "_FREE", 1 << 20)
    with pytest.raises(DataError, match="batch unpacks to more than 100 times its size, unlike any image data"):
        parse_cifar10(pack(bytes(3073 * 1_000)), "batch")
    images, _ = parse_cifar10(pack(bytes(3073 * 100)), "batch")
    assert len(images) == 100


def test_batches_of_cifar10_are_limited_together(tmp_path, monkeypatch):
    monkeypatch.setattr("upgd.data.formats.TAR_LIMIT", 3073 * 25)
    for k in range(3):
        (tmp_path / f"data_batch_{k}.bin.gz").write_bytes(gzip.compress(bytes(3073 * 10), mtime=0))
    with pytest.raises(DataError, match=r"data_batch_2.bin.gz contains more than the expected 15,\d+ bytes"):
        read_cifar10(tmp_path)


def test_a_named_pipe_is_no_file_of_data(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a regular file"):
        read_idx(tmp_path / "pipe")
