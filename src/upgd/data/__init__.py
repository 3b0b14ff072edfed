"""Data sets stored as bytes: strict readers, verified downloads, and one memory-mapped copy shared by all processes.

>>> import upgd.data
>>> upgd.data.load("digits")
Dataset('digits': 1,797 images of 8×8, 10 classes)

``acquire`` adds data sets to the ``cache``. It downloads (``transfer``) official data sets (``sources``) or reads local
files, unpacks them (``archives``, ``packing``) and parses them (``formats``). ``dataset`` defines :class:`Dataset`,
``embedded`` holds the digits, and ``registry`` holds registered data sets.
"""

from difflib import get_close_matches

from upgd import plugins
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
    """Load a data set by name. "digits" is always available; other data sets must be in the cache or registered.

    Args:
        name: "digits", "mnist", "emnist", "cifar10", or the name of your own data set, added to the cache or with
            :func:`register`.
        split: "train", used by the experiments, or "test". The digits have no test split.

    Returns:
        The data set. Data sets in the cache are memory-mapped: opening one takes milliseconds, and processes share memory.

    Example:
        >>> import upgd.data
        >>> upgd.data.load("digits").labels[:5]
        array([0, 1, 2, 3, 4], dtype=uint8)
    """
    if name == "digits":
        if split != "train":
            raise DataError(f"split must be 'train' for the embedded digits, not {split!r}")
        return digits()
    if name not in OFFICIAL and (registered := registry.load(name, split)) is not None:
        return registered
    found = cache.entry(name)
    if found is None:
        check_name(name)
        raise DataError(f"the data set {name!r} is not in {folder()}: download it with `upgd data fetch {name}`")
    return cache.open_split(found, split)


def check_name(name: str) -> None:
    """Raise DataError with a suggestion if there is no data set of that name. Official data sets need not be downloaded."""
    known = ["digits", *OFFICIAL, *(n for n in (*registry.names(), *cache.names()) if n not in OFFICIAL)]
    if name not in known:
        cache.checked_name(name)
        near = "".join(f" (did you mean {match!r}?)" for match in get_close_matches(name, known, n=1))
        raise DataError(
            f"there is no data set {name!r}{near}; choose one of {', '.join(known)}, or add your own IDX files with "
            f"`upgd data fetch --from FOLDER --as {name}`, or {plugins.REMEDY}"
        )
