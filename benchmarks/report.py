"""Time to write and draw the report about 2,000 learners.

Synthetic results of three problems, six methods and their grids: curves of 200 windows, and diagnostics of the best settings.
Every round starts a fresh browser on one core. A page is at rest when all visible charts are drawn; others are drawn as they
come near. ``python -m benchmarks report``.
"""

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from upgd.experiments import Experiment
from upgd.population import Learner
from upgd.report import write
from upgd.store import Key, Record, Store

STEPS, WINDOWS, LOOKS, ROUNDS = 1_000_000, 200, 40, 5
PROBLEMS = {"input-permuted-mnist": 0.80, "output-permuted-emnist": 0.72, "toy-changing-outputs": None}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "upgd": {"beta_utility": [0.999, 0.9999], "sigma": [0.01, 0.1, 1.0], "weight_decay": [0.0, 0.001, 0.01]},
    "upgd-nonprotecting": {"beta_utility": [0.9, 0.999], "sigma": [0.01, 0.1, 1.0], "weight_decay": [0.0, 0.001, 0.01]},
    "shrink-and-perturb": {"sigma": [0.01, 0.1, 1.0], "weight_decay": [0.0001, 0.001, 0.01]},
    "adamw": {"betas": [(b1, b2) for b1 in (0.0, 0.9) for b2 in (0.99, 0.999)], "weight_decay": [0.0, 0.001, 0.01]},
    "pgd": {"sigma": [0.01, 0.1, 1.0]},
    "sgdw": {"weight_decay": [0.001, 0.01, 0.1]},
}
RATES = [0.01, 0.001, 0.0001]
#: One setting of each method is the best and has more seeds.
BEST = {"lr": 0.001, "sigma": 0.1, "weight_decay": 0.001}

BROWSER = "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
#: Records the time at which the visible charts are drawn.
READY = """new MutationObserver(() => {
    if (document.body?.dataset.drawn === "yes") window.ready ??= performance.now();
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-drawn"] });"""
HEAD = """\
| of {rounds} rounds | first chart, clock | at rest, clock | at rest, processor | all other charts, processor |
|---|---|---|---|---|"""


def records() -> Iterator[Record]:
    """Yield synthetic results, as from a sweep and twenty seeds of the best settings."""
    for problem, level in PROBLEMS.items():
        for i, (method, grid) in enumerate(METHODS.items()):
            first = {name: values[0] for name, values in grid.items()}
            chosen = first | {name: value for name, value in BEST.items() if name in grid or name == "lr"}
            sweep = Experiment(problem, {method: {"lr": RATES, **grid}}, seeds=3, steps=STEPS)
            more = Experiment(problem, {method: chosen}, seeds=20, steps=STEPS)
            for learner in dict.fromkeys((*sweep.learners(), *more.learners())):
                yield made_up(learner, sweep, level, rank=i, looked_at=learner in more.learners())


def made_up(learner: Learner, of: Experiment, level: float | None, rank: int, looked_at: bool) -> Record:
    """Return a learner whose curve is better the closer its settings are to the best."""
    drawn = np.random.default_rng([learner.seed, rank, round(1e6 * learner.lr)])
    settings = learner.settings()
    away = sum(abs(np.log10((settings.get(name) or 1e-5) / value)) for name, value in BEST.items() if name in settings)
    rise = 1 - np.exp(-np.linspace(0.02, 4, WINDOWS))
    curve = (level or 0.8) * (1 - 0.04 * rank - 0.05 * away) * rise + 0.01 * drawn.standard_normal(WINDOWS)
    diverged_at = int(drawn.integers(1, STEPS)) if learner.lr == 0.01 and settings.get("sigma") == 1.0 else None
    if diverged_at is not None:
        curve[diverged_at * WINDOWS // STEPS :] = np.nan
    return Record(
        Key(
            problem=of.problem,
            network=of.network,
            method=learner.method,
            settings=settings,
            seed=learner.seed,
            steps=STEPS,
        ),
        window=STEPS // WINDOWS,
        loss=1.01 - curve,
        accuracy=None if level is None else curve,
        diverged_at=diverged_at,
        seconds=30.0,
        diagnostics=looks(drawn) if looked_at else None,
    )


def looks(drawn: np.random.Generator) -> dict[str, list[Any]]:
    """Return diagnostics of a learner: numbers for the whole network and for each layer, and a histogram of the gates."""
    places = ["", *(f"/layers.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias"))]
    names = [
        f"{figure}{place}" for figure in ("weight_l1", "weight_l2", "gradient_l1", "gradient_l2") for place in places
    ]
    names += ["sample_plasticity", *(f"{what}/layers.{i}" for what in ("dormant_share", "zero_share") for i in (1, 3))]
    figures = {name: drawn.random(LOOKS).cumsum().round(5).tolist() for name in names}
    gates = {f"gate_histogram{place}": drawn.dirichlet(np.ones(10), LOOKS).round(5).tolist() for place in places[1:]}
    return {"step": [STEPS // LOOKS * (i + 1) for i in range(LOOKS)], **figures, **gates}


def made(store: Path, page: Path) -> float:
    """Return the processor seconds for reading the store and writing the page."""
    begin = time.process_time()
    write(store, page)
    return time.process_time() - begin


def drawn(page: Path) -> list[float]:
    """Return wall-clock and processor times of the page in a fresh browser, in seconds; see :data:`HEAD`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=BROWSER, args=FLAGS) as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        cdp = tab.context.new_cdp_session(tab)
        cdp.send("Performance.enable")

        def processor_time() -> float:
            metrics = cdp.send("Performance.getMetrics")["metrics"]
            return next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime")

        tab.add_init_script(READY)
        tab.wait_for_timeout(1500)  # exclude the browser's start
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-drawn=yes]")
        opened = processor_time()
        first, rest = tab.evaluate("[performance.getEntriesByName('upgd: chart')[0].startTime, window.ready]")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws all charts
        return [first / 1000, rest / 1000, opened, processor_time() - opened]


def main() -> None:
    if not Path(BROWSER).exists() or importlib.util.find_spec("playwright") is None:
        print("Skipped: requires a browser (apt-get install chromium) and playwright (pip install playwright).")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.db"
        with Store.write(path) as store:
            learners = store.add(records())
        page = Path(folder) / "report.html"
        making = min(made(path, page) for _ in range(ROUNDS))
        size = page.stat().st_size / 1e6
        print(f"{learners:,} learners; a page of {size:.2f} MB, written in {making:.2f} s of processor time\n")
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # the browser inherits it
        try:
            rounds = [drawn(page) for _ in range(ROUNDS)]
        finally:
            os.sched_setaffinity(0, cores)
    print(HEAD.format(rounds=ROUNDS))
    for name, choose in (("best", min), ("median", statistics.median)):
        print(f"| {name} | " + " | ".join(f"{choose(times):.2f} s" for times in zip(*rounds, strict=True)) + " |")


if __name__ == "__main__":
    main()
