"""Update the tables of docs/gpu.md from docs/results: ``python -m benchmarks.gpu_page``.

Speeds and the study are in ``gpu.json``, long runs in ``long-runs-cpu.csv.gz`` and ``long-runs-gpu.csv.gz``.
"""

import json
import re
import statistics
from pathlib import Path

from benchmarks.long_runs import differences, read, summary
from benchmarks.long_runs import table as long_table

DOCS = Path(__file__).parents[1] / "docs"


def rates(found: dict) -> str:
    """Return the table of speeds."""
    plain = found["rates"]["plain"]
    lines = [
        f"One {found['device']}, torch {found['torch']}.",
        "",
        "| | learner-steps/s | times the plain loop |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {speed:,} | 1 |" for name, speed in plain.items()]
    for part in ("on chip", "general"):
        for name, speed in found["rates"][part].items():
            base = plain["plain loop, ConvNet" if "ConvNet" in name else "plain loop"]
            lines.append(f"| {part}: {name} | {speed:,} | {speed / base:,.0f} |")
    return "\n".join(lines)


def proof(found: dict) -> str:
    """Return the table of accuracies, and the run time."""
    own = found["proof"]
    lines = ["| method | mean online accuracy | standard deviation over 20 seeds |", "|---|---:|---:|"]
    for run in own["runs"]:
        for name, values in run["accuracy"].items():
            lines.append(f"| {name} | {statistics.mean(values):.4f} | {statistics.stdev(values):.4f} |")
    on_chip, adamw = own["runs"]
    learners = on_chip["learners"]
    alone = sum(run["learners"] for run in own["runs"]) * own["steps"] / own["plain_loop"] / 86400
    lines += [
        "",
        f"The {learners} learners on chip took {on_chip['seconds']:.0f} s for {own['steps']:,} steps each, or "
        f"{learners * own['steps'] / on_chip['seconds']:,.0f} learner-steps/s. This includes drawing initial weights and "
        f"streams, compilation, and windows of 5,000 steps. The {adamw['learners']} learners with AdamW, on the general "
        f"backend, took {adamw['seconds']:.0f} s. The plain loop, measured in the same run, reaches "
        f"{own['plain_loop']:.0f} steps/s and would need {alone:.1f} days.",
    ]
    return "\n".join(lines)


def long_runs() -> str:
    """Return the comparison of long runs on a CPU and on a GPU."""
    found = differences(*(read(DOCS / "results" / f"long-runs-{device}.csv.gz") for device in ("cpu", "gpu")))
    return f"{long_table(found, ('CPU', 'GPU'))}\n\n{summary(found)}"


def write_page() -> None:
    found = json.loads((DOCS / "results" / "gpu.json").read_text(encoding="utf-8"))
    page = DOCS / "gpu.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (("rates", rates(found)), ("proof", proof(found)), ("long runs", long_runs())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        text = re.sub(
            pattern,
            lambda match, table=table: match.group(1) + "\n" + table + "\n\n" + match.group(2),
            text,
            flags=re.DOTALL,
        )
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()
