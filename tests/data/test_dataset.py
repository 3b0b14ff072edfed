"""Arrays from users become data sets, or raise a one-sentence error."""

import re

import numpy as np
import pytest
import torch

from upgd.data import DataError, from_arrays

GREY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_arrays_become_a_data_set_without_a_copy():
    labels = np.array([3, 1], np.uint8)
    made = from_arrays("mine", GREY, labels)
    assert (made.name, made.classes, made.white, len(made)) == ("mine", 4, 255, 2)
    assert np.shares_memory(made.images, GREY)
    assert np.shares_memory(made.labels, labels)
    assert not made.images.flags.writeable
    assert GREY.flags.writeable
    assert repr(made) == "Dataset('mine': 2 images of 3×4, 4 classes)"


def test_torch_tensors_and_lists_are_arrays_too():
    made = from_arrays("mine", torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0, 1], classes=5, white=16)
    assert made.images.shape == (2, 3, 8, 8)
    assert made.labels.dtype == np.uint8
    assert (made.classes, made.white) == (5, 16)


def test_upright_swaps_rows_and_columns_of_transposed_images_only():
    stored = from_arrays("mine", GREY, [0, 1], transposed=True)
    seen = stored.upright()
    np.testing.assert_array_equal(seen.images[1], GREY[1].T)
    assert np.shares_memory(seen.images, GREY)
    assert seen.upright() is seen
    assert not seen.transposed


@pytest.mark.parametrize(
    ("images", "labels", "options", "says"),
    [
        (GREY.astype(int), [0, 1], {}, "images must be unsigned bytes (uint8) from 0 to white=255, or floating-point"),
        (GREY * np.nan, [0, 1], {}, "images contain NaN or infinite values"),
        (GREY[0], [0, 1, 2], {}, "images must have the shape"),
        (GREY[:0], [], {}, "images must have the shape"),
        (np.zeros((2, 8, 8, 3), np.uint8), [0, 1], {}, "images.transpose(0, 3, 1, 2)"),
        (GREY, [0, 1, 2], {}, "must have the same length, not 2 and 3"),
        (GREY, [0.0, 1.0], {}, "labels must be a 1-D integer array, not float64"),
        (GREY, [[0], [1]], {}, "labels must be a 1-D integer array"),
        (GREY, [0, -1], {}, "labels must be from 0 to 999,999, not from -1 to 0"),
        (GREY, [0, 10**6], {}, "labels must be from 0 to 999,999"),
        (GREY, [0, 5], {"classes": 5}, "classes must be from 6 (the largest label plus one) to 1,000,000, not 5"),
        (GREY, [0, 5], {"classes": 10**6 + 1}, "classes must be from 6"),
        (GREY, [0, 1], {"white": 16}, "images contain the value 23, more than white=16"),
        (GREY, [0, 1], {"white": 0}, "white must be from 1 to 255"),
    ],
)
def test_a_mistake_gets_one_sentence(images, labels, options, says):
    with pytest.raises(DataError, match=re.escape(says)):
        from_arrays("mine", images, labels, **options)
