"""A one-minute demonstration: a non-stationary stream, five methods, a table and a page."""

import html
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from upgd import writing
from upgd.experiments.analysis import figures
from upgd.experiments.analysis.results import Results, Table
from upgd.experiments.analysis.variants import label
from upgd.experiments.execution.running import run
from upgd.experiments.spec.declare import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS", "Show", "demo"]

#: Each method at the best setting of its short grid, chosen on other seeds (``docs/experiments.md`` has the commands).
EXPERIMENTS = {
    "Digits whose labels are permuted every 500 steps": Experiment(
        "output-permuted-digits",
        {
            "upgd": {"lr": 0.1, "beta_utility": 0.0, "sigma": 0.001},
            "sgd": {"lr": 0.03},
            "adamw": {"lr": 0.003, "betas": (0.0, 0.9999)},
            "pgd": {"lr": 0.03, "sigma": 0.01},
            "shrink-and-perturb": {"lr": 0.03, "sigma": 0.1, "weight_decay": 0.001},
        },
        seeds=5,
        steps=30_000,
        network="100-50",
        options={"task_length": 500},
    ),
    "A sum of two inputs whose sign flips every 200 steps": Experiment(
        "toy-changing-outputs",
        {
            "upgd": {"lr": 0.01, "beta_utility": 0.0, "sigma": 0.001},
            "sgd": {"lr": 0.01},
            "adamw": {"lr": 0.003, "betas": (0.0, 0.999)},
            "pgd": {"lr": 0.01, "sigma": 0.1},
            "shrink-and-perturb": {"lr": 0.01, "sigma": 0.1, "weight_decay": 0.001},
        },
        seeds=5,
        steps=20_000,
        network="64-32:identity",
    ),
}

_STYLE = """
:root { --paper: #fff; --ink: #222; --soft: #666; --line: #e6e6e6; --card: #f3f3f3 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12161c; --ink: #e8ebef; --soft: #a3adba; --line: #303844; --card: #1b2129 }
}
body {
  font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1180px; margin: 2.5rem auto; padding: 0 1.2rem
}
h1 { font-size: 1.7rem; margin-bottom: .3rem } h2 { font-size: 1.15rem; margin: 0 0 .3rem }
h3 { font-size: 1rem; margin: 1.8rem 0 0 } p { max-width: 46rem; margin: .3rem 0 }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 2rem; margin: 2rem 0 }
.panels section { display: flex; flex-direction: column } svg { width: 100%; height: auto; margin-top: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600 } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
td:nth-child(2) { white-space: normal; min-width: 9rem }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .9rem } code { background: var(--card); padding: .1rem .3rem }
@media (max-width: 620px) {
  body { margin: 1.2rem auto } table { font-size: 1rem; width: 100% } table, tbody, tr, td { display: block }
  thead { display: none }
  tr { padding: .6rem 0; border-bottom: 1px solid var(--line) } td { border: none; padding: .1rem 0 }
  td:first-child { font-weight: 600 } td:nth-child(2), td:nth-child(n+3)::before { color: var(--soft) }
  td:nth-child(n+3) { display: flex; justify-content: space-between } td:nth-child(n+3)::before { content: attr(data-label) }
}
"""
#: The colour of the dark page, and the replacement for the curves' grid colour.
_DARK_PAPER, _DARK_GRID = "#12161c", "#303844"


class Show:
    """The results of the demonstration: results by title, the files, and the table."""

    def __init__(self, results: dict[str, Results], folder: Path) -> None:
        self.results = results
        self.page = folder / "demo.html"
        self.picture = folder / "demo.png"

    @property
    def table(self) -> Table:
        return Table([line for results in self.results.values() for line in results.table().lines])


def demo(
    folder: str | os.PathLike[str] = "demo-output",
    *,
    progress: bool = True,
    experiments: dict[str, Experiment] | None = None,
) -> Show:
    """Run the demonstration and write its page.

    Args:
        folder: Folder of the page, the picture and the store; created if necessary.
        progress: Whether to show a progress bar.
        experiments: Experiments by title. Default: :data:`EXPERIMENTS`.
    """
    figures.check()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        title: run(experiment, store=folder / "upgd.db", progress=progress)
        for title, experiment in (experiments or EXPERIMENTS).items()
    }
    show = Show(results, folder)
    picture = io.BytesIO()
    _figure(results).savefig(picture, dpi=160, format="png")
    with writing.output(show.picture) as image:
        image.write(picture.getvalue())
    with writing.text(show.page) as page:
        page.write(_page(show))
    return show


def _figure(results: dict[str, Results]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4 * len(results), 4.6), layout="constrained")
    for panel, (title, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        figures.curves(result.comparisons()[0], ax=panel, title=title, points=20)
    return figure


def _page(show: Show) -> str:
    panels = "".join(
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(_words(results))}</p>{_drawing(title, results)}</section>"
        for title, results in show.results.items()
    )
    tables = "".join(
        f'<h3>{html.escape(title)}</h3><div class="scroll">{results.table()._repr_html_()}</div>'
        for title, results in show.results.items()
    )
    store = html.escape(str(show.page.with_name("upgd.db")))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>upgd: continual learning from non-stationary streams</title><style>{_STYLE}</style></head><body>
<h1>Continual learning from non-stationary streams</h1>
<p>Every learner processes one sample at a time: it predicts, is evaluated, and learns. The problem keeps changing.</p>
<div class="panels">{panels}</div>
<h2>The numbers</h2>
{tables}
<footer>Predictions are evaluated before the update. Each method has the best setting of its short grid, chosen on
other seeds. The columns “vs. best” and p are paired over seeds.
The results are next to this page: <code>upgd table --store {store}</code></footer>
</body></html>
"""


def _words(results: Results) -> str:
    """Describe which method is best over all steps, and which one at the end."""
    lines = [line for line in results.table().lines if line["mean"] is not None]
    if len(lines) < 2:
        return ""
    accuracy = lines[0]["metric"] == "accuracy"
    noun = "accuracy" if accuracy else "squared error"

    def name(line: Mapping[str, Any]) -> str:
        return label(line["method"])

    def number(value: float) -> str:
        return f"{value:.0%}" if accuracy else f"{value:.3g}"

    ahead, second = lines[:2]
    end = (max if accuracy else min)(lines, key=lambda line: line["last_quarter"])
    words = (
        f"{name(ahead)} has the {'highest' if accuracy else 'lowest'} {noun} over all steps, {number(ahead['mean'])}; "
        f"{name(second)} follows with {number(second['mean'])}. From the first quarter of the stream to the last, "
        f"{name(ahead)} goes from {number(ahead['first_quarter'])} to {number(ahead['last_quarter'])}"
    )
    if end is ahead:
        return f"{words}, {name(second)} from {number(second['first_quarter'])} to {number(second['last_quarter'])}."
    return (
        f"{words}. However, {name(end)} is best at the end: it goes from {number(end['first_quarter'])} to "
        f"{number(end['last_quarter'])}."
    )


def _drawing(title: str, results: Results) -> str:
    """Return the curves as an SVG element whose colours follow the reader's theme, with text large enough for phones."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.6), layout="constrained")
    axes = figures.curves(results.comparisons()[0], ax=figure.subplots(), points=20)
    axes.set_title("", loc="left")  # the title is on the page
    axes.locator_params(axis="x", nbins=5)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):  # ids must be unique among the drawings of a page
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text[text.index("<svg ") :], count=1)
    described = html.escape(f"Chart: {title}. The table below contains the numbers.")
    text = text.replace(
        "<svg ", f'<svg role="img" aria-label="{described}" xmlns:xlink="http://www.w3.org/1999/xlink" ', 1
    )
    colours = sorted(set(re.findall(r"#[0-9a-f]{6}\b", text)))
    for colour in colours:
        text = text.replace(colour, f"var(--of-{colour[1:]}, {colour})")
    dark = "; ".join(f"--of-{colour[1:]}: {_on_dark(colour)}" for colour in colours)
    return f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>{text}"


def _on_dark(colour: str) -> str:
    """Lighten the colour so that it is visible on the dark page."""
    from matplotlib.colors import to_hex, to_rgb

    if colour == figures.FAINT:
        return _DARK_GRID
    rgb, paper = np.array(to_rgb(colour)), figures.luminance(np.array(to_rgb(_DARK_PAPER)))
    while (figures.luminance(rgb) + 0.05) / (paper + 0.05) < 6:
        rgb = rgb + (1 - rgb) * 0.05
    return to_hex(rgb.tolist())
