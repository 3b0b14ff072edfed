"""Sequences of new classification tasks over a data set: random labels to memorize, or pairs of classes to distinguish."""

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
    """A small set of images with random labels to memorize; every task assigns new labels to the same images.

    The protocol of Lyle et al. ("Understanding plasticity in neural networks", 2023) and Kumar et al. ("Maintaining
    plasticity via regenerative regularization", 2023). They memorize 1,200 images in 400 passes with batches of 16, which
    is 30,000 updates per task. Here, learners process one sample at a time, so 25 passes give as many updates.

    The images are drawn without replacement, separately for each seed. The label of an image in task ``k`` is uniform
    over the classes and a function of (seed, k). Every pass shows each image once, in a new order.

    Args:
        data: The data set; only its images and its number of classes are used.
        examples: Number of images. Default: 1,200 (100 for the embedded digits), or all if the data set has fewer.
        epochs: Number of passes per task. Default: 25 (10 for the embedded digits). A task has ``examples · epochs``
            steps.

    Example:
        >>> RandomLabels("digits", examples=100, epochs=10)
        <random-label-digits: 8×8 → 10, cross_entropy, 1,000 steps per task>
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
    """Every task is a binary classification of two classes; a pair repeats only after all pairs have been used.

    The protocol of Continual ImageNet (Dohare et al., "Loss of plasticity in deep continual learning", 2024) for smaller
    data sets. The two outputs are kept when the task changes, whereas Dohare et al. reset them.

    The order of the pairs is random, a function of the seed, and reshuffled after the last pair. Which class of a pair is
    output 0 is also random. All classes contribute equally many images, as many as the smallest class has. Samples are
    drawn without replacement; if a task is longer than its set of images, every pass has a new order.

    Args:
        data: The data set.
        task_length: Number of steps per task. Default: 2,500 (1,000 for the embedded digits).

    Example:
        >>> ClassPairs("digits")
        <class-pairs-digits: 8×8 → 2, cross_entropy, 1,000 steps per task>
    """

    family = "class-pairs"
    default_task_length = 2_500

    def __init__(self, data: Data, *, task_length: int | None = None) -> None:
        super().__init__(data, task_length=task_length)
        self.outputs = 2
        if len(_by_class(self.data)) < 2:
            raise DataError(f"class pairs need images of at least two classes, but {self.data.name} has one")

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
        which = place // images  # 0: first class of the pair, 1: second class
        label = pair[:, order].movedim(0, -1)[:, task].gather(2, which[..., None]).squeeze(-1)
        return of_class[label, place % images], which ^ swapped[:, task]


#: Image indices of each class, ``(classes, images)``, computed once per data set.
_found: WeakKeyDictionary[Dataset, Tensor] = WeakKeyDictionary()


def _by_class(data: Dataset) -> Tensor:
    """Return the first image indices of each non-empty class, as many per class as the smallest class has."""
    if data not in _found:
        counts = np.bincount(data.labels, minlength=data.classes)
        grouped = np.split(np.argsort(data.labels, kind="stable"), np.cumsum(counts)[:-1])
        least = counts[counts > 0].min()
        _found[data] = torch.from_numpy(np.stack([own[:least] for own in grouped if len(own)]).astype(np.int64))
    return _found[data]
