"""The phenomenon in a minute: a stream that keeps changing, five methods, a table and a page."""

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from upgd import writing
from upgd.experiments import figures
from upgd.experiments.declare import Experiment
from upgd.experiments.results import Results, Table
from upgd.experiments.running import run
from upgd.experiments.variants import LABELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS", "Show", "demo"]

#: Every method at the best setting of its own short grid, found on other seeds (``docs/experiments.md`` has the commands).
EXPERIMENTS = {
    "Digits whose labels are dealt anew every 500 steps": Experiment(
        "output-permuted-digits",
        {
            "upgd": {"lr": 0.1, "beta_utility": 0.9, "sigma": 0.001},
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
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2.5rem auto; padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin-bottom: .3rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } p { max-width: 46rem }
img { width: 100%; margin: 1.2rem 0 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { text-align: right; padding: .35rem .5rem; border-bottom: 1px solid #e6e6e6 }
th { color: #666; font-weight: 600 } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
td:nth-child(2) { white-space: normal; min-width: 9rem }
footer { margin-top: 2.5rem; color: #777; font-size: .87rem } code { background: #f3f3f3; padding: .1rem .3rem }
"""


class Show:
    """What the demonstration made: results for each title, the files, and the table in words."""

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
        folder: where the page, the picture and the store go; made if it is not there.
        progress: whether to show how far it is.
        experiments: others than :data:`EXPERIMENTS`, by title.
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
        page.write(_page(show, picture.getvalue()))
    return show


def _figure(results: dict[str, Results]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4 * len(results), 4.6), layout="constrained")
    for panel, (title, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        figures.curves(result.comparisons()[0], ax=panel, title=title, points=20)
    return figure


def _page(show: Show, picture: bytes) -> str:
    tables = "".join(
        f'<h2>{html.escape(title)}</h2><div class="scroll">{results.table()._repr_html_()}</div>'
        for title, results in show.results.items()
    )
    image = base64.b64encode(picture).decode()
    first, last = _outer_accuracies(list(show.results.values()))
    store = html.escape(str(show.page.with_name("upgd.db")))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>upgd: learning from streams that never stop changing</title><style>{_STYLE}</style></head><body>
<h1>Learning from streams that never stop changing</h1>
<p>Every learner sees one sample at a time, predicts, is judged, and learns; then the problem changes, again and again.
{first} {last}</p>
<img alt="Online curves of five methods on two changing problems" src="data:image/png;base64,{image}">
{tables}
<footer>Predictions are judged before the update. Each method has the best setting of its own short grid, chosen on
other seeds. “To the best” and p: paired over seeds.
The results are beside this page: <code>upgd table --store {store}</code></footer>
</body></html>
"""


def _outer_accuracies(results: Sequence[Results]) -> tuple[str, str]:
    """Two sentences about the first problem, if it has the methods to compare."""
    lines = {line["method"]: line for line in results[0].table().lines}
    others = [line for method, line in lines.items() if method != "upgd" and line["last_quarter"] is not None]
    if "upgd" not in lines or lines["upgd"]["last_quarter"] is None or not others:
        return "", ""
    ours, best = lines["upgd"], max(others, key=lambda line: line["last_quarter"])
    return (
        f"On the digits UPGD goes from {ours['first_quarter']:.0%} in the first quarter of the stream to "
        f"{ours['last_quarter']:.0%} in the last: what it keeps from one task makes the next easier.",
        f"The best of the others, {html.escape(LABELS.get(best['method'], best['method']))}, ends at "
        f"{best['last_quarter']:.0%}.",
    )
