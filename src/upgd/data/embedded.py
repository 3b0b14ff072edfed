"""The handwritten digits that come with the package: no download, no further dependency.

1,797 images of 8×8 pixels with values 0 … 16: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin
and C. Kaynak, 1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49), licensed under CC BY 4.0. See
``digits.txt`` next to this file.
"""

from importlib import resources

import numpy as np

from upgd.data.dataset import Dataset, from_arrays

SOURCE = "embedded in the package (UCI optdigits, CC BY 4.0)"


def digits() -> Dataset:
    """The embedded digits as a data set, in the order in which UCI and scikit-learn give them."""
    with resources.files("upgd.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return from_arrays("digits", arrays["images"], arrays["labels"], classes=10, white=16)
