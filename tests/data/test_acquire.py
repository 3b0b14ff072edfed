"""Adding data sets to the cache from downloads and folders."""

import gzip
import hashlib
import lzma
import multiprocessing
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from made_files import idx_bytes, tar_bytes, zip_bytes

from upgd.data import DataError, adopt, cache, fetch, fetch_from, load, read_cifar10, read_idx
from upgd.data.sources import OFFICIAL


def assert_loads(name, arrays):
    for split in ("train", "test"):
        loaded = load(name, split)
        np.testing.assert_array_equal(loaded.images, arrays[f"{split}-images"])
        np.testing.assert_array_equal(loaded.labels, arrays[f"{split}-labels"])


@pytest.fixture
def served(mirror, tiny_mnist, tiny_emnist, tiny_cifar10):
    """The tiny sets, on a mirror that works."""
    for tiny in (tiny_mnist, tiny_emnist, tiny_cifar10):
        mirror.files |= tiny.files
    return {tiny.source.name: tiny for tiny in (tiny_mnist, tiny_emnist, tiny_cifar10)}


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10"])
def test_a_data_set_is_downloaded_once(mirror, served, name, cache_folder):
    url = mirror.url("ok")
    entry = fetch(name, mirror=url)
    assert_loads(name, served[name].arrays)
    assert entry.official
    assert all(file["from"].startswith(url) for file in entry.files)
    assert {file["sha256"] for file in entry.files} <= {c for p in served[name].source.parts for c in p.checksums}
    assert sorted(os.listdir(cache_folder)) == [f".{name}.lock", name]
    asked = len(mirror.requests)
    assert fetch(name, mirror=url) == entry
    assert len(mirror.requests) == asked


def test_emnist_is_stored_as_in_the_file_and_seen_upright(mirror, served):
    fetch("emnist", mirror=mirror.url("ok"))
    stored = load("emnist")
    assert stored.transposed
    np.testing.assert_array_equal(stored.images, served["emnist"].arrays["train-images"])
    np.testing.assert_array_equal(stored.upright().images[3], stored.images[3].T)


def test_a_damaged_data_set_is_fetched_again(mirror, served, cache_folder):
    fetch("mnist", mirror=mirror.url("ok"))
    path = cache_folder / "mnist" / "train-images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fetch("mnist", mirror=mirror.url("ok"))
    assert_loads("mnist", served["mnist"].arrays)
    (cache_folder / "mnist" / "manifest.json").write_text("{")
    fetch("mnist", mirror=mirror.url("ok"))
    assert_loads("mnist", served["mnist"].arrays)


def test_a_failed_download_leaves_no_data_set_and_the_next_attempt_asks_only_for_the_rest(mirror, served, cache_folder):
    last = mirror.files.pop("test-labels.gz")
    mirror.files["test-labels.gz"] = last[:-1]
    with pytest.raises(DataError, match=r"test-labels.gz could not be downloaded"):
        fetch("mnist", mirror=mirror.url("ok"))
    assert cache.names() == []
    assert sorted(os.listdir(cache_folder / ".downloads")) == ["test-images.gz", "train-images.gz", "train-labels.gz"]
    mirror.files["test-labels.gz"] = last
    mirror.requests.clear()
    fetch("mnist", mirror=mirror.url("ok"))
    assert len(mirror.requests) == 1
    assert_loads("mnist", served["mnist"].arrays)


def test_a_password_of_the_mirror_is_not_kept(mirror, served, cache_folder):
    fetch("mnist", mirror=mirror.url("secret").replace("//", "//me:secret@"))
    manifest = (cache_folder / "mnist" / "manifest.json").read_text(encoding="utf-8")
    assert f'"from": "{mirror.url("secret")}train-images.gz"' in manifest
    assert "me:secret" not in manifest


def test_idx_files_that_are_too_large_together_are_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("upgd.data.acquire.LIMIT", 1_000)
    for k in range(3):
        (tmp_path / f"{k}").write_bytes(idx_bytes(np.zeros((5, 10, 10), np.uint8)))
    with pytest.raises(DataError, match=r"contains IDX files of more than 1,000 bytes, too many for one data set"):
        adopt(tmp_path, "mine")


def test_a_download_that_lacks_something_is_no_data_set(mirror, served, monkeypatch, cache_folder):
    source = served["emnist"].source
    other = replace(source.parts[0], checksums=frozenset({"0" * 64}))
    monkeypatch.setitem(OFFICIAL, "emnist", replace(source, parts=(other, *source.parts[1:])))
    with pytest.raises(DataError, match=r"all of emnist: missing train images \(.*looks like train images, but"):
        fetch("emnist", mirror=mirror.url("ok"))
    assert cache.names() == []


def fetch_in_process(folder, url, results):
    os.environ["UPGD_DATA"] = str(folder)
    try:
        results.put(fetch("cifar10", mirror=url).prepared)
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes by forking")
def test_two_processes_download_a_set_once(mirror, served, cache_folder):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=fetch_in_process, args=(cache_folder, mirror.url("slow"), results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    first, second = results.get(timeout=60), results.get(timeout=60)
    for process in processes:
        process.join()
    assert first == second
    assert_loads("cifar10", served["cifar10"].arrays)
    assert len(mirror.requests) == 1


def test_files_are_recognized_regardless_of_names(tiny_mnist, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number, (name, content) in enumerate(tiny_mnist.files.items()):
        plain = gzip.decompress(content)
        form = [content, plain, lzma.compress(plain), gzip.compress(plain, 1)][number]
        (folder / f"{number}.jpg").write_bytes(form)
        (folder / f"decoy-{name}").write_bytes(b"not what the name says")
    [entry] = fetch_from(folder, ["mnist"])
    assert_loads("mnist", tiny_mnist.arrays)
    assert [file["name"] for file in entry.files] == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]
    assert {file["from"] for file in entry.files} == {str(folder)}


@pytest.mark.parametrize("form", ["bin", "bin.xz", "bin.gz", "tar.gz", "zip"])
def test_cifar10_is_taken_in_every_form(tiny_cifar10, tmp_path, form):
    folder = tmp_path / "files"
    folder.mkdir()
    archive = tiny_cifar10.files.pop("cifar-10-binary.tar.gz")
    if form == "tar.gz":
        (folder / "release").write_bytes(archive)
    elif form == "zip":
        (folder / "release").write_bytes(zip_bytes(tiny_cifar10.files))
    else:
        pack = {"bin": bytes, "bin.xz": lzma.compress, "bin.gz": gzip.compress}[form]
        # Batches are identified by checksum, not by name or order.
        for number, content in enumerate(reversed(tiny_cifar10.files.values())):
            (folder / f"part{number}").write_bytes(pack(content))
    fetch_from(folder, ["cifar10"])
    assert_loads("cifar10", tiny_cifar10.arrays)


def test_without_names_all_that_is_complete_is_taken(tiny_mnist, tiny_emnist, tiny_cifar10, tmp_path):
    tiny_mnist.write(tmp_path / "files" / "digits")
    tiny_cifar10.write(tmp_path / "files" / "photographs")
    assert [entry.name for entry in fetch_from(tmp_path / "files")] == ["mnist", "cifar10"]
    assert_loads("mnist", tiny_mnist.arrays)
    assert_loads("cifar10", tiny_cifar10.arrays)


def test_a_second_copy_is_no_problem(tiny_cifar10, tmp_path):
    for copy in ("one", "two"):
        tiny_cifar10.write(tmp_path / "files" / copy)
    for copy in ("one", "two"):
        (tmp_path / "files" / copy / "cifar-10-binary.tar.gz").unlink()
        (tmp_path / "files" / copy / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"missing train batch 3$"):
        fetch_from(tmp_path / "files", ["cifar10"])


def test_an_archive_can_be_named_itself(tiny_emnist, tmp_path):
    path = tiny_emnist.write(tmp_path / "files") / "gzip.zip"
    fetch_from(path, ["emnist"])
    assert_loads("emnist", tiny_emnist.arrays)


def test_intact_sets_are_not_searched(tiny_mnist, tmp_path):
    fetch_from(tiny_mnist.write(tmp_path / "files"), ["mnist"])
    [entry] = fetch_from(tmp_path / "nowhere", ["mnist"])
    assert entry == cache.entry("mnist")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: b"", "missing train labels$"),
        (lambda content: content[:-9], r"missing train labels \(train-labels.gz is truncated"),
        (lambda content: content[:-6] + b"\0\0" + content[-4:], r"missing train labels \(train-labels.gz is damaged"),
        (
            lambda content: gzip.compress(gzip.decompress(content)[:-1] + b"\xff"),
            r"missing train labels \(train-labels.gz looks like train labels, but its SHA-256",
        ),
    ],
)
def test_an_invalid_file_is_named_and_nothing_is_stored(tiny_mnist, tmp_path, cache_folder, change, says):
    folder = tiny_mnist.write(tmp_path / "files")
    path = folder / "train-labels.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=says):
        fetch_from(folder, ["mnist"])
    with pytest.raises(DataError, match=r"contains no complete official data set \(mnist, emnist, cifar10\)"):
        fetch_from(folder)
    assert os.listdir(cache_folder) == [".mnist.lock"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda files, archive: gzip.compress(tar_bytes({"../../up": b"x"} | files)),
            "a path outside the archive's folder",
        ),
        (
            lambda files, archive: gzip.compress(tar_bytes({"/abs": b"x"} | files)),
            "a path outside the archive's folder",
        ),
        (lambda files, archive: zip_bytes({"../up": b"x"} | files), "a path outside the archive's folder"),
        (lambda files, archive: archive[: len(archive) // 2], "is truncated"),
        (lambda files, archive: archive[:5000] + b"damage" + archive[5006:], "archive"),
        (lambda files, archive: gzip.compress(tar_bytes({"bomb": bytes(30 << 20)} | files)), "unpacks to more than"),
        (lambda files, archive: b"\x1f\x8b" + b"no gzip at all", "missing train batch 1"),
    ],
    ids=["path out of a tar", "absolute path", "path out of a zip", "cut off", "damaged", "bomb", "wrong magic"],
)
def test_a_bad_archive_is_named_and_nothing_is_stored(tiny_cifar10, tmp_path, cache_folder, monkeypatch, spoil, says):
    monkeypatch.setattr("upgd.data.archives.TAR_LIMIT", 20 << 20)
    archive = tiny_cifar10.files.pop("cifar-10-binary.tar.gz")
    path = tmp_path / "archive"
    path.write_bytes(spoil(tiny_cifar10.files, archive))
    with pytest.raises(DataError, match=says):
        fetch_from(path, ["cifar10"])
    assert os.listdir(cache_folder) == [".cifar10.lock"]
    assert sorted(os.listdir(tmp_path)) == ["archive", "cache"]


def test_unknown_names_are_refused(tmp_path):
    for call in (lambda: fetch("imagenet"), lambda: fetch_from(tmp_path, ["imagenet"])):
        with pytest.raises(
            DataError, match="there is no official data set 'imagenet'; choose one of mnist, emnist, cifar10"
        ):
            call()


IMAGES = np.random.default_rng(3).integers(0, 256, (94, 28, 28), np.uint8)
LABELS = np.arange(94, dtype=np.uint8) % 47


def write_idx(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        (folder / name).write_bytes(gzip.compress(idx_bytes(array)))
    return folder


def test_another_set_of_47_classes_gets_its_own_name(tmp_path):
    folder = write_idx(tmp_path / "f", a=LABELS[:47].copy(), b=IMAGES, c=IMAGES[:47].copy(), d=LABELS)
    (folder / "mapping.txt").write_text("0 48\n")
    entry = adopt(folder, "emnist-subset", transposed=True)
    assert (entry.official, entry.counts, entry.classes) == (False, {"train": 94, "test": 47}, 47)
    train, test = load("emnist-subset"), load("emnist-subset", "test")
    np.testing.assert_array_equal(train.images, IMAGES)
    np.testing.assert_array_equal(train.labels, LABELS)
    np.testing.assert_array_equal(test.images, IMAGES[:47])
    np.testing.assert_array_equal(train.upright().images[5], IMAGES[5].T)
    assert train.name == "emnist-subset"


def test_one_pair_is_enough_and_a_name_stays_with_its_data(tmp_path):
    first = write_idx(tmp_path / "f", images=IMAGES, labels=LABELS)
    second = write_idx(tmp_path / "g", images=IMAGES[:3].copy(), labels=LABELS[:3].copy())
    adopt(first, "mine")
    assert cache.entry("mine").counts == {"train": 94}
    adopt(first, "mine")  # the same again
    for other in ({"path": second}, {"path": first, "transposed": True}):
        with pytest.raises(DataError, match="a different data set 'mine' already exists"):
            adopt(name="mine", **other)
    assert len(load("mine")) == 94
    adopt(second, "mine", replace=True)
    assert len(load("mine")) == 3


def test_damaged_custom_data_are_replaced_as_the_message_explains(tmp_path):
    source = write_idx(tmp_path / "f", images=IMAGES, labels=LABELS)
    adopt(source, "mine")
    (cache.folder() / "mine" / "train-images.npy").unlink()
    with pytest.raises(DataError, match="`upgd data fetch --from FOLDER --as mine` replaces it"):
        load("mine")
    adopt(source, "mine")
    assert len(load("mine")) == 94


@pytest.mark.parametrize(
    ("arrays", "name", "says"),
    [
        (
            {"images": IMAGES, "labels": LABELS},
            "emnist",
            "'emnist' is the name of an official data set; choose another",
        ),
        ({"images": IMAGES, "labels": LABELS}, "digits", "'digits' is the name of an official data set"),
        ({"images": IMAGES, "labels": LABELS}, "Not/a name", "is not a valid name for a data set"),
        ({}, "mine", "must contain one or two pairs of IDX files"),
        ({"images": IMAGES}, "mine", r"it contains images of shapes \[\(94, 28, 28\)\] and labels of shapes \[\]"),
        ({"images": IMAGES, "labels": LABELS[:93].copy()}, "mine", "must contain one or two pairs of IDX files"),
        ({"i1": IMAGES, "l1": LABELS, "i2": IMAGES, "l2": LABELS}, "mine", "with different numbers of images"),
        (
            {"i1": IMAGES, "l1": LABELS, "i2": np.zeros((3, 8, 8), np.uint8), "l2": LABELS[:3].copy()},
            "mine",
            "images of different sizes",
        ),
    ],
)
def test_files_that_are_no_set_are_refused(tmp_path, cache_folder, arrays, name, says):
    with pytest.raises(DataError, match=says):
        adopt(write_idx(tmp_path / "f", **arrays), name)
    assert not cache_folder.exists()


def test_a_damaged_custom_file_is_named(tmp_path, cache_folder):
    folder = write_idx(tmp_path / "f", images=IMAGES, labels=LABELS)
    os.truncate(folder / "images", 5000)
    with pytest.raises(DataError, match="images is truncated"):
        adopt(folder, "mine")
    assert not cache_folder.exists()


def test_the_real_mnist(real_data):
    [entry] = fetch_from(real_data / "mnist", ["mnist"])
    assert entry.counts == {"train": 60_000, "test": 10_000}
    train = load("mnist")
    np.testing.assert_array_equal(train.images, read_idx(real_data / "mnist" / "train-images-idx3-ubyte.gz"))
    assert train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert (
        hashlib.md5(idx_bytes(np.asarray(train.labels))).hexdigest()
        == hashlib.md5(gzip.decompress((real_data / "mnist" / "train-labels-idx1-ubyte.gz").read_bytes())).hexdigest()
    )


def test_the_real_subset_of_emnist(real_data):
    entry = adopt(real_data / "emnist", "emnist-subset", transposed=True)
    assert (entry.counts, entry.classes) == ({"train": 98_148, "test": 4_700}, 47)
    assert np.bincount(load("emnist-subset").labels[:37_600]).tolist() == [800] * 47


@pytest.mark.slow
def test_the_real_cifar10(real_data):
    [entry] = fetch_from(real_data / "cifar10")
    assert entry.counts == {"train": 50_000, "test": 10_000}
    splits = read_cifar10(real_data / "cifar10")
    for split, (images, labels) in splits.items():
        loaded = load("cifar10", split)
        np.testing.assert_array_equal(loaded.images, images)
        np.testing.assert_array_equal(loaded.labels, labels)
    assert np.bincount(load("cifar10").labels).tolist() == [5000] * 10
    assert load("cifar10").labels[:5].tolist() == [6, 9, 9, 4, 1]
