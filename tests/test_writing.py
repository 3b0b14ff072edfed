"""Outputs: complete or absent, and they never replace data."""

import gzip
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from upgd import writing
from upgd.data import cache
from upgd.experiments.execution.progress import Progress, ProgressFile
from upgd.store import Key, Record, Store


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("UPGD_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(path: Path) -> None:
    key = Key(problem="p", network="8", method="sgd", settings={"lr": 0.1}, seed=0, steps=2)
    with Store.write(path) as store:
        store.add([Record(key, window=1, loss=np.ones(2), accuracy=np.ones(2))])


def write(path, content: bytes = b"new") -> None:
    with writing.output(path) as file:
        file.write(content)


def make_data(folder: Path) -> dict[str, Path]:
    """Create a file of every kind that holds data."""
    filled(folder / "a.db")
    (folder / "a.db.checkpoints").mkdir()
    (folder / "a.db.checkpoints" / "unit.json").write_text("{}")
    torch.save({"x": torch.zeros(2)}, folder / "mine.pt")
    np.save(folder / "x.npy", np.zeros(2))
    (folder / "x.gz").write_bytes(gzip.compress(b"x"))
    (folder / "labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 3]))
    with cache.locked("mine"):
        pixels = np.zeros((2, 4, 4), np.uint8)
        arrays = {"train-images": pixels, "train-labels": pixels[:, 0, 0]}
        cache.store(cache.Manifest("mine", 10, 255, False, False, "now", []), arrays)
    return {
        "a store": folder / "a.db",
        "part of the store a.db": folder / "a.db.lock",
        "a checkpoint": folder / "a.db.checkpoints" / "unit.json",
        "a checkpoint, or another zip": folder / "mine.pt",
        "a NumPy array": folder / "x.npy",
        "a compressed file": folder / "x.gz",
        "a data set": folder / "labels",
        "part of the data set mine": folder / "data" / "mine" / "manifest.json",
    }


def test_data_are_never_replaced_whichever_name_leads_to_them(folder):
    for number, (what, path) in enumerate(make_data(folder).items()):
        before = path.read_bytes()
        link, second = folder / f"link-{number}.csv", folder / f"second-{number}.csv"
        link.symlink_to(path)
        second.hardlink_to(path)
        by_content = what != "part of the store a.db" and path.suffix != ".json"
        for name in (path, link, second) if by_content else (path, link):
            with pytest.raises(
                ValueError, match=f"{name.name} is {what}.*, which is never overwritten; choose another"
            ):
                write(name)
        assert path.read_bytes() == before


def test_a_store_that_is_being_written_is_known_with_all_that_belongs_to_it(folder):
    with Store.write(folder / "new.db"):
        ProgressFile.beside(folder / "new.db").write(Progress(1, 1))
        there = sorted(path.name for path in folder.iterdir())
        assert {"new.db", "new.db-wal", "new.db.lock", "new.db.progress"} <= {*there}
        for name in there:
            with pytest.raises(ValueError, match=rf"{name} is (a store|part of the store new.db)"):
                write(folder / name)


def test_a_file_that_is_no_data_is_replaced_and_keeps_its_permissions(folder):
    path = folder / "page.html"
    write(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~cache._umask()
    path.chmod(0o640)
    write(path)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o640)
    assert [p.name for p in folder.iterdir()] == ["page.html"]


def test_an_error_leaves_what_was_there(folder):
    path = folder / "page.html"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), writing.text(path) as file:  # noqa: PT012
        file.write("half of it")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [p.name for p in folder.iterdir()] == ["page.html"]


def test_symbolic_links_are_followed(folder):
    (folder / "pages").mkdir()
    link, real = folder / "page.html", folder / "pages" / "today.html"
    link.symlink_to(real)  # to a file that does not exist yet
    for content in (b"first", b"second"):
        write(link, content)
        assert link.is_symlink()
        assert real.read_bytes() == content
        assert not real.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to(folder):
    pipe, got = folder / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert got == [b"new"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_device_is_written_to(folder, through_a_link):
    node = folder / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        node.open("wb").close()
    except (AttributeError, OSError):
        pytest.skip("this machine does not allow creating a device")
    name = folder / "link"
    name.symlink_to(node)
    write(name if through_a_link else node)
    assert node.is_char_device()
    assert sorted(p.name for p in folder.iterdir()) == ["link", "null"]


TO_STANDARD_OUTPUT = """
from upgd import writing
print("before")
with writing.text("/dev/stdout") as file:
    file.write("now\\n")
print("after")
"""


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="needs /dev/stdout")
@pytest.mark.parametrize("piped", [True, False])
def test_writing_appends_to_the_standard_output(folder, piped):
    """Also if it is a file, which must not be replaced, because the shell has it open."""
    with (folder / "out").open("wb") as out:
        ended = subprocess.run(
            [sys.executable, "-c", TO_STANDARD_OUTPUT], stdout=subprocess.PIPE if piped else out, check=True
        )
    got = ended.stdout if piped else (folder / "out").read_bytes()
    assert got == b"before\nnow\nafter\n"


def test_folders_get_a_sentence(folder):
    (folder / "pages").mkdir()
    with pytest.raises(ValueError, match=r"pages is a folder; the output must be a file, such as .*pages/output"):
        write(folder / "pages")
    with pytest.raises(
        ValueError, match=r"the folder .*nowhere for page.html does not exist; create it, or choose another file"
    ):
        write(folder / "nowhere" / "page.html")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_by_the_file_that_the_user_knows(folder, monkeypatch):
    def full(*_):
        os.write(device, b"x")

    device = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write(folder / "page.html")
    os.close(device)
    assert raised.value.filename == str(folder / "page.html")
    assert not list(folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to read-only files")
def test_a_read_only_file_is_kept(folder):
    path = folder / "page.html"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"page.html"):
        write(path)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    "command",
    [
        "export a.db --format csv",
        "export a.db --format parquet",
        "export link.csv",
        "export second.csv",
        "report -o a.db",
    ],
)
def test_no_command_writes_over_the_store_that_it_reads(upgd, folder, monkeypatch, command):
    monkeypatch.setenv("UPGD_STORE", "a.db")
    filled(folder / "a.db")
    (folder / "link.csv").symlink_to("a.db")
    (folder / "second.csv").hardlink_to("a.db")
    before = (folder / "a.db").read_bytes()
    code, out, err = upgd(*command.split())
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "is a store, or another SQLite database, which is never overwritten; choose another file" in err
    assert (folder / "a.db").read_bytes() == before
