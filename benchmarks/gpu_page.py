"""Update the tables of docs/gpu.md from docs/results: ``python -m benchmarks.gpu_page``.

Speeds are in ``gpu.json``, the studies in ``data``, long runs in ``long-runs-cpu.csv.gz`` and ``long-runs-gpu.csv.gz``.
"""

import json
import re
from pathlib import Path

from benchmarks.long_runs import differences, read, summary
from benchmarks.long_runs import table as long_table
from upgd.experiments.analysis import portable

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


def studies(found: dict) -> str:
    """Return the work and the time of all studies under Results, by problem."""
    lines = [
        "| problem | learners | learner-steps | time | learner-steps/s | plain loop |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    totals = []
    for problem, title in _PROBLEMS.items():
        runs = portable.read(DOCS / "results" / "data" / f"{problem}.csv.gz")
        own = [run for run in runs if run.device == found["device"]]
        plain = found["rates"]["plain"]["plain loop, ConvNet" if "cifar10" in problem else "plain loop"]
        steps = sum(run.steps_taken for run in own)
        totals.append((len(own), steps, sum(run.seconds for run in own), steps / plain))
        lines.append(_study(title, *totals[-1]))
    lines.append(_study("together", *map(sum, zip(*totals, strict=True))))
    return "\n".join(lines)


#: The problems of the studies on a GPU: their files, and their names in the table.
_PROBLEMS = {
    "toy-changing-inputs": "toy, changing inputs",
    "toy-changing-outputs": "toy, changing outputs",
    "stationary-mnist": "stationary MNIST",
    "input-permuted-mnist": "input-permuted MNIST",
    "output-permuted-emnist-subset": "output-permuted EMNIST",
    "output-permuted-cifar10": "output-permuted CIFAR-10",
}


def _study(title: str, learners: int, steps: int, seconds: float, plain: float) -> str:
    """Return a row of the table of studies; ``plain`` is the time of the plain loop in seconds."""
    return (
        f"| {title} | {learners:,} | {steps / 1e6:,.0f} M | {seconds / 60:,.0f} min | {steps / seconds / 1e6:.2f} M | "
        f"{plain / 86400:,.0f} days |"
    )


def long_runs() -> str:
    """Return the comparison of long runs on a CPU and on a GPU."""
    found = differences(*(read(DOCS / "results" / f"long-runs-{device}.csv.gz") for device in ("cpu", "gpu")))
    return f"{long_table(found, ('CPU', 'GPU'))}\n\n{summary(found)}"


def write_page() -> None:
    found = json.loads((DOCS / "results" / "gpu.json").read_text(encoding="utf-8"))
    page = DOCS / "gpu.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (("rates", rates(found)), ("studies", studies(found)), ("long runs", long_runs())):
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
