"""Results in one SQLite file: a row per finished learner, including its curves.

A learner is identified by everything that determines its computation (:class:`Key`): adding it again changes nothing, and
changing a setting makes another row. There is one writer; any number of readers can read while it writes. Added records are
on disk: a killed process, a full disk or a power failure does not lose them.

Every row has a checksum of all its columns. Opening a store checks its structure and every row, so that damage is never
mistaken for results: readers skip damaged rows and warn (:class:`DamagedStoreWarning`), writers refuse the file.

    >>> key = Key(problem="toy", network="300-150", method="sgd", settings={"lr": 0.01}, seed=0, steps=4)
    >>> record = Record(key, window=2, loss=[0.5, 0.25], device="cpu", backend="torch", seconds=0.1)
    >>> with Store.write(":memory:") as store:
    ...     store.add([record]), store.add([record]), len(store)
    (1, 0, 1)

``records`` defines the stored data of a learner, ``file`` the store, ``schema`` its tables and ``errors`` the exceptions;
``connections`` opens files.
"""

from upgd.store.errors import DamagedStoreWarning, StoreError
from upgd.store.file import Store, repair
from upgd.store.records import Key, Record
from upgd.store.schema import MIGRATIONS

__all__ = ["MIGRATIONS", "DamagedStoreWarning", "Key", "Record", "Store", "StoreError", "repair"]
