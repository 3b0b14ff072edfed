"""Confirming what a search has found: the best settings again, on seeds that had no part in choosing them.

The seeds of a search flatter the settings that it chose, and the more settings a method has, the more so. Fresh seeds do not:
their means are unbiased, and so are the tests between methods. Tables show them apart
(:mod:`upgd.experiments.analysis.compare`).
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from upgd.experiments.analysis.compare import OWN_LOOP, Comparison, Entry
from upgd.experiments.analysis.results import Results
from upgd.experiments.analysis.variants import best_of_variants
from upgd.experiments.analysis.wording import plural
from upgd.experiments.execution.running import run
from upgd.experiments.spec import defaults
from upgd.experiments.spec.declare import Experiment, Listed
from upgd.experiments.spec.engine import ENGINE
from upgd.population import METHODS, Learner
from upgd.store import Record, Store

__all__ = ["confirm", "confirmations"]


def confirm(
    store: str | os.PathLike[str],
    *,
    seeds: int | Sequence[int] | None = None,
    problem: str | None = None,
    methods: Collection[str] | None = None,
    network: str | None = None,
    steps: int | None = None,
    **how: Any,
) -> Results:
    """Run the best settings that a store has on fresh seeds, and keep the results in it.

    What the store has already is not computed again; a call that was interrupted goes on where it was.

    Args:
        store: the file of results.
        seeds: how many fresh seeds, or which; by default as many as the paper has.
        problem, methods, network, steps: confirm only these results.
        how: the other arguments of :func:`upgd.experiments.run`: ``workers``, ``device``, ``backend``, ``progress``,
            ``look_every``.

    Returns:
        All results of what was confirmed. Their table shows fresh seeds alone.
    """

    def found() -> list[Record]:
        with Store.read(store if isinstance(store, str) else os.fspath(store)) as opened:
            return opened.records(problem=problem, methods=methods, network=network, steps=steps)

    experiments, _ = confirmations(found(), seeds)
    for experiment in experiments:
        run(experiment, store=store, **how)
    places = {(e.problem, e.network, e.steps) for e in experiments}
    return Results([r for r in found() if (r.key.problem, r.key.network, r.key.steps) in places])


def confirmations(
    records: Iterable[Record], seeds: int | Sequence[int] | None = None
) -> tuple[list[Experiment], list[str]]:
    """What is to be run: every method and variant of a comparison at its best setting, all of them on the same seeds.

    A number of seeds counts from the first one after those of the search, so the same records give the same seeds again,
    also when some of them have been confirmed.

    Args:
        records: the results of a search.
        seeds: how many, or which; by default as many as the paper has.

    Returns:
        An experiment for each comparison in which settings were chosen, and a sentence for each method that is left out.
    """
    results = Results(list(records))
    experiments: list[Experiment] = []
    left_out: list[str] = []
    for comparison in results.comparisons():
        chosen = best_of_variants(comparison)
        search = {seed for best in chosen.values() for seed in best.search_seeds}
        if not search:
            continue
        wanted = _fresh(comparison, search, seeds)
        reasons = {one: _reason_against(best.entry) for one, best in chosen.items()}
        left_out += [f"{one.label} is left out: {reason}" for one, reason in reasons.items() if reason]
        learners = [
            Learner(method=one.method, seed=seed, **best.entry.settings)
            for one, best in chosen.items()
            if not reasons[one]
            for seed in wanted
        ]
        if learners:
            place = (comparison.problem, comparison.network, comparison.steps, comparison.options)
            experiments.append(Listed(*place, learners))
    if not experiments:
        reason = left_out[0] if left_out else "every method has one setting only, and nothing was chosen among several"
        raise ValueError(f"there is nothing to confirm: {reason}; `upgd best` shows what there is")
    return experiments, left_out


def _fresh(comparison: Comparison, search: set[int], seeds: int | Sequence[int] | None) -> list[int]:
    count = defaults.defaults(comparison.problem).seeds if seeds is None else seeds
    if not isinstance(count, int):
        used = sorted(search & set(count))
        if used:
            raise ValueError(
                f"seeds: the settings were chosen on {plural(len(used), 'seed')} of these ({', '.join(map(str, used))}); "
                f"take others, such as {max(search) + 1} and above"
            )
        return list(dict.fromkeys(count))
    if count < 1:
        raise ValueError(f"seeds must be a number of at least 1, or a list of seeds, not {count!r}")
    first = max(search) + 1
    return list(range(first, first + count))


def _reason_against(entry: Entry) -> str:
    """Why an entry cannot be run here; empty if it can."""
    record = next(iter(entry.records.values()))
    if record.backend == OWN_LOOP:
        return "its results were recorded by a loop of your own, which must run the fresh seeds, too"
    if entry.method not in METHODS:
        return f"there is no method {entry.method!r} to run"
    if record.key.engine != ENGINE:
        return f"its results come from version {record.key.engine} of the engine, this one has version {ENGINE}"
    return ""
