"""Convert docstrings from reStructuredText, as ``help()`` and editors show them, to Markdown for the site."""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe


class ScientificPython(griffe.Extension):
    """Convert roles to links, literal blocks to fenced ones, simple tables to Markdown tables, and name sections."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(
                r":(?:class|func|mod|meth|data|attr):`~?([\w.]+)`",
                lambda found: _link(found[1], obj),
                obj.docstring.value,
            )
            text = re.sub(r"^(.*)::\n\n((?:    .*\n|\n(?=    ))+)", _fenced, text, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            text = re.sub(r"^=+(  =+)+\n(?:.*\n)*?=+(  =+)+$", _table, text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


@cache
def _documented() -> set[str]:
    """The names that the reference documents."""
    pages = (page.read_text(encoding="utf-8") for page in (Path(__file__).parent / "reference").glob("*.md"))
    return {name for page in pages for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)}


def _link(name: str, obj: griffe.Object) -> str:
    """The name as code, with a link if the reference documents it or its class; it may be relative to that of ``obj``."""
    scopes = obj.path.split(".")
    for depth in range(len(scopes) + 1):
        found = ".".join([*scopes[:depth], name])
        if found in _documented() or found.rpartition(".")[0] in _documented():
            return f"[`{name}`][{found}]"
    return f"`{name}`"


def _fenced(found: re.Match[str]) -> str:
    """A literal block at the level of the text; its lines can wrap one by one."""
    before = f"{found[1]}:\n\n" if found[1] else ""
    return f"{before}```text\n{inspect.cleandoc(found[2])}\n```\n"


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
