"""Sequences of new classification tasks over a data set: random labels to memorise, pairs of classes to tell apart."""

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from upgd.data import DataError, Dataset
from upgd.noise import Purpose, words
from upgd.streams.contract import checked_count
from upgd.streams.images import Data, ImageStream
from upgd.streams.shuffle import sample_order

__all__ = ["ClassPairs", "RandomLabels"]


class RandomLabels(ImageStream):
    """A few images with random labels, to be memorised; every task has new labels for the same images.

    The protocol of Lyle et al. ("Understanding plasticity in neural networks", 2023) and Kumar et al. ("Maintaining
    plasticity via regenerative regularization", 2023). They memorise 1,200 images in 400 passes with batches of 16, which
    are 30,000 updates per task. A learner here takes one sample at a time and makes as many updates in 25 passes.

    The images are drawn for each seed, without replacement. The label of an image in task ``k`` is uniform over the classes
    and a function of (seed, k). A pass shows every image once, each time in a new order.

    Args:
        data: the data set; only its images and its number of classes matter.
        examples: how many images, 1 200 (100 for the embedded digits), or all if the data set has fewer.
        epochs: how many passes a task has, 25 (10 for the embedded digits). A task has ``examples · epochs`` steps.
    """

    family = "random-label"
    default_task_length = 30_000

    def __init__(self, data: Data, *, examples: int | None = None, epochs: int | None = None) -> None:
        super().__init__(data, task_length=1)
        small = self.data.name == "digits"
        default = min(100 if small else 1_200, len(self.data))
        self.examples = default if examples is None else checked_count("examples", examples, 1, len(self.data))
        self.epochs = (10 if small else 25) if epochs is None else checked_count("epochs", epochs, 1, 10**9)
        self.task_length = self.examples * self.epochs

    def _drawn(self, seeds: Tensor, start: int, task: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        size, device = len(self.data), task.device
        images = sample_order(seeds, 0, self.examples, size, size, device, purpose=Purpose.SUBSET)
        place = sample_order(seeds, start, len(task), self.task_length, self.examples, device)
        drawn = words(seeds.to(device)[:, None], Purpose.LABELS, tasks, self.examples)
        labels = drawn * self.outputs >> 32
        return images.gather(1, place), labels.flatten(1).gather(1, task * self.examples + place)


class ClassPairs(ImageStream):
    """Every task is to tell two classes apart; no pair of classes comes again before all have come.

    The protocol of Continual ImageNet (Dohare et al., "Loss of plasticity in deep continual learning", 2024) for smaller
    data sets. There are two outputs, which stay as they are when the task changes; Dohare et al. reset theirs.

    The pairs come in a random order, a function of the seed; after the last one they come again in a new order. Which class
    of a pair is output 0 is random, too. All classes give equally many images, as many as the smallest has. Samples come
    without replacement: a task that is longer than its images passes over them again, each time in a new order.

    Args:
        data: the data set.
        task_length: how many steps a task has, 2 500 (1 000 for the embedded digits).
    """

    family = "class-pairs"
    default_task_length = 2_500

    def __init__(self, data: Data, *, task_length: int | None = None) -> None:
        super().__init__(data, task_length=task_length)
        self.outputs = 2
        if len(_by_class(self.data)) < 2:
            raise DataError(f"class pairs need images of at least two classes, and {self.data.name} has one.")

    def _drawn(self, seeds: Tensor, start: int, task: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
        of_class = _by_class(self.data).to(task.device)
        classes, images = of_class.shape
        pair = torch.triu_indices(classes, classes, offset=1, device=task.device)
        first = start // self.task_length
        order = sample_order(
            seeds, first, len(tasks), pair.shape[1], pair.shape[1], task.device, purpose=Purpose.TASK
        )  # (seeds, tasks)
        swapped = words(seeds.to(task.device)[:, None], Purpose.LABELS, tasks, 1).squeeze(-1) >> 31
        place = sample_order(seeds, start, len(task), self.task_length, 2 * images, task.device)
        which = place // images  # 0: the pair's first class, 1: its second
        label = pair[:, order].movedim(0, -1)[:, task].gather(2, which[..., None]).squeeze(-1)
        return of_class[label, place % images], which ^ swapped[:, task]


#: The images of each class, ``(classes, images)``: found once for each data set.
_found: WeakKeyDictionary[Dataset, Tensor] = WeakKeyDictionary()


def _by_class(data: Dataset) -> Tensor:
    """For each class that has images, the numbers of the first ones: as many as the class with the fewest has."""
    if data not in _found:
        counts = np.bincount(data.labels, minlength=data.classes)
        grouped = np.split(np.argsort(data.labels, kind="stable"), np.cumsum(counts)[:-1])
        least = counts[counts > 0].min()
        _found[data] = torch.from_numpy(np.stack([own[:least] for own in grouped if len(own)]).astype(np.int64))
    return _found[data]
