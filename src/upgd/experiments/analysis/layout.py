"""Format text to fit a terminal; output to a pipe or a file is not shortened."""

import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["laid_out", "number_format", "number_text", "p_text", "terminal_width", "wrapped"]

_DIFFERENCES = ("vs. best", "vs. reference")
#: Columns that a narrow table omits, in this order; settings are not omitted but moved to separate lines.
_DISPENSABLE = (
    "learner-steps",
    "tried",
    "settings",
    "p (Holm)",
    "first quarter",
    "seeds",
    *_DIFFERENCES,
    "last quarter",
)
_WORDS = ("method", "settings", "minus")  # the other columns are numbers
_GAP = "  "


def terminal_width() -> int | None:
    """Return the number of columns of the standard output (or ``COLUMNS``); None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, width: int | None, *, indent: str = "", breaks: str = " ") -> str:
    """Wrap a long line after ``breaks``; continuation lines start with ``indent``."""
    if width is None or len(text) <= width:
        return text
    parts = [part.replace(" ", "\u00a0") for part in text.split(breaks)]
    lines = textwrap.wrap(
        breaks.join(parts),
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\u00a0", " ")


def number_format(values: Iterable[float | None]) -> str:
    """Return a format for the numbers of a column: as many decimals as the smallest of them needs.

    Four decimals for most accuracies, more for small losses, fewer for large ones; scientific where decimals would not fit.

        >>> [format(value, number_format([0.5, 0.0977])) for value in (0.5, 0.0977)]
        ['0.5000', '0.0977']
    """
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    if not sizes:
        return ".4f"
    magnitude = math.floor(math.log10(min(sizes)))
    decimals = max(0, 3 - magnitude if magnitude >= -1 else 2 - magnitude)
    return f".{decimals}f" if decimals <= 8 and max(sizes) < 1e6 else ".3e"


def number_text(value: float | None, spec: str) -> str:
    """Format a number with a minus sign; – if there is none. Exponents keep their hyphen, so that programs can read them."""
    if value is None:
        return "–"
    text = format(value, spec)
    return f"−{text[1:]}" if text.startswith("-") else text


def p_text(p: float | None) -> str:
    """Format a p-value with three decimals."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def laid_out(rows: Sequence[Sequence[str]], width: int | None) -> tuple[str, list[str]]:
    """Format rows as text; the first row holds the names of the columns.

    Args:
        rows: lists of cells of equal length.
        width: the available width. Names are folded first, then columns are omitted.

    Returns:
        The text, and the names of the omitted columns.
    """
    columns = {name: cells for name, *cells in zip(*rows, strict=True)}
    heads = {name: [name] for name in columns}
    if width is None:
        return _joined(columns, heads), []
    if _width(columns, heads) > width:
        heads = {
            name: textwrap.wrap(name, max(_longest_word(name), *map(len, cells))) for name, cells in columns.items()
        }
    left_out, below = [], [""] * (len(rows) - 1)
    for name in _DISPENSABLE:
        if name not in columns or _width(columns, heads) <= width:
            continue
        if name == "settings":
            below = [wrapped(_GAP + text, width, indent=_GAP, breaks=", ") for text in columns["settings"]]
        else:
            left_out.append(name)
        del columns[name]
    return _joined(columns, heads, below), left_out


def _longest_word(name: str) -> int:
    return max(map(len, name.replace("-", "- ").split()))


def _joined(columns: dict[str, list[str]], heads: dict[str, list[str]], below: Sequence[str] = ()) -> str:
    depth = max(len(heads[name]) for name in columns)
    whole = {name: [""] * (depth - len(heads[name])) + heads[name] + cells for name, cells in columns.items()}
    padded = [
        [cell.ljust(width) if name in _WORDS else cell.rjust(width) for cell in cells]
        for name, cells in whole.items()
        for width in [max(map(len, cells))]
    ]
    lines = [_GAP.join(row).rstrip() for row in zip(*padded, strict=True)]
    for i, text in enumerate(below):
        lines[depth + i] += f"\n{text}" if text.strip() else ""
    return "\n".join([*lines[:depth], "─" * _width(columns, heads), *lines[depth:]])


def _width(columns: dict[str, list[str]], heads: dict[str, list[str]]) -> int:
    return sum(max(map(len, heads[name] + cells)) for name, cells in columns.items()) + len(_GAP) * (len(columns) - 1)
