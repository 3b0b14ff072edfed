"""The embedded digits equal those of UCI and scikit-learn."""

import subprocess
import sys
from pathlib import Path

import numpy as np

import upgd.data


def test_they_equal_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), upgd.data.load("digits")
    np.testing.assert_array_equal(ours.images, theirs.images)
    np.testing.assert_array_equal(ours.labels, theirs.target)
    assert (ours.classes, ours.white, len(ours)) == (10, 16, 1797)
    assert ours.images.dtype == ours.labels.dtype == np.uint8


def test_they_are_read_only():
    assert not upgd.data.load("digits").images.flags.writeable


def test_source_and_licence_lie_next_to_the_file():
    folder = Path(upgd.data.__file__).parent
    assert (folder / "digits.npz").stat().st_size < 50_000
    notice = (folder / "digits.txt").read_text()
    assert "CC BY 4.0" in notice
    assert "Alpaydin" in notice


def test_they_need_only_numpy():
    forbidden = ["pooch", "sklearn", "scipy", "rich", "cyclopts", "requests", "numba"]
    script = f"import sys, upgd.data; upgd.data.load('digits'); print([m for m in {forbidden} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
