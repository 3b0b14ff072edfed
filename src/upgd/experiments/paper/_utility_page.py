"""Run the utility-quality study and write its page; all numbers on it are generated."""

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from upgd import __version__, writing
from upgd.experiments.analysis import figures
from upgd.experiments.execution.progress import duration
from upgd.experiments.paper._batched_utility import TITLES
from upgd.experiments.paper.utility_quality import PAPER_ORDER, UtilityQuality, run

_PAGE = """\
# How well approximate utilities order weights and features

<!-- Written by `{command}`. Edit the program, not this page. -->

A network learns online, by SGD with step size {lr}, to add two of its five inputs (uniform in [−½, ½]), from {steps:,}
samples, one at a time, in {seeds} independent runs. At every step, before the update, each weight (or feature) is removed in
turn to measure its true utility. The approximations are compared with it by Spearman's rank correlation: *global* over
all items of the network, *local* within each layer and averaged over layers. See [Utility](../utility.md) for the
definitions. The paper does not state the step size; {lr} is the default of the authors' public code. The true utility and its
approximations are computed with the same parameters.

## Does the paper's order hold?

The paper reports second order > first order > magnitude > random = 0.

{verdict}

For features, the paper also reports a low correlation of both approximations. Here, over all steps, {feature_claim}.
With the output of `argsort` used as ranks, as in the authors' code, the same runs give {argsort_claim}
(dotted lines in the figure): `argsort` returns the index of the i-th smallest item rather than the rank of item i.
The code does so for weights, too: there, the same runs give {argsort_weights}.
Taking `argsort` for ranks therefore explains low correlations, but not that the paper has higher ones for weights than for
features.

## Weights and biases: 5-50-1, 351 items

{weight}

## Features: 5-50-50-1, 100 items

{feature}

## How this was computed

- Command: `{command}`
- Computed on cpu in {time}
- Versions: upgd {package}, torch {torch}
- Data: none; the inputs are drawn from the seeds 0 to {last_seed}
"""

_SECTION = """\
![Rank correlation with the true utility over {steps:,} steps](utility-quality-{granularity}s.svg)

Mean correlation over all {steps:,} steps, ± its standard error over {seeds} runs:

{table}

Over the last {last:,} steps, with a mean loss of {losses}:

{last_table}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study and write the page."""
    parser = argparse.ArgumentParser(prog="python -m upgd.experiments.paper.utility_quality", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the page and its figures")
    parser.add_argument("--steps", type=int, default=2_000, help="samples per run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=20, help="runs (%(default)s)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    weights, features = (
        run(granularity, seeds=range(options.seeds), steps=options.steps) for granularity in ("weight", "feature")
    )
    for result in (weights, features):
        figures.save(result.plot(), options.out / f"utility-quality-{result.granularity}s")
    page = options.out / "utility-quality.md"
    command = f"upgd reproduce utility-quality -o {options.out}"
    if (options.steps, options.seeds) != (2_000, 20):
        command = f"{parser.prog} --out {options.out} --steps {options.steps} --seeds {options.seeds}"
    content = _page(weights, features, command, time.perf_counter() - began)
    with writing.text(page) as file:
        file.write(content)
    print(f"wrote {page}")


def _page(weights: UtilityQuality, features: UtilityQuality, command: str, seconds: float) -> str:
    return _PAGE.format(
        command=command,
        time=duration(seconds),
        package=__version__,
        torch=torch.__version__,
        last_seed=weights.seeds[-1],
        lr=weights.lr,
        steps=weights.steps,
        seeds=len(weights.seeds),
        weight=_section(weights),
        feature=_section(features),
        verdict=_verdict(weights) + "\n\n" + _verdict(features),
        argsort_claim=" and ".join(_argsort_range(features, measure) for measure in ("second order", "first order")),
        argsort_weights=" and ".join(_argsort_range(weights, measure) for measure in ("second order", "first order")),
        feature_claim=" and ".join(_range(features, measure) for measure in ("second order", "first order")),
    )


def _section(result: UtilityQuality) -> str:
    last = _last(result)
    ends = [f"{losses[:, -last:].mean():.1e} ({TITLES[activation]})" for activation, losses in result.losses.items()]
    return _SECTION.format(
        granularity=result.granularity,
        steps=result.steps,
        seeds=len(result.seeds),
        table=result.table(),
        last=last,
        losses=", ".join(ends),
        last_table=result.table(last),
    ).rstrip()


def _verdict(result: UtilityQuality) -> str:
    """Return for each pair of neighbours in the paper's order where it holds in the mean, and in how many runs."""
    settings = list(result.settings())
    lines = [f"**{result.granularity.capitalize()}s**, in {len(settings)} settings (activation, scope):", ""]
    for better, worse in pairwise(PAPER_ORDER):
        for period, last in (("all steps", None), (f"the last {_last(result):,} steps", _last(result))):
            lines.append(f"- {better} > {worse}, over {period}: {_link(result, better, worse, last)}")
    size = max(abs(result.means(*setting, "random").mean().item()) for setting in settings)
    lines.append(f"- random = 0: its mean correlation is at most {size:.4f} in absolute value.")
    return "\n".join(lines)


def _link(result: UtilityQuality, better: str, worse: str, last: int | None) -> str:
    settings = list(result.settings())
    failures = []
    for activation, scope in settings:
        high, low = (result.means(activation, scope, measure, last).mean().item() for measure in (better, worse))
        if high <= low:
            failures.append(f"{TITLES[activation]} {scope}, {high:.3f} against {low:.3f}".replace("-", "−"))
    wins = [result.wins(*setting, better, worse, last) for setting in settings]
    runs = len(result.seeds)
    share = f"all {runs} runs" if min(wins) == runs else f"{min(wins)} to {max(wins)} of the {runs} runs"
    if not failures:
        return f"holds in all settings, in {share} of each."
    held = len(settings) - len(failures)
    return f"holds in {held} of {len(settings)} settings, in {share} of a setting; not in {'; '.join(failures)}."


def _range(result: UtilityQuality, measure: str) -> str:
    means = [result.means(*setting, measure).mean().item() for setting in result.settings()]
    return f"{measure} has {min(means):.2f} to {max(means):.2f}"


def _argsort_range(result: UtilityQuality, measure: str) -> str:
    means = [result.mean_by_argsort(*setting, measure) for setting in result.settings()]
    return f"{min(means):.2f} to {max(means):.2f} for {measure}"


def _last(result: UtilityQuality) -> int:
    return max(1, result.steps // 10)
