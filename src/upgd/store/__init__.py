"""Results in one SQLite file: a row for every finished learner, its curves beside it.

A learner is known by what makes it compute what it computes (:class:`Key`): to add it again changes nothing, to change a
setting makes another row. There is one writer; any number of readers may look on while it writes. What has been added is on
the disk: a process killed at any moment, a full disk or a power cut takes away nothing of it.

Every row carries a checksum of all its columns. Opening a store checks its structure and every row, so that damage is never
mistaken for results: readers leave damaged rows out and warn (:class:`DamagedStoreWarning`), writers refuse the file.

    >>> key = Key(problem="toy", network="300-150", method="sgd", settings={"lr": 0.01}, seed=0, steps=4)
    >>> record = Record(key, window=2, loss=[0.5, 0.25], device="cpu", backend="torch", seconds=0.1)
    >>> with Store.write(":memory:") as store:
    ...     store.add([record]), store.add([record]), len(store)
    (1, 0, 1)

``records`` says what is kept of a learner, ``file`` has the store itself, ``schema`` its tables, ``connections`` opens files,
and ``errors`` has their mistakes in words.
"""

from upgd.store.errors import DamagedStoreWarning, StoreError
from upgd.store.file import Store, repair
from upgd.store.records import Key, Record
from upgd.store.schema import MIGRATIONS

__all__ = ["MIGRATIONS", "DamagedStoreWarning", "Key", "Record", "Store", "StoreError", "repair"]
