"""The handwritten digits that are included in the package, available without a download or further dependencies.

1,797 images of 8×8 pixels with values 0 … 16: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin
and C. Kaynak, 1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49), licensed under CC BY 4.0. See
``digits.txt`` in this folder.
"""

from importlib import resources

import numpy as np

from upgd.data.dataset import Dataset, from_arrays

SOURCE = "embedded in the package (UCI optdigits, CC BY 4.0)"


def digits() -> Dataset:
    """Return the embedded digits, in the same order as UCI and scikit-learn."""
    with resources.files("upgd.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return from_arrays("digits", arrays["images"], arrays["labels"], classes=10, white=16)
