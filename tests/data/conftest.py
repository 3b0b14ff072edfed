"""Tiny substitutes for the official data sets, and a web server that serves them as mirrors."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loopback_mirror import Mirror
from made_files import cifar_bytes, idx_bytes, sha256, tar_bytes, zip_bytes

from upgd.data import transfer
from upgd.data.sources import OFFICIAL, Download, Part, Source


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the real data are not in {folder}")
    return folder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """Give every test its own cache, separate from the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("UPGD_DATA", str(folder))
    return folder


class TinySet:
    """A stand-in for an official data set: its files, its arrays, and a source that knows their checksums."""

    def __init__(self, source: Source, files: dict[str, bytes], arrays: dict[str, np.ndarray]) -> None:
        self.source, self.files, self.arrays = source, files, arrays

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


@pytest.fixture
def tiny_mnist(monkeypatch) -> TinySet:
    random = np.random.default_rng(0)
    arrays, parts, files = {}, [], {}
    for split, count in (("train", 300), ("test", 40)):
        for content, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            array = random.integers(0, 256 if content == "images" else 10, shape, np.uint8)
            plain = idx_bytes(array)
            packed = gzip.compress(plain)
            arrays[f"{split}-{content}"] = array
            files[f"{split}-{content}.gz"] = packed
            parts.append(Part(split, content, shape, frozenset({sha256(plain), sha256(packed)})))
    downloads = tuple(Download(name, len(content), sha256(content), ()) for name, content in files.items())
    source = replace(OFFICIAL["mnist"], parts=tuple(parts), downloads=downloads)
    monkeypatch.setitem(OFFICIAL, "mnist", source)
    return TinySet(source, files, arrays)


@pytest.fixture
def tiny_emnist(monkeypatch) -> TinySet:
    """One zip archive with the wanted split among others, as EMNIST's gzip.zip is."""
    random = np.random.default_rng(1)
    arrays, parts, members = {}, [], {}
    for split, count in (("train", 94), ("test", 47)):
        for content, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            array = random.integers(0, 47, shape, np.uint8)
            packed = gzip.compress(idx_bytes(array))
            arrays[f"{split}-{content}"] = array
            members[f"gzip/emnist-digits-{split}-{content}.gz"] = gzip.compress(idx_bytes(array[::-1].copy()))
            members[f"gzip/emnist-balanced-{split}-{content}.gz"] = packed
            members[f"gzip/emnist-letters-{split}-{content}.gz"] = gzip.compress(idx_bytes(array[:5]))
            parts.append(Part(split, content, shape, frozenset({sha256(packed)})))
    archive = zip_bytes(members)
    downloads = (Download("gzip.zip", len(archive), sha256(archive), ()),)
    source = replace(OFFICIAL["emnist"], parts=tuple(parts), downloads=downloads)
    monkeypatch.setitem(OFFICIAL, "emnist", source)
    return TinySet(source, {"gzip.zip": archive}, arrays)


@pytest.fixture
def tiny_cifar10(monkeypatch) -> TinySet:
    random = np.random.default_rng(2)
    images = random.integers(0, 256, (6, 7, 3, 32, 32), np.uint8)
    labels = random.integers(0, 10, (6, 7), np.uint8)
    names = [f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]
    files = {name: cifar_bytes(i, k) for name, i, k in zip(names, images, labels, strict=True)}
    parts = [
        Part("test" if k == 5 else "train", "batch", images[k].shape, frozenset({sha256(files[name])}), (k + 1) % 6)
        for k, name in enumerate(names)
    ]
    archive = gzip.compress(tar_bytes({f"cifar-10-batches-bin/{name}": content for name, content in files.items()}))
    downloads = (Download("cifar-10-binary.tar.gz", len(archive), sha256(archive), ()),)
    source = replace(OFFICIAL["cifar10"], parts=tuple(parts), downloads=downloads)
    monkeypatch.setitem(OFFICIAL, "cifar10", source)
    arrays = {
        "train-images": images[:5].reshape(-1, 3, 32, 32),
        "train-labels": labels[:5].reshape(-1),
        "test-images": images[5],
        "test-labels": labels[5],
    }
    return TinySet(source, files | {"cifar-10-binary.tar.gz": archive}, arrays)


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Mirror()
    yield server
    server.close()
