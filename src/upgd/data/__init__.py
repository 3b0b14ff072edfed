"""Data sets as bytes: readers that trust nothing, verified downloads, one memory-mapped copy for all processes."""

from upgd.data.dataset import DataError, Dataset, from_arrays

__all__ = ["DataError", "Dataset", "from_arrays", "load"]


def load(name: str) -> Dataset:
    from upgd.data.digits import digits

    if name == "digits":
        return digits()
    raise DataError(f"there is no data set {name!r} here; get it with `upgd data fetch {name}`.")
