"""Compute and draw the figures of the landing page: ``python docs/figures.py``.

The runs are kept in ``story.db`` in the current folder, so that a second call only draws. They take about ten minutes on two
cores.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import nn

import upgd
import upgd.experiments as ex
from upgd.streams import iterate, make

IMAGES = Path(__file__).parent / "images"
GREY, COLOURS = "#7f868d", {"sgd": "#d55e00", "adamw": "#cc79a7", "shrink-and-perturb": "#009e73", "upgd": "#0072b2"}
LABELS = {"sgd": "SGD", "adamw": "AdamW", "shrink-and-perturb": "Shrink & Perturb", "upgd": "UPGD"}
STREAM = {"network": "100-50", "options": {"task_length": 500}, "steps": 100_000}
STYLE = {
    "figure.figsize": (7, 3.2),
    "font.size": 11,
    "svg.hashsalt": "upgd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], GREY),
}


def lost() -> None:
    """SGD and AdamW with usual learning rates: accuracy in each task."""
    methods = {"sgd": {"lr": 0.01}, "adamw": {"lr": 0.001}}
    results = ex.run("output-permuted-digits", methods, seeds=5, store="story-lost.db", **STREAM)
    ax = _axes()
    for method in methods:
        _curve(ax, method, [record.accuracy for record in results.select(methods=method).records])
    _save(ax, "lost")


def result() -> None:
    """Draw every method at its best setting, on seeds that were not used to choose it."""
    ex.run("output-permuted-digits", list(COLOURS), seeds=[100], store="story.db", **STREAM)
    confirmed = ex.confirm("story.db", seeds=5)
    print(confirmed.table())
    ax = _axes()
    for best in confirmed.best():
        _curve(ax, best.entry.method, [record.accuracy for record in best.shown.records.values()])
    _save(ax, "result")


def gate() -> None:
    """The share of a step that a gate lets through, and where the weights of a trained network lie."""
    torch.manual_seed(0)
    sizes = nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)
    model = nn.Sequential(nn.Flatten(), *sizes)
    optimizer = upgd.UPGD(model.parameters(), lr=0.05, sigma=0.01, beta_utility=0.9)
    for x, y in iterate(make("output-permuted-digits", task_length=500), seed=0, steps=5_000):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    gates = torch.cat([gate.flatten() for gate in optimizer.gates().values()])
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(layout="constrained")
    x = np.linspace(-1, 1, 201)
    ax.plot(x, 1 / (1 + np.exp(x)), color=COLOURS["upgd"], lw=2.5)
    ax.set(xlabel="utility of a weight, relative to the largest", ylabel="share of the step that is taken", ylim=(0, 1))
    ax.annotate("useless: learns and is perturbed", (-0.98, 0.8), color=COLOURS["upgd"])
    ax.annotate("useful: protected", (0.98, 0.42), color=COLOURS["upgd"], ha="right")
    count = ax.twinx()
    count.hist(torch.logit(gates).numpy(), bins=40, range=(-1, 1), color=GREY, alpha=0.35)
    count.set(yscale="log", ylabel=f"weights (of {len(gates):,})")
    count.spines["right"].set_visible(True)
    _save(ax, "gate")


def _axes() -> "matplotlib.axes.Axes":
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(layout="constrained")
    ax.set(xlabel="task (500 digits each)", ylabel="online accuracy", ylim=(0, 1), xlim=(0, 200))
    ax.axhline(0.1, color=GREY, lw=0.8, ls=":")
    ax.annotate("chance", (2, 0.12), fontsize=9)
    return ax


def _curve(ax: "matplotlib.axes.Axes", method: str, curves: Sequence[Sequence[float]]) -> None:
    """The mean over seeds and its 95% confidence interval, for every five tasks."""
    values = np.asarray(curves)
    values = values.reshape(len(values), 40, -1).mean(-1)
    tasks = (np.arange(40) + 0.5) * 5
    mean, error = values.mean(0), 2.776 * values.std(0, ddof=1) / len(values) ** 0.5  # t with four degrees of freedom
    ax.plot(tasks, mean, color=COLOURS[method], lw=2, label=LABELS[method])
    ax.fill_between(tasks, mean - error, mean + error, color=COLOURS[method], alpha=0.2, lw=0)
    ax.annotate(
        LABELS[method], (200, mean[-1]), xytext=(5, 0), textcoords="offset points", color=COLOURS[method], va="center"
    )


def _save(ax: "matplotlib.axes.Axes", name: str) -> None:
    ax.figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    gate()
    lost()
    result()
