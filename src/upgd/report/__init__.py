"""Results as one page for people: ``upgd report`` writes it, ``upgd watch`` shows it while a sweep runs.

>>> from upgd.report import write
>>> write("upgd.db", "report.html")  # doctest: +SKIP
"""

from upgd.report.page import write
from upgd.report.watch import Watch

__all__ = ["Watch", "write"]
