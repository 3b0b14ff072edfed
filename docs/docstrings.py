"""Convert docstrings from reStructuredText, as ``help()`` and editors show them, to Markdown for the site."""

import re
from typing import Any

import griffe


class ScientificPython(griffe.Extension):
    """Convert roles to code, literal-block markers to colons, simple tables to Markdown tables, and name sections."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":(?:class|func|mod|meth|data|attr):(`+)~?", r"\1", obj.docstring.value)
            text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            text = re.sub(r"^=+(  =+)+\n(?:.*\n)*?=+(  =+)+$", _table, text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _table(found: re.Match[str]) -> str:
    """A table of two columns without a head; a row may continue on further lines."""
    border, *lines, _ = found[0].split("\n")
    start = border.index("  ") + 2
    rows: list[list[str]] = []
    for line in lines:
        first, second = line[:start].strip(), line[start:].strip()
        if first:
            rows.append([first, second])
        else:
            rows[-1][1] += f" {second}"
    return "\n".join(["| argument | meaning |", "|---|---|", *(f"| {first} | {second} |" for first, second in rows)])
