"""Folders and archives: every good file is found, no bad archive does harm."""

import gzip
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from made_files import tar_bytes, zip_bytes

from upgd.data import DataError, archives
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


def test_a_folder_gives_its_files_those_below_it_and_those_in_archives(tmp_path):
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
    with pytest.raises(DataError, match="has more than 3 files: name the folder that holds the data set"):
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
    "path out of a tar": (tar_bytes({"../../etc/passwd": b"x"}), "points out of the archive's folder"),
    "absolute path in a tar": (tar_bytes({"/etc/passwd": b"x"}), "points out of the archive's folder"),
    "path out of a zip": (zip_bytes({"a/../../b": b"x"}), "points out of the archive's folder"),
    "absolute path in a zip": (zip_bytes({"/etc/passwd": b"x"}), "points out of the archive's folder"),
    "Windows path in a zip": (zip_bytes({"C:\\windows\\x": b"x"}), "points out of the archive's folder"),
    "Windows path out of a tar": (tar_bytes({"..\\..\\x": b"x"}), "points out of the archive's folder"),
    "symbolic link": (linked(tarfile.SYMTYPE, "/etc/passwd"), "is no plain file"),
    "hard link": (linked(tarfile.LNKTYPE, "/etc/passwd"), "is no plain file"),
    "device": (linked(tarfile.CHRTYPE, ""), "is no plain file"),
    "named pipe": (linked(tarfile.FIFOTYPE, ""), "is no plain file"),
    "tar.gz cut off": (gzip.compress(GOOD_TAR)[:-100], "is cut off"),
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
def test_members_packed_in_ways_that_may_take_gigabytes_are_left_alone(tmp_path, method):
    path = tmp_path / "archive"
    path.write_bytes(zip_with_method(method))
    assert contents(path) == ({}, [])


def test_a_tar_with_a_negative_size_does_not_go_round_in_circles(tmp_path):
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


def test_no_more_of_a_zip_bomb_is_read_than_asked_for(tmp_path):
    path = tmp_path / "bomb.zip"
    path.write_bytes(zip_bytes({"a": bytes(50 << 20)}))
    tracemalloc.start()
    [size] = [len(leaf.read(1000)) for leaf in leaves(path, [])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 1000
    assert peak < 10 << 20
