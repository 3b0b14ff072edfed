"""Data sets by name and function."""

import numpy as np
import pytest

import upgd.data
import upgd.experiments
from upgd.data import DataError, registry
from upgd.streams import make


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})


def arrays():
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (50, 4, 4), np.uint8), draw.integers(0, 3, 50)


def test_a_registered_data_set_makes_problems():
    calls = []

    @upgd.data.register("mine")
    def mine():
        calls.append(1)
        return arrays()

    stream = make("output-permuted-mine", task_length=10)
    assert (stream.name, stream.input_shape, stream.outputs) == ("output-permuted-mine", (4, 4), 3)
    assert np.array_equal(upgd.data.load("mine").images, arrays()[0])
    make("input-permuted-mine")
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["digits", "mnist", "Mine", "a b"])
def test_names_that_are_taken_or_odd(name):
    with pytest.raises(DataError, match=f"{name!r} is not a valid name"):
        upgd.data.register(name)


def test_what_the_function_returns_is_checked():
    upgd.data.register("one")(lambda: arrays()[0])
    with pytest.raises(DataError, match=r"the function of the data set 'one' must return \(images, labels\)"):
        upgd.data.load("one")
    upgd.data.register("integers")(lambda: (np.zeros((3, 4, 4), int), [0, 1, 0]))
    with pytest.raises(DataError, match="the data set 'integers': images must be unsigned bytes"):
        upgd.data.load("integers")
    upgd.data.register("good")(arrays)
    with pytest.raises(DataError, match="split must be 'train' for the registered data set 'good', not 'test'"):
        upgd.data.load("good", "test")


def test_it_is_listed(capsys, tmp_path, monkeypatch):
    from upgd.cli.data_sets import list_command

    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    upgd.data.register("mine")(arrays)
    list_command(False, False)
    assert "registered by a plugin" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["stationary", "input-permuted", "output-permuted", "random-label", "class-pairs"])
def test_feature_vectors_and_float_images_are_used_without_scaling(family):
    draw = np.random.default_rng(1)
    vectors, labels = 100 * draw.normal(size=(40, 6)), np.repeat([0, 300], 20)
    upgd.data.register("vectors")(lambda: (vectors, labels))
    upgd.data.register("pictures")(lambda: (vectors.reshape(40, 2, 3), labels))
    stream = make(f"{family}-vectors")
    assert stream.input_shape == (6,)
    assert stream.outputs == (2 if family == "class-pairs" else 301)
    seen = stream.chunk([3], 5, 7)
    ordered = np.sort(vectors.astype(np.float32), 1)
    for row in seen.inputs()[0].numpy():
        assert (np.sort(row) == ordered).all(1).sum() == 1
    as_pictures = make(f"{family}-pictures").chunk([3], 5, 7)
    assert np.array_equal(as_pictures.inputs()[0].flatten(1), seen.inputs()[0])
    assert np.array_equal(as_pictures.targets, seen.targets)


def test_learners_of_feature_vectors_and_drift():
    draw = np.random.default_rng(1)
    upgd.data.register("vectors")(lambda: (draw.normal(size=(40, 6)), np.arange(40) % 3))
    for backend in ("torch", "kernel"):
        settings = {"seeds": 1, "steps": 30, "options": {"task_length": 10, "drift": 5}, "network": "5"}
        (record,) = upgd.experiments.run(
            "input-permuted-vectors", {"sgd": {"lr": 0.1}}, backend=backend, **settings
        ).records
        assert np.isfinite(record.loss).all()
