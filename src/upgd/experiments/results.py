"""What experiments have shown: curves, tables, pictures."""
from collections.abc import Sequence

from upgd.store import Record


class Results:
    def __init__(self, records: Sequence[Record]) -> None:
        self.records = tuple(records)
