"""The cache: complete or absent, shared, fast to open."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from upgd.data import DataError, cache, load
from upgd.data.cache import Manifest

ARRAYS = {
    "train-images": np.arange(120, dtype=np.uint8).reshape(5, 4, 6),
    "train-labels": np.arange(5, dtype=np.uint8),
    "test-images": np.ones((2, 4, 6), np.uint8),
    "test-labels": np.zeros(2, np.uint8),
}


def stored(name="mine", arrays=ARRAYS):
    described = Manifest(name, 5, 255, False, False, "2025-01-01T00:00:00+00:00", [])
    with cache.locked(name):
        return cache.store(described, arrays)


def test_stored_arrays_are_memory_mapped():
    stored()
    train, test = load("mine"), load("mine", "test")
    np.testing.assert_array_equal(train.images, ARRAYS["train-images"])
    np.testing.assert_array_equal(train.labels, ARRAYS["train-labels"])
    assert len(test) == 2
    assert (train.name, train.classes, train.white) == ("mine", 5, 255)
    assert type(train.images) is np.ndarray
    assert isinstance(train.images.base, np.memmap)
    assert not train.images.flags.writeable


def test_the_manifest_round_trips():
    written = stored()
    assert cache.entry("mine") == written
    assert written.counts == {"train": 5, "test": 2}
    assert written.image_shape == (4, 6)
    assert cache.names() == ["mine"]


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-images.npy"])
def test_foreign_files_are_never_replaced_by_a_data_set(cache_folder, name):
    """UPGD_DATA may be a folder of raw files that contains a folder mnist."""
    raw = cache_folder / "mine" / name
    raw.parent.mkdir(parents=True)
    raw.write_bytes(b"the only copy")
    with pytest.raises(DataError, match=rf"it contains other files \({name}\); move them, or set UPGD_DATA"):
        stored()
    assert raw.read_bytes() == b"the only copy"
    raw.rename(cache_folder / "raw")
    stored()
    stored()  # our own data set is replaced


def test_the_folder_is_the_users_cache_folder_or_upgd_data(monkeypatch, cache_folder):
    import pooch

    assert cache.folder() == cache_folder
    monkeypatch.setenv("UPGD_DATA", "~/somewhere")
    assert cache.folder() == Path.home() / "somewhere"
    monkeypatch.delenv("UPGD_DATA")
    assert cache.folder() == pooch.os_cache("upgd")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.folder() == pooch.os_cache("upgd")


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", "Capital", ".hidden", "x" * 65, "a b", "a\n", 3])
def test_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(DataError, match="is not a valid name for a data set"):
        load(name)


def test_missing_data_sets_name_the_command():
    with pytest.raises(DataError, match="download it with `upgd data fetch mnist`"):
        load("mnist")
    stored()
    with pytest.raises(DataError, match=r"there is no data set 'digit' \(did you mean 'digits'\?\); choose one of"):
        load("digit")
    with pytest.raises(
        DataError, match="there is no data set 'other'; choose one of digits, mnist, emnist, cifar10, mine"
    ):
        load("other")


def test_a_wrong_split_names_those_that_there_are():
    stored(arrays={name: array for name, array in ARRAYS.items() if "train" in name})
    with pytest.raises(DataError, match="split must be 'train' for the data set 'mine', not 'test'"):
        load("mine", "test")
    with pytest.raises(DataError, match="split must be 'train' for the embedded digits"):
        load("digits", "test")


DAMAGE = {
    "manifest cut off": lambda f: (f / "manifest.json").write_text('{"name": "mi'),
    "manifest of another kind": lambda f: (f / "manifest.json").write_text("[]"),
    "manifest without arrays": lambda f: (f / "manifest.json").write_text(
        json.dumps(json.loads((f / "manifest.json").read_text()) | {"arrays": {}})
    ),
    "manifest of a later version": lambda f: (f / "manifest.json").write_text(
        json.dumps(json.loads((f / "manifest.json").read_text()) | {"format": 2})
    ),
    "manifest a named pipe": lambda f: ((f / "manifest.json").unlink(), os.mkfifo(f / "manifest.json")),
    "array a named pipe": lambda f: ((f / "train-images.npy").unlink(), os.mkfifo(f / "train-images.npy")),
    "array missing": lambda f: (f / "train-images.npy").unlink(),
    "array cut off": lambda f: os.truncate(f / "train-images.npy", 200),
    "array empty": lambda f: os.truncate(f / "train-images.npy", 0),
    "another array": lambda f: np.save(f / "train-images.npy", np.zeros((5, 6, 4), np.uint8)),
    "another type": lambda f: np.save(f / "train-images.npy", ARRAYS["train-images"].astype(np.int16)),
    "objects": lambda f: np.save(f / "train-images.npy", np.array([{}]), allow_pickle=True),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_data_set_names_the_remedy(damage, cache_folder):
    stored()
    damage(cache_folder / "mine")
    remedy = "`upgd data fetch --from FOLDER --as mine` replaces it"
    with pytest.raises(DataError, match=rf"the data set 'mine' in .* is damaged .*{remedy}"):
        load("mine")


def test_a_changed_bit_is_found(cache_folder):
    written = stored()
    assert cache.is_intact(written)
    path = cache_folder / "mine" / "test-images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not cache.is_intact(written)


def test_a_new_data_set_replaces_the_old_one():
    stored()
    before = load("mine").images
    stored(arrays=ARRAYS | {"train-images": np.full((5, 4, 6), 9, np.uint8)})
    assert (load("mine").images == 9).all()
    np.testing.assert_array_equal(before, ARRAYS["train-images"])  # open files of the old data set remain valid


@pytest.mark.parametrize("broken", ["np.save", "os.fsync", "json.dump"])
def test_nothing_is_left_when_writing_fails(broken, monkeypatch, cache_folder):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"upgd.data.cache.{broken}", fail)
    with pytest.raises(OSError, match="No space left"):
        stored()
    assert os.listdir(cache_folder) == [".mine.lock"]


def test_leftovers_of_killed_processes_are_removed(cache_folder):
    stored("mine")
    stored("mine-too")
    (cache_folder / ".mine-abcdefgh").mkdir()
    (cache_folder / ".mine-abcdefgh" / "train-images.npy").write_bytes(b"half")
    (cache_folder / ".mine-too-abcdefgh").mkdir()
    with cache.locked("mine"):
        assert sorted(os.listdir(cache_folder)) == [
            ".mine-too-abcdefgh",
            ".mine-too.lock",
            ".mine.lock",
            "mine",
            "mine-too",
        ]


def test_without_filelock_the_error_names_the_package(cache_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs filelock.*pip install 'upgd\[run\]'"), cache.locked("mine"):
        pass


def hold(folder, ready, seconds):
    os.environ["UPGD_DATA"] = str(folder)
    with cache.locked("mine"):
        ready.set()
        time.sleep(seconds)


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes by forking")
def test_processes_wait_for_the_lock_and_killed_ones_release_it(cache_folder, caplog):
    context = multiprocessing.get_context("fork")
    for seconds, kill in ((0.3, False), (60, True)):
        ready = context.Event()
        other = context.Process(target=hold, args=(cache_folder, ready, seconds))
        other.start()
        assert ready.wait(20)
        if kill:
            other.kill()
        with cache.locked("mine"):
            assert kill or "another process is preparing mine" in caplog.text
        other.join()
