"""Folders and archives: every intact file is found, and malicious archives are harmless."""

import gzip
import io
import os
import re
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from made_files import tar_bytes, zip_bytes

from upgd.data import DataError, archives, packing
from upgd.data.archives import leaves

MEMBERS = {"folder/a.bin": b"first", "b.bin": b"second " * 20_000}


def contents(path):
    problems = []
    return {leaf.name: leaf.read(1 << 30) for leaf in leaves(path, problems)}, problems


@pytest.mark.parametrize("make", [zip_bytes, tar_bytes, lambda m: gzip.compress(tar_bytes(m))])
def test_archives_are_read_without_writing_anything(tmp_path, make):
    path = tmp_path / "archive"
    path.write_bytes(make(MEMBERS))
    found, problems = contents(path)
    assert found == {f"archive/{name}": content for name, content in MEMBERS.items()}
    assert problems == []
    assert os.listdir(tmp_path) == ["archive"]


def test_a_folder_is_searched_with_subfolders_and_archives(tmp_path):
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "file").write_bytes(b"content")
    (tmp_path / "deep" / "archive").write_bytes(zip_bytes({"member": b"inside"}))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "file").write_bytes(b"unseen")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    found, problems = contents(tmp_path)
    assert found == {"deep/archive/member": b"inside", "deep/deeper/file": b"content"}
    assert problems == []


def test_a_folder_with_too_many_files_is_the_wrong_one(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_FILES", 3)
    for k in range(4):
        (tmp_path / str(k)).touch()
    with pytest.raises(DataError, match="has more than 3 files: give the folder that contains the data set"):
        contents(tmp_path)


def linked(kind, target):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.type, info.linkname = kind, target
        archive.addfile(info)
    return buffer.getvalue()


def zip_with_method(method):
    content = bytearray(zip_bytes({"a": b"content"}))
    content[8:10] = struct.pack("<H", method)
    central = content.index(b"PK\x01\x02")
    content[central + 10 : central + 12] = struct.pack("<H", method)
    return bytes(content)


def encrypted_zip():
    content = bytearray(zip_bytes({"a": b"content"}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


GOOD_TAR, GOOD_ZIP = tar_bytes(MEMBERS), zip_bytes(MEMBERS)
NEGATIVE_SIZE = tarfile.TarInfo("a").tobuf()[:124] + b"\xff" * 12 + tarfile.TarInfo("a").tobuf()[136:]

BAD = {
    "path out of a tar": (tar_bytes({"../../etc/passwd": b"x"}), "a path outside the archive's folder"),
    "absolute path in a tar": (tar_bytes({"/etc/passwd": b"x"}), "a path outside the archive's folder"),
    "path out of a zip": (zip_bytes({"a/../../b": b"x"}), "a path outside the archive's folder"),
    "absolute path in a zip": (zip_bytes({"/etc/passwd": b"x"}), "a path outside the archive's folder"),
    "Windows path in a zip": (zip_bytes({"C:\\windows\\x": b"x"}), "a path outside the archive's folder"),
    "Windows path out of a tar": (tar_bytes({"..\\..\\x": b"x"}), "a path outside the archive's folder"),
    "symbolic link": (linked(tarfile.SYMTYPE, "/etc/passwd"), "is not a regular file"),
    "hard link": (linked(tarfile.LNKTYPE, "/etc/passwd"), "is not a regular file"),
    "device": (linked(tarfile.CHRTYPE, ""), "is not a regular file"),
    "named pipe": (linked(tarfile.FIFOTYPE, ""), "is not a regular file"),
    "tar.gz cut off": (gzip.compress(GOOD_TAR)[:-100], "is truncated"),
    "damaged header in a tar": (GOOD_TAR[:1024] + b"x" * 512 + GOOD_TAR[1536:], ""),
    "encrypted zip": (encrypted_zip(), "is encrypted"),
    "zip cut off": (GOOD_ZIP[:-30], "is not a zip file"),
    "zip without members": (GOOD_ZIP[:60], "is not a zip file"),
}


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_archive_is_passed_over_and_named(tmp_path, content, says):
    path = tmp_path / "bad.archive"
    path.write_bytes(content)
    problems = []
    try:
        for leaf in leaves(path, problems):
            leaf.read(1 << 30)
    except DataError as error:  # the damage is within a member
        problems.append(str(error))
    assert len(problems) == (1 if says else 0)
    assert all(says in problem and "bad.archive" in problem for problem in problems)
    assert os.listdir(tmp_path) == ["bad.archive"]


def test_a_zip_whose_member_has_no_name(tmp_path):
    path = tmp_path / "nameless.zip"
    path.write_bytes(zip_bytes({"x": b"content"}).replace(b"x", b"\0"))
    assert contents(path) == ({"nameless.zip/": b"content"}, [])


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, 97])
def test_members_with_expensive_compression_are_skipped(tmp_path, method):
    path = tmp_path / "archive"
    path.write_bytes(zip_with_method(method))
    assert contents(path) == ({}, [])


def test_a_tar_with_a_negative_size_does_not_loop(tmp_path):
    path = tmp_path / "negative.tar"
    path.write_bytes(NEGATIVE_SIZE * 4)
    found, problems = contents(path)
    assert found == {}
    assert len(problems) == 1


def test_a_bomb_in_a_tar_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "TAR_LIMIT", 1 << 20)
    path = tmp_path / "bomb.tgz"
    path.write_bytes(gzip.compress(tar_bytes({"a": bytes(50 << 20)})))
    tracemalloc.start()
    problems = []
    for leaf in leaves(path, problems):
        with pytest.raises(DataError, match="unpacks to more than 1,048,576 bytes"):
            leaf.read(1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def small_limits(monkeypatch, **limits):
    for name, value in limits.items():
        monkeypatch.setattr(archives, name, value)


def read_all(path):
    """Return the contents of all files, and the problems with archives or their members."""
    problems, came = [], 0
    for leaf in leaves(path, problems):
        try:
            came += len(leaf.read(1 << 30))
        except DataError as error:
            problems.append(str(error))
    return came, problems


def overlapping_zip(content, entries):
    """Return a zip archive that lists the same member many times."""
    packed = zip_bytes({"a": content})
    start = packed.index(b"PK\x01\x02")
    end = packed.rindex(b"PK\x05\x06")
    many = packed[start:end] * entries
    return packed[:start] + many + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, entries, entries, len(many), start, 0)


LARGE_ZIPS = {
    "many members": (zip_bytes({str(k): bytes(1 << 20) for k in range(20)}), "unpacks to more than 100 times its size"),
    # Newer Pythons, and older ones with security updates, refuse overlapping members themselves.
    "one member many times": (
        overlapping_zip(bytes(1 << 20), 20),
        "unpacks to more than 100 times its size|cannot be read: Overlapped",
    ),
}


@pytest.mark.parametrize(("content", "problem"), LARGE_ZIPS.values(), ids=LARGE_ZIPS)
def test_a_zip_that_unpacks_to_far_more_than_its_size_is_stopped(tmp_path, monkeypatch, content, problem):
    monkeypatch.setattr(packing, "_FREE", 1 << 20)
    path = tmp_path / "bomb.zip"
    path.write_bytes(content)
    came, problems = read_all(path)
    assert came <= packing.most_unpacked(path.stat().st_size) < 4 << 20
    assert re.search(f"bomb.zip ({problem})", problems[0])


def test_small_archives_may_have_a_high_ratio(tmp_path):
    path = tmp_path / "blank.zip"
    path.write_bytes(zip_bytes({"a": bytes(5 << 20)}))
    assert read_all(path) == (5 << 20, [])


@pytest.mark.parametrize("make", [zip_bytes, tar_bytes, lambda m: gzip.compress(tar_bytes(m))])
def test_an_archive_with_too_many_members_is_no_data_set(tmp_path, monkeypatch, make):
    small_limits(monkeypatch, MOST_FILES=20)
    path = tmp_path / "archive"
    path.write_bytes(make({str(k): b"x" for k in range(20)}))
    assert read_all(path) == (20, [])
    path.write_bytes(make({str(k): b"x" for k in range(21)}))
    assert read_all(path)[1] == ["archive contains more than 20 files, more than any data set"]


def test_a_long_list_of_files_in_a_zip_is_not_read(tmp_path, monkeypatch):
    small_limits(monkeypatch, _ZIP_LIST=1_000)
    path = tmp_path / "many.zip"
    path.write_bytes(zip_bytes({f"{k:03}": b"" for k in range(100)}))
    assert read_all(path) == (0, ["many.zip has a file list of 4,900 bytes, longer than any data set needs"])


def test_long_headers_in_a_tar_are_not_read(tmp_path):
    header, digits = tarfile.TarInfo("long"), b"1" * 100_000
    header.type, header.size = tarfile.XHDTYPE, len(digits)
    path = tmp_path / "long.tar"
    path.write_bytes(header.tobuf() + digits.ljust(100_352, b"\0") + tarfile.TarInfo("a").tobuf() + bytes(1024))
    assert read_all(path) == (0, ["long.tar has longer extended headers than any data set needs; it was not opened"])


def test_ordinary_extended_headers_are_fine(tmp_path):
    path = tmp_path / "archive.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for k in range(50):
            info = tarfile.TarInfo(f"{k}/{'näme' * 60}")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    assert read_all(path) == (50, [])


def test_a_sparse_file_in_a_tar_is_not_opened(tmp_path):
    path = tmp_path / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.size, info.pax_headers = 1024, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        archive.addfile(info, io.BytesIO(b"400000000\n" + b"1\n" * 507))
    assert read_all(path) == (0, ["sparse.tar contains a sparse file; it was not opened"])


def test_all_archives_together_have_a_limit(tmp_path, monkeypatch):
    small_limits(monkeypatch, MOST_BYTES=2_500)
    for k in range(5):
        (tmp_path / f"{k}.zip").write_bytes(zip_bytes({"a": bytes(1_000)}))
    came, problems = read_all(tmp_path)
    assert came == 2_000
    assert f"archives and packed files in {tmp_path} contain more than 2,500 bytes" in problems[-1]


def test_the_members_of_all_archives_together_have_a_limit(tmp_path, monkeypatch):
    small_limits(monkeypatch, MOST_MEMBERS=25)
    for k in range(5):
        (tmp_path / f"{k}.zip").write_bytes(zip_bytes({str(i): b"x" for i in range(10)}))
    came, problems = read_all(tmp_path)
    assert came == 25
    assert f"archives and packed files in {tmp_path} contain more than 25 files" in problems[-1]


def test_an_archive_that_takes_too_long_is_skipped(tmp_path, monkeypatch):
    small_limits(monkeypatch, TIME_LIMIT=-1.0)
    path = tmp_path / "slow.zip"
    path.write_bytes(GOOD_ZIP)
    came, problems = read_all(path)
    assert came == 0
    assert "slow.zip takes longer than -1 seconds to read" in problems[0]


def test_a_named_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is neither a file nor a folder"):
        contents(tmp_path / "pipe")


def test_no_more_of_a_zip_bomb_is_read_than_asked_for(tmp_path):
    path = tmp_path / "bomb.zip"
    path.write_bytes(zip_bytes({"a": bytes(50 << 20)}))
    tracemalloc.start()
    [size] = [len(leaf.read(1000)) for leaf in leaves(path, [])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 1000
    assert peak < 10 << 20
