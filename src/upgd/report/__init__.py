"""HTML reports: ``upgd report`` writes a page about a file of results, and ``upgd watch`` serves it during a sweep.

>>> from upgd.report import write
>>> write("upgd.db", "report.html")  # doctest: +SKIP

``page`` assembles the file from the numbers and text of ``content`` and the HTML of ``parts``; ``watch`` serves it.
``colours`` defines the colours of the page.
"""

from upgd.report.page import write
from upgd.report.watch import Watch

__all__ = ["Watch", "write"]
