"""Streams over data sets: their data, task lengths, and that data is not copied."""

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

from upgd.data import from_arrays
from upgd.streams import Chunk, InputPermuted, OutputPermuted, Stationary, make

FAMILIES = [Stationary, InputPermuted, OutputPermuted]


def arrays(size: int = 30, shape: tuple[int, ...] = (4, 5)) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(1)
    return drawn.integers(0, 256, (size, *shape), np.uint8), np.arange(size) % 3


@pytest.mark.parametrize("family", FAMILIES)
def test_custom_arrays_are_accepted(family) -> None:
    images, labels = arrays()
    by_class, by_name = (
        family((images, labels), task_length=7),
        make(family.family, data=(images, labels), task_length=7),
    )
    assert by_class.input_shape == (4, 5)
    assert by_class.outputs == 3
    assert by_class.name == f"{family.family}-arrays"
    one, other = (stream.chunk([2], 3, 20) for stream in (by_class, by_name))
    assert torch.equal(one.inputs(), other.inputs())
    assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_data_set_of_the_user_keeps_its_name_and_white(family) -> None:
    images, labels = arrays()
    data = from_arrays("leaves", images // 16, labels, classes=5, white=15)
    stream = family(data)
    assert (stream.name, stream.outputs) == (f"{family.family}-leaves", 5)
    x = stream.chunk([0], 0, 100).inputs()
    assert (float(x.min()), float(x.max())) == (-1, 1)


def test_lengths_of_tasks_are_those_of_the_paper() -> None:
    data = arrays()
    assert [family(data).task_length for family in FAMILIES] == [5_000, 5_000, 2_500]
    assert {family("digits").task_length for family in FAMILIES} == {1_000}
    assert InputPermuted("digits", task_length=17).task_length == 17


def test_the_window_of_a_stationary_stream_does_not_touch_its_samples() -> None:
    data = arrays()
    short, long = (Stationary(data, task_length=n).chunk([1], 11, 200) for n in (3, 1000))
    assert torch.equal(short.index, long.index)


def test_classes_stay_those_of_the_data_set_when_only_inputs_change() -> None:
    images, labels = arrays()
    for stream in (Stationary((images, labels)), InputPermuted((images, labels))):
        chunk = stream.chunk([1], 0, 60)
        assert np.array_equal(chunk.targets[0], labels[chunk.index[0]])


def test_streams_over_one_data_set_share_one_tensor_and_let_it_go() -> None:
    data = from_arrays("shared", *arrays())
    sources = [family(data).chunk([0], 0, 1).source for family in FAMILIES]
    assert len({source.data_ptr() for source in sources} | {data.images.ctypes.data}) == 1
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is None


def test_read_only_and_reversed_arrays_cause_no_warning(recwarn) -> None:
    images, labels = arrays()
    backwards = Stationary((images[::-1], labels[::-1])).chunk([0], 0, 30)
    row = int(backwards.index[0, 0])
    assert torch.equal(backwards.source[row], torch.from_numpy(images[29 - row]))
    assert not recwarn.list


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_can_be_sent_to_another_process(family) -> None:
    stream = family("digits", task_length=50)
    before = stream.chunk([3], 40, 30)
    after = pickle.loads(pickle.dumps(stream)).chunk([3], 40, 30)
    assert torch.equal(before.inputs(), after.inputs())
    assert torch.equal(before.targets, after.targets)


def test_colour_images_are_permuted_over_all_their_inputs() -> None:
    stream = InputPermuted(arrays(shape=(3, 6, 6)), task_length=10)
    order = stream.chunk([0], 0, 1).permutation[0, 0]
    assert order.shape == (108,)
    assert (order[:36] >= 36).any()


@pytest.mark.parametrize("family", [InputPermuted, OutputPermuted])
def test_a_task_takes_over_gradually(family) -> None:
    """A mixture has the samples of the two tasks, and the new one's share grows from 0 to 1 over the window."""
    seeds, length, drift = range(400), 20, 9
    plain, mixed = (family(arrays(), task_length=length, drift=d).chunk(seeds, 0, 3 * length) for d in (0, drift))
    later = family(arrays(), task_length=length, drift=drift).chunk(seeds, length, length)
    assert torch.equal(later.inputs(), mixed.inputs()[:, length : 2 * length])
    same = (plain.inputs() == mixed.inputs()).flatten(2).all(-1) & (plain.targets == mixed.targets)
    assert same[:, :length].all()  # there is no task before the first one
    new = same[:, length:].view(len(seeds), 2, length).double().mean((0, 1))
    assert (new[drift:] == 1).all()
    # One label in three agrees with that of the task before by chance.
    chance = 0 if family is InputPermuted else 1 / 3
    expected = torch.arange(1, drift + 1) / (drift + 1)
    assert (new[:drift] - (expected + (1 - expected) * chance)).abs().max() < 4 * 0.5 / 800**0.5
    old = family(arrays(), task_length=length)
    for seed in (0, 1):  # all other samples belong to the old task
        for step in range(length, length + drift):
            if not same[seed, step]:
                alone = old.chunk([seed], 0, length)
                if family is InputPermuted:
                    shown = mixed.inputs()[seed, step].flatten()
                    pixels = plain.pixels()[seed, step].gather(0, alone.permutation[0, 0])
                    assert torch.equal(shown, plain.scaled(pixels).flatten())


def test_mistakes_are_named() -> None:
    images, labels = arrays()
    with pytest.raises(ValueError, match="drift must be an integer from 0 to 7, not 8"):
        InputPermuted((images, labels), task_length=7, drift=8)
    with pytest.raises(ValueError, match="images must be unsigned bytes"):
        Stationary((images.astype("int64"), labels))
    with pytest.raises(ValueError, match="images and labels must have the same length, not 30 and 29"):
        Stationary((images, labels[1:]))
    with pytest.raises(ValueError, match="task_length"):
        Stationary((images, labels), task_length=0)


def test_a_chunk_has_inputs_of_one_kind() -> None:
    targets = torch.zeros(1, 2)
    for wrong in ({}, {"source": torch.zeros(3, 4)}, {"dense": targets, "source": targets, "index": targets}):
        with pytest.raises(ValueError, match="either dense, or source and index"):
            Chunk(start=0, targets=targets, **wrong)
    assert Chunk(start=0, targets=targets, dense=torch.zeros(1, 2, 4)).task.tolist() == [0, 0]
