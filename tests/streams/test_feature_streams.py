"""Features from files: used unchanged, and validated first."""

import pickle
import re

import numpy as np
import pytest
import torch

from upgd.data import DataError
from upgd.streams import LabelPermutedFeatures, make


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32))
    np.save(tmp_path / "labels.npy", np.arange(30, dtype=np.int16) % 3)
    return tmp_path


def test_features_reach_the_learner_as_they_are(folder) -> None:
    stream = make("label-permuted-features", folder=str(folder), task_length=30)
    assert (stream.input_shape, stream.outputs, stream.task_length) == ((4,), 3, 30)
    assert LabelPermutedFeatures(folder).task_length == 2_500
    chunk = stream.chunk([2], 0, 60)
    vectors = torch.from_numpy(np.load(folder / "features.npy"))
    for task in (0, 1):
        rows = (chunk.dense[0, 30 * task : 30 * task + 30, None] == vectors).all(-1).nonzero()[:, 1]
        assert sorted(rows.tolist()) == list(range(30))
        pairs = torch.stack((rows % 3, chunk.targets[0, 30 * task : 30 * task + 30])).unique(dim=1)
        assert pairs.shape[1] == 3
        assert sorted(pairs[1].tolist()) == [0, 1, 2]


def test_a_stream_can_be_sent_to_another_process(folder) -> None:
    stream = LabelPermutedFeatures(folder, task_length=7)
    before = stream.chunk([3], 4, 20)
    sent = pickle.dumps(stream)
    assert len(sent) < 2_000
    after = pickle.loads(sent).chunk([3], 4, 20)
    assert torch.equal(before.dense, after.dense)
    assert torch.equal(before.targets, after.targets)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "features",
            np.zeros((30, 4)),
            "must hold a float32 array of shape (n, features), not float64 of shape (30, 4)",
        ),
        ("features", np.zeros((30, 4, 1), np.float32), "not float32 of shape (30, 4, 1)"),
        ("features", np.zeros((29, 4), np.float32), "images and labels must have the same length, not 29 and 30"),
        ("features", np.full((30, 4), np.inf, np.float32), "contain NaN or infinite values"),
        ("features", np.asfortranarray(np.zeros((30, 4), np.float32)), "is stored in Fortran order"),
        ("labels", np.zeros(30), "labels must be a 1-D integer array, not float64"),
        ("labels", np.arange(30) - 1, "labels must be from 0 to 999,999, not from -1 to 28"),
    ],
)
def test_the_error_of_a_file_is_described(folder, name: str, array, message: str) -> None:
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(DataError, match=re.escape(message)):
        LabelPermutedFeatures(folder)


def test_files_never_run_code(folder) -> None:
    np.save(folder / "labels.npy", np.array([{"a": 1}] * 30, object), allow_pickle=True)
    with pytest.raises(DataError, match=r"labels\.npy is not an array that can be loaded without pickle"):
        LabelPermutedFeatures(folder)
    with (folder / "labels.npy").open("wb") as file:
        np.savez(file, labels=np.arange(30))
    with pytest.raises(DataError, match=r"labels\.npy is an .npz archive"):
        LabelPermutedFeatures(folder)
    (folder / "labels.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"labels\.npy is not an array"):
        LabelPermutedFeatures(folder)
    (folder / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy does not exist; the folder must contain"):
        LabelPermutedFeatures(folder)


def test_the_folder_must_be_named() -> None:
    with pytest.raises(
        TypeError, match="missing a required argument: 'folder'; its options are: folder, task_length, drift"
    ):
        make("label-permuted-features")
