"""Put measured times of optimizers on the page: ``python -m benchmarks.optimizers_page [FILE …]``.

Keeps what ``python -m benchmarks.optimizers FILE`` measured, on a GPU and on a CPU, in docs/results/optimizers.json, and
writes the tables of docs/large-models.md from it.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizers import table

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "optimizers.json"


def merged(files: Sequence[str]) -> dict[str, Any]:
    """Return the stored times, updated with those of the files."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in files:
        new = json.loads(Path(name).read_text(encoding="utf-8"))
        found |= {kind: new for kind in ("gpu", "cpu") if new[kind]}
    return found


def tables(found: dict[str, Any]) -> str:
    parts = []
    for kind, run in sorted(found.items(), reverse=True):
        where = run["device"] if kind == "gpu" else f"CPU, {run['threads']} threads"
        parts += [f"**{name}** ({where}, torch {run['torch']})\n\n{table(**one)}" for name, one in run[kind].items()]
    return "\n\n".join(parts)


def write_page(files: Sequence[str] = ()) -> None:
    found = merged(files)
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = DOCS / "large-models.md"
    text = page.read_text(encoding="utf-8")
    replaced = re.sub(
        r"(<!-- times -->\n).*?(<!-- end of times -->)",
        lambda match: f"{match.group(1)}\n{tables(found)}\n\n{match.group(2)}",
        text,
        flags=re.DOTALL,
    )
    page.write_text(replaced, encoding="utf-8")


if __name__ == "__main__":
    write_page(sys.argv[1:])
