"""Results as one page for people: ``upgd report`` writes it, ``upgd watch`` shows it while a sweep runs.

>>> from upgd.report import write
>>> write("upgd.db", "report.html")  # doctest: +SKIP

``page`` makes the file, from the numbers and words of ``content`` and the HTML of ``parts``; ``watch`` serves it.
``colours`` has the colours of the page.
"""

from upgd.report.page import write
from upgd.report.watch import Watch

__all__ = ["Watch", "write"]
