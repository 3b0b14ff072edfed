"""Requirements of every registered stream.

Streams over data sets that must be fetched run over small stand-ins of the same shapes; the digits are always there.
"""

import functools
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import plain_streams as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import upgd.streams
from upgd.data import Dataset, from_arrays, load
from upgd.streams import (
    BitFlipping,
    Chunk,
    ClassPairs,
    InputPermuted,
    LabelPermutedFeatures,
    OutputPermuted,
    RandomLabels,
    Stream,
)

TASK_LENGTH = 29
SHAPES = {"mnist": (28, 28), "emnist": (28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"mnist": 10, "emnist": 47, "cifar10": 10}
NAMES = upgd.streams.names()
FAMILIES = ("stationary", "input-permuted", "output-permuted", "random-label", "class-pairs")
OVER_IMAGES = [name for name in NAMES if name.startswith(FAMILIES)]
DRIFTING = [
    f"{family}-{data} drift {drift}" for family in FAMILIES[1:3] for data, drift in (("digits", 11), ("cifar10", 29))
]
#: The state of the slow bits depends on all earlier flips.
FAR = {"bit-flipping": 10**5}
SEEDS = st.integers(0, 2**63 - 1)


def stand_in(name: str, size: int) -> Dataset:
    if name == "digits":
        digits = load("digits")
        return from_arrays("digits", digits.images[:size], digits.labels[:size], classes=10, white=16)
    drawn = np.random.default_rng(0)
    labels = np.concatenate([np.arange(CLASSES[name]), drawn.integers(0, CLASSES[name], size)])[:size]
    return from_arrays(name, drawn.integers(0, 256, (size, *SHAPES[name]), np.uint8), labels, classes=CLASSES[name])


@functools.cache
def features() -> tempfile.TemporaryDirectory:
    """Write 61 feature vectors of 7 classes to a folder that is removed at exit."""
    folder, drawn = tempfile.TemporaryDirectory(), np.random.default_rng(0)
    np.save(Path(folder.name, "features.npy"), drawn.normal(size=(61, 5)).astype(np.float32))
    np.save(Path(folder.name, "labels.npy"), np.arange(61) % 7)
    return folder


def make(name: str, size: int = 61, **options) -> Stream:
    """A stream of that name over at most ``size`` images; ``"input-permuted-digits drift 11"`` is one with that option."""
    name, _, drift = name.partition(" drift ")
    options = {"task_length": TASK_LENGTH} | ({"drift": int(drift)} if drift else {}) | options
    if name.startswith("random-label"):
        length = options.pop("task_length")
        examples = min(length, size)
        options |= {"examples": examples, "epochs": length // examples}
    if name == "label-permuted-features":
        options["folder"] = features().name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("upgd.streams.images.load", lambda data: stand_in(data, size))
        return upgd.streams.make(name, **options)


def as_stored(stream: Stream, chunk: Chunk, steps: slice) -> tuple[Tensor, Tensor]:
    """Pixels in [−1, 1], flattened, and labels of the first seed's samples, as the data set has them."""
    rows = chunk.index[0, steps].numpy()
    pixels = stream.data.images[rows].reshape(len(rows), -1).astype(np.float32)
    return torch.from_numpy(pixels / stream.data.white * 2 - 1), torch.from_numpy(stream.data.labels[rows]).long()


def mapping(kinds: Tensor, targets: Tensor, size: int) -> Tensor:
    """Return the target of every kind of sample, after checking that it is unique; −1 for those that do not occur."""
    rule = torch.full((size,), -1).scatter(0, kinds, targets)
    assert torch.equal(rule[kinds], targets)
    return rule


def rule_of_task(stream: Stream, chunk: Chunk, task: int) -> Tensor:
    """Return the transformation of a task for the first seed, after checking that it is constant within the task."""
    steps = slice(task * TASK_LENGTH, (task + 1) * TASK_LENGTH)
    inputs, targets = chunk.inputs()[0, steps].flatten(1), chunk.targets[0, steps]
    if isinstance(stream, BitFlipping):
        slow = inputs[:, : stream.flipping].unique(dim=0)
        assert len(slow) == 1
        return slow[0]
    if isinstance(stream, LabelPermutedFeatures):
        vectors, known = (torch.from_numpy(np.load(Path(features().name, f"{n}.npy"))) for n in ("features", "labels"))
        rows = (inputs[:, None] == vectors).all(-1).nonzero()[:, 1]
        return mapping(known[rows], targets, stream.outputs)
    if stream.loss == "mse":
        weights = torch.linalg.lstsq(inputs, targets).solution
        assert torch.allclose(inputs @ weights, targets, atol=1e-5)
        return weights.round(decimals=3)
    pixels, labels = as_stored(stream, chunk, steps)
    if isinstance(stream, OutputPermuted | RandomLabels | ClassPairs):
        assert torch.allclose(inputs, pixels, atol=1e-6)
        kinds = chunk.index[0, steps] if isinstance(stream, RandomLabels) else labels
        return mapping(kinds, targets, 61)
    assert torch.equal(labels, targets)
    rule = chunk.permutation[0, task] if isinstance(stream, InputPermuted) else torch.arange(pixels.shape[1])
    assert torch.allclose(inputs, pixels[:, rule], atol=1e-6)
    return rule


@pytest.mark.parametrize("name", [*NAMES, *DRIFTING])
@settings(max_examples=8)
@given(data=st.data())
def test_chunks_are_pure(name: str, data: st.DataObject) -> None:
    """The samples do not depend on the requested pieces, their order, or the seeds."""
    stream, untouched = make(name), make(name)
    seeds = data.draw(st.lists(SEEDS, min_size=1, max_size=3))
    start = data.draw(st.one_of(st.integers(0, 200), st.integers(0, FAR.get(name, 10**9))))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    whole = untouched.chunk(seeds, start, sum(lengths))
    pieces = [(start + sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    for first, length in data.draw(st.permutations(pieces)):
        some = data.draw(st.permutations(range(len(seeds))))[: data.draw(st.integers(1, len(seeds)))]
        piece = stream.chunk(torch.tensor([seeds[s] for s in some]), first, length)
        steps = slice(first - start, first - start + length)
        assert torch.equal(piece.inputs(), whole.inputs()[some, steps])
        assert torch.equal(piece.targets, whole.targets[some, steps])
        assert piece.start == first
        part = whole.narrow(first - start, length)
        assert part.start == first
        assert torch.equal(part.inputs()[some], piece.inputs())
        assert torch.equal(part.targets[some], piece.targets)
        offset = data.draw(st.integers(0, length - 1))
        assert torch.equal(piece.inputs_at(offset), piece.inputs()[:, offset])


@pytest.mark.parametrize("name", [*NAMES, *DRIFTING])
def test_shapes_types_and_devices_are_as_promised(name: str) -> None:
    stream = make(name)
    assert isinstance(stream, Stream)
    chunk = stream.chunk([5, 6, 7], 20, 40)
    assert chunk.inputs().shape == (3, 40, *stream.input_shape)
    assert chunk.inputs().dtype == torch.float32
    if stream.loss == "cross_entropy":
        assert chunk.targets.shape == (3, 40)
        assert chunk.targets.dtype == torch.int64
        assert 0 <= chunk.targets.min() <= chunk.targets.max() < stream.outputs
    else:
        assert chunk.targets.shape == (3, 40, stream.outputs)
        assert chunk.targets.dtype == torch.float32
    # Steps 20 … 59 with tasks of 29 steps: 9 steps of task 0, task 1 as a whole, 2 steps of task 2.
    assert chunk.task.tolist() == [0] * 9 + [1] * 29 + [2] * 2
    assert (chunk.start, chunk.length, stream.task_length) == (20, 40, TASK_LENGTH)


@pytest.mark.parametrize("name", [*NAMES, *DRIFTING])
def test_samples_are_those_of_the_plain_reference(name: str) -> None:
    stream = make(name)
    family = next((f for f in FAMILIES if name.startswith(f)), None)
    # Large steps, which need more than 32 bits.
    first = TASK_LENGTH * (2**33 if name not in FAR else 1_000) - 3
    for seed in (0, 3, 2**40 + 1):
        for start, length in ((0, 3), (TASK_LENGTH - 2, 4), (3 * TASK_LENGTH - 1, 2), (first, 6)):
            chunk = stream.chunk([seed], start, length)
            for offset in range(length):
                step = start + offset
                if family:
                    images = stream.data.images.reshape(len(stream.data), -1)
                    labels = stream.data.labels.tolist()
                    x, y = plain.image(
                        *(family, images.tolist(), labels, stream.data.white, stream.outputs, seed, step, TASK_LENGTH),
                        drift=getattr(stream, "drift", 0),
                    )
                elif name == "label-permuted-features":
                    vectors, labels = (
                        np.load(Path(features().name, f"{n}.npy")).tolist() for n in ("features", "labels")
                    )
                    x, y = plain.label_permuted_features(vectors, labels, seed, step, TASK_LENGTH)
                else:
                    x, y = getattr(plain, stream.name.replace("-", "_"))(seed, step, TASK_LENGTH)
                seen = chunk.inputs_at(offset)[0].flatten().double()
                assert torch.allclose(seen, torch.tensor(x, dtype=torch.float64), rtol=0, atol=5e-7)
                assert torch.allclose(chunk.targets[0, offset].double(), torch.tensor(y).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_changes_come_at_multiples_of_the_task_length_and_nowhere_else(name: str) -> None:
    stream = make(name)
    chunk = stream.chunk([4], 0, 4 * TASK_LENGTH)
    rules = [rule_of_task(stream, chunk, task) for task in range(4)]
    for before, after in pairwise(rules):
        assert torch.equal(before, after) == name.startswith(("stationary", "utility-quality"))


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_independent(name: str) -> None:
    stream = make(name, size=500) if name in OVER_IMAGES else make(name)
    seeds = [0, 1, 2, 2**32, 2**32 + 1]
    chunk = stream.chunk(seeds, 0, 400)
    for i in range(len(seeds)):
        for j in range(i):
            if chunk.index is not None:
                agreements = (chunk.index[i] == chunk.index[j]).sum()
                assert agreements < 10  # chance is one in the size of the data set
            else:
                moving = slice(getattr(stream, "flipping", 0), None)  # the slow bits hardly change
                x, y = (chunk.dense[k, :, moving].flatten().double() for k in (i, j))
                correlation = torch.corrcoef(torch.stack((x, y)))[0, 1]
                assert abs(correlation) < 4 / len(x) ** 0.5
    if chunk.permutation is not None:
        assert len(torch.unique(chunk.permutation.flatten(0, 1), dim=0)) == len(seeds) * chunk.permutation.shape[1]


@pytest.mark.parametrize("name", [name for name in OVER_IMAGES if name.startswith(FAMILIES[:3])])
@settings(max_examples=10)
@given(seed=SEEDS, size=st.integers(1, 70), task_length=st.integers(1, 200), task=st.integers(0, 10**6))
def test_no_sample_repeats_in_a_pass(name: str, seed: int, size: int, task_length: int, task: int) -> None:
    stream = make(name, size=size, task_length=task_length)
    per_shuffle = size if name.startswith("stationary") else task_length
    index = stream.chunk([seed], task * per_shuffle, per_shuffle).index[0]
    assert 0 <= index.min() <= index.max() < size
    for first in range(0, per_shuffle, size):
        of_pass = index[first : first + size]
        assert len(of_pass.unique()) == len(of_pass)
    counts = torch.bincount(index, minlength=size)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("name", OVER_IMAGES)
def test_a_new_pass_has_a_new_order(name: str) -> None:
    stream = make(name, size=61, task_length=3 * 61)
    orders = stream.chunk([8], 0, 6 * 61).index[0].view(6, 61)
    assert len(torch.unique(orders, dim=0)) == 6


@pytest.mark.parametrize("name", OVER_IMAGES)
def test_images_are_in_range_and_stay_bytes_until_they_are_used(name: str) -> None:
    stream = make(name)
    chunk, later = stream.chunk(range(3), 0, 61), stream.chunk([9], 100, 1)
    assert chunk.source.dtype == torch.uint8
    assert chunk.source.data_ptr() == later.source.data_ptr() == stream.data.images.ctypes.data
    x = chunk.inputs()
    assert x.min() == -1
    assert x.max() == 1
    levels = torch.arange(stream.data.white + 1, dtype=torch.float64)
    allowed = ((levels / stream.data.white - 0.5) / 0.5).float()
    distance = (x.unique()[:, None] - allowed).abs().amin(1)
    assert distance.max() <= 6e-8


@pytest.mark.parametrize("name", [name for name in OVER_IMAGES if name.startswith("input-permuted")])
def test_input_permutations_are_bijections(name: str) -> None:
    stream = make(name)
    chunk = stream.chunk([1, 2], 0, 3 * TASK_LENGTH)
    inputs = int(np.prod(stream.input_shape))
    assert chunk.permutation.shape == (2, 3, inputs)
    assert torch.equal(chunk.permutation.sort(-1).values, torch.arange(inputs).expand(2, 3, -1))
    assert (chunk.permutation[:, 0] != torch.arange(inputs)).any()  # the first task is also permuted


@pytest.mark.parametrize("name", [name for name in OVER_IMAGES if name.startswith("output-permuted")])
def test_label_permutations_are_bijections(name: str) -> None:
    stream = make(name, size=200, task_length=200)
    chunk = stream.chunk([3], 0, 400)
    for steps in (slice(0, 200), slice(200, 400)):
        _, labels = as_stored(stream, chunk, steps)
        pairs = torch.stack((labels, chunk.targets[0, steps])).unique(dim=1)
        assert (
            pairs.shape[1] == len(pairs[0].unique()) == len(pairs[1].unique()) == len(set(stream.data.labels.tolist()))
        )
        assert (pairs[0] != pairs[1]).any()  # the first task is also permuted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("seeds", "start", "length", "error"), [([0], -1, 5, ValueError), ([0], 0, 0, ValueError), ([0.5], 0, 1, TypeError)]
)
def test_nonsense_is_refused(name: str, seeds, start: int, length: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"must be"):
        make(name).chunk(seeds, start, length)
