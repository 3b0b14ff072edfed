"""Random labels and pairs of classes: what is constant and what changes between tasks."""

import numpy as np
import pytest
import torch
from scipy import stats

from upgd.data import DataError, from_arrays
from upgd.streams import ClassPairs, RandomLabels


def data(counts: tuple[int, ...] = (8, 5, 6), classes: int | None = None):
    labels = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts))
    images = np.arange(len(labels), dtype=np.uint8).repeat(4).reshape(-1, 2, 2)  # every pixel identifies its image
    return from_arrays("marked", images, labels, classes=classes)


def test_a_task_shows_the_same_images_again_and_again_with_one_label_each() -> None:
    stream = RandomLabels(data(), examples=7, epochs=3)
    assert (stream.task_length, stream.outputs) == (21, 3)
    chunk = stream.chunk([4], 0, 5 * 21)
    images = set(chunk.index[0, :7].tolist())
    assert len(images) == 7
    labels = []
    for task in range(5):
        seen = {}
        for epoch in range(3):
            steps = slice(21 * task + 7 * epoch, 21 * task + 7 * epoch + 7)
            assert set(chunk.index[0, steps].tolist()) == images
            for image, label in zip(chunk.index[0, steps].tolist(), chunk.targets[0, steps].tolist(), strict=True):
                assert seen.setdefault(image, label) == label
        labels.append(tuple(seen[image] for image in sorted(images)))
    assert len(set(labels)) == 5


def test_every_seed_has_images_of_its_own_and_labels_are_uniform() -> None:
    stream = RandomLabels(data((40, 40, 40)), examples=20, epochs=1)
    chunk = stream.chunk(range(200), 0, 40)
    assert len({tuple(sorted(own[:20].tolist())) for own in chunk.index}) == 200
    assert stats.chisquare(torch.bincount(chunk.index[:, :20].flatten(), minlength=120)).pvalue > 1e-3
    assert stats.chisquare(torch.bincount(chunk.targets.flatten())).pvalue > 1e-3
    true = torch.from_numpy(stream.data.labels.astype(np.int64))[chunk.index]
    assert abs(float((true == chunk.targets).double().mean()) - 1 / 3) < 0.02


def test_no_pair_repeats_before_all_were_used() -> None:
    stream = ClassPairs(data((5, 5, 5, 5, 5)), task_length=10)
    labels = torch.from_numpy(stream.data.labels.astype(np.int64))
    chunk = stream.chunk([7], 0, 40 * 10)
    first_is_lower = 0
    orders = []
    for task in range(40):
        steps = slice(10 * task, 10 * task + 10)
        kinds, targets = labels[chunk.index[0, steps]], chunk.targets[0, steps]
        pair = {int(target): int(kind) for kind, target in zip(kinds, targets, strict=True)}
        assert sorted(pair) == [0, 1]
        assert torch.equal(torch.tensor([pair[int(t)] for t in targets]), kinds)
        assert chunk.index[0, steps].unique().numel() == 10  # both classes have five images
        first_is_lower += pair[0] < pair[1]
        orders.append(frozenset(pair.values()))
    for first in range(0, 40, 10):
        assert len(set(orders[first : first + 10])) == 10
    assert len({tuple(orders[first : first + 10]) for first in range(0, 40, 10)}) == 4
    assert 10 < first_is_lower < 30


def test_classes_give_equally_many_images_and_those_without_images_give_none() -> None:
    stream = ClassPairs(data(classes=9), task_length=10)
    chunk = stream.chunk([0], 0, 3 * 10)
    labels = torch.from_numpy(stream.data.labels.astype(np.int64))
    for task in range(3):
        index = chunk.index[0, 10 * task : 10 * task + 10]
        assert index.unique().numel() == 10  # the smallest class has five
        assert torch.bincount(labels[index]).unique().tolist() in ([0, 5], [5])


def test_defaults() -> None:
    assert (RandomLabels("digits").task_length, ClassPairs("digits").task_length) == (1_000, 1_000)
    large = from_arrays("large", np.zeros((1_300, 2, 2), np.uint8), np.arange(1_300) % 2)
    assert (RandomLabels(large).examples, RandomLabels(large).task_length) == (1_200, RandomLabels.default_task_length)
    assert ClassPairs(large).task_length == 2_500
    assert RandomLabels(data()).examples == 19


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomLabels(data(), examples=20), "examples must be an integer from 1 to 19, not 20"),
        (lambda: RandomLabels(data(), examples=2.5), r"examples must be an integer from 1 to 19, not 2\.5"),
        (lambda: RandomLabels(data(), epochs=0), "epochs must be an integer from 1 to .*, not 0"),
        (
            lambda: ClassPairs(data((4,), classes=3)),
            "class pairs need images of at least two classes, but marked has one",
        ),
    ],
)
def test_mistakes_are_named(make, message: str) -> None:
    with pytest.raises((ValueError, DataError), match=message):
        make()
