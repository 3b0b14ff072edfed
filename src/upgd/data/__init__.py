"""Data sets as bytes: readers that trust nothing, verified downloads, one memory-mapped copy for all processes.

>>> import upgd.data
>>> upgd.data.load("digits")
Dataset('digits': 1,797 images of 8×8, 10 classes)

``acquire`` brings data sets into the ``cache``: it downloads (``transfer``) the official ones (``sources``), or takes
files that are there, unpacks (``archives``, ``packing``) and reads them (``formats``). ``embedded`` has the digits,
``registry`` data sets of your own, ``dataset`` what all of them are, and ``console`` what ``upgd data`` prints.
"""

from difflib import get_close_matches

from upgd.data import cache, registry
from upgd.data.acquire import adopt, fetch, fetch_from
from upgd.data.cache import folder
from upgd.data.dataset import DataError, Dataset, from_arrays
from upgd.data.embedded import digits
from upgd.data.formats import read_cifar10, read_idx
from upgd.data.registry import register
from upgd.data.sources import OFFICIAL

__all__ = [
    "DataError",
    "Dataset",
    "adopt",
    "fetch",
    "fetch_from",
    "folder",
    "from_arrays",
    "load",
    "read_cifar10",
    "read_idx",
    "register",
]


def load(name: str, split: str = "train") -> Dataset:
    """A data set by its name: "digits" is always there, others are in the cache once they were fetched.

    Args:
        name: "digits", "mnist", "emnist", "cifar10", or a name that you gave to a set of your own, in the cache or with
            :func:`register`.
        split: "train", which the experiments learn from, or "test". The digits have no test split.

    Returns:
        The data set; from the cache it is mapped into memory, which takes milliseconds and shares one copy.

    Example:
        >>> import upgd.data
        >>> upgd.data.load("digits").labels[:5]
        array([0, 1, 2, 3, 4], dtype=uint8)
    """
    if name == "digits":
        if split != "train":
            raise DataError(f"split must be 'train' for the embedded digits, not {split!r}.")
        return digits()
    if name not in OFFICIAL and (registered := registry.load(name, split)) is not None:
        return registered
    found = cache.entry(name)
    if found is None:
        raise DataError(_not_there(name))
    return cache.open_split(found, split)


def _not_there(name: str) -> str:
    if name in OFFICIAL:
        return f"the data set {name!r} is not in {folder()}: get it with `upgd data fetch {name}`."
    known = ["digits", *OFFICIAL, *(n for n in (*registry.names(), *cache.names()) if n not in OFFICIAL)]
    near = "".join(f" (did you mean {match!r}?)" for match in get_close_matches(name, known, n=1))
    return (
        f"there is no data set {name!r}{near}; there are {', '.join(known)}, and a set of IDX files becomes one with "
        f"`upgd data fetch --from FOLDER --as {name}`."
    )
