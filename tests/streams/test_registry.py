"""Streams by name, and custom streams."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import upgd.data
import upgd.streams
from upgd.streams import registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_stream.py"


@pytest.fixture(autouse=True)
def _forget(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


def test_every_problem_has_its_stream() -> None:
    problems = """toy-changing-inputs toy-changing-outputs stationary-mnist input-permuted-mnist output-permuted-emnist
    output-permuted-cifar10 utility-quality-weights utility-quality-features input-permuted-digits
    output-permuted-digits"""
    assert set(problems.split()) <= set(upgd.streams.names())


def test_options_reach_the_stream() -> None:
    assert upgd.streams.make("toy-changing-inputs", amplitude=0.5, task_length=20).task_length == 20


def test_streams_describe_themselves() -> None:
    assert repr(upgd.streams.make("output-permuted-digits")) == (
        "<output-permuted-digits: 8×8 → 10, cross_entropy, 1,000 steps per task>"
    )


@pytest.mark.parametrize(
    "name", [name for name in upgd.streams.names() if name.startswith(("toy", "bit")) or "digits" in name]
)
def test_defaults_are_those_of_the_stream(name) -> None:
    usual, given = upgd.streams.make(name), upgd.streams.make(name, **registry.defaults(name))
    assert usual.task_length == given.task_length
    one, other = (stream.chunk([3], 5, 40) for stream in (usual, given))
    assert torch.equal(one.inputs(), other.inputs())
    assert torch.equal(one.targets, other.targets)


def test_defaults_are_known_without_the_data(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    assert registry.defaults("input-permuted-mnist") == {"task_length": 5_000, "drift": 0}
    assert registry.defaults("output-permuted-cifar10") == {"task_length": 2_500, "drift": 0}
    assert registry.defaults("output-permuted-leaves") == {"task_length": None, "drift": 0}
    assert registry.defaults("nonsense") == {}


def test_any_data_set_in_the_cache_has_streams(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="there is no data set 'leaves'; choose one of digits"):
        registry.factory("input-permuted-leaves")
    header = b"\0\0\x08"  # IDX: unsigned bytes; then the number of dimensions and the sizes
    (tmp_path / "images").write_bytes(header + b"\3" + b"\0\0\0\2" * 3 + bytes(range(8)))
    (tmp_path / "labels").write_bytes(header + b"\1" + b"\0\0\0\2" + b"\0\1")
    upgd.data.adopt(tmp_path, "leaves")
    assert upgd.streams.make("input-permuted-leaves", task_length=5).data.name == "leaves"
    with pytest.raises(ValueError, match=r"there is no data set 'leafs' \(did you mean 'leaves'\?\)"):
        registry.factory("input-permuted-leafs")


def test_a_custom_stream() -> None:
    @upgd.streams.register("mine")
    def make_mine(task_length: int = 5):
        return upgd.streams.ToyChangingInputs(task_length=task_length)

    assert "mine" in upgd.streams.names()
    assert upgd.streams.make("mine", task_length=6).task_length == 6
    with pytest.raises(ValueError, match="a stream named 'mine' already exists"):
        upgd.streams.register("mine")(upgd.streams.ToyChangingInputs)


def test_the_example_runs(capsys) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, last = (float(word) for word in capsys.readouterr().out.split() if word.replace(".", "").isdigit())
    assert last < first
    assert "drifting-sine" in upgd.streams.names()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"input_shape": None}, "input_shape of incomplete must be a tuple, such as (1,), not None"),
        ({"input_shape": 1}, "input_shape of incomplete must be a tuple, such as (1,), not 1"),
        ({}, "the stream 'incomplete' has no 'input_shape'; define it as an attribute of its class"),
    ],
)
def test_incomplete_streams_are_refused(monkeypatch, attributes, message) -> None:
    stream = type(
        "Incomplete", (), {"name": "incomplete", **attributes, "outputs": 1, "loss": "mse", "task_length": 10}
    )
    stream.chunk = None
    monkeypatch.setitem(upgd.streams.registry._FACTORIES, "incomplete", stream)
    with pytest.raises(TypeError, match=re.escape(message)):
        upgd.streams.make("incomplete")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("toy-changing-input", {}, ValueError, "did you mean 'toy-changing-inputs'?"),
        ("???", {}, ValueError, "choose one of toy-changing-inputs, "),
        ("toy-changing-inputs", {"speed": 1}, TypeError, "no option 'speed'; its options are: amplitude, task_length"),
        ("toy-changing-inputs", {"task_lenght": 1}, TypeError, "'task_lenght' .did you mean 'task_length'?.;"),
        ("input-permuted", {}, TypeError, "'data'; its options are: data, task_length, drift"),
        ("stationary-leaves", {}, ValueError, "there is no data set 'leaves'"),
    ],
)
def test_mistakes_are_named(name: str, options, error, message: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    with pytest.raises(error, match=message.replace("?", r"\?")):
        upgd.streams.make(name, **options)


def test_the_same_definition_may_be_run_again(monkeypatch):
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    for task_length in (3, 5):

        @upgd.streams.register("edited")
        def edited(length=task_length):
            return upgd.streams.make("toy-changing-inputs", task_length=length)

    assert upgd.streams.make("edited").task_length == 5
    with pytest.raises(ValueError, match="a stream named 'edited' already exists"):
        upgd.streams.register("edited")(lambda: None)


def test_images_without_labels_are_refused():
    with pytest.raises(TypeError, match=r"data must be .* or \(images, labels\), not a list"):
        upgd.streams.make("stationary", data=[1, 2, 3])


def test_a_stream_is_no_name():
    with pytest.raises(TypeError, match="a problem is a name such as 'output-permuted-digits'"):
        upgd.streams.make(upgd.streams.make("toy-changing-inputs"))
