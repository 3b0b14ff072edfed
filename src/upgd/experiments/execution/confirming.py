"""Confirm the result of a search: rerun the best settings on seeds that were not used to choose them.

The seeds of a search favour the settings that were chosen on them, the more so the more settings a method has. Means on fresh
seeds are unbiased, and so are tests between methods. Tables show them separately
(:mod:`upgd.experiments.analysis.compare`).
"""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from upgd import plugins
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
    """Run the best settings in a store on fresh seeds, and add the results to it.

    Results in the store are not computed again; an interrupted call resumes.

    Args:
        store: The file of results.
        seeds: Number of fresh seeds, or a list of seeds. Default: as many as in the paper.
        problem, methods, network, steps: Confirm only these results.
        how: Other arguments of :func:`upgd.experiments.run`: ``workers``, ``device``, ``backend``, ``progress``,
            ``look_every``.

    Returns:
        All results of the confirmed comparisons. Their table shows fresh seeds only.

    Example:
        >>> print(confirm("upgd.db", seeds=20).table())  # doctest: +SKIP
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
    """Return the runs to do: every method and variant of a comparison at its best setting, all on the same seeds.

    A number of seeds counts from the first seed after those of the search, so the same records always give the same seeds,
    even if some of them have been confirmed.

    Args:
        records: the results of a search.
        seeds: number of seeds, or a list of seeds. Default: as many as in the paper.

    Returns:
        An experiment for each comparison in which settings were chosen, and a sentence for each skipped method.
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
        left_out += [f"{one.label} is skipped: {reason}" for one, reason in reasons.items() if reason]
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
        reason = left_out[0] if left_out else "every method has only one setting, so nothing was chosen"
        raise ValueError(f"there is nothing to confirm: {reason}; see `upgd best`")
    return experiments, left_out


def _fresh(comparison: Comparison, search: set[int], seeds: int | Sequence[int] | None) -> list[int]:
    count = defaults.defaults(comparison.problem).seeds if seeds is None else seeds
    if not isinstance(count, int):
        used = sorted(search & set(count))
        if used:
            raise ValueError(
                f"seeds: the settings were chosen on {plural(len(used), 'seed')} of these ({', '.join(map(str, used))}); "
                f"use others, such as {max(search) + 1} and above"
            )
        return list(dict.fromkeys(count))
    if count < 1:
        raise ValueError(f"seeds must be a number of at least 1, or a list of seeds, not {count!r}")
    first = max(search) + 1
    return list(range(first, first + count))


def _reason_against(entry: Entry) -> str:
    """Return why an entry cannot be run here; an empty string if it can."""
    record = next(iter(entry.records.values()))
    if record.backend == OWN_LOOP:
        return "its results were recorded by your own loop, which must also run the fresh seeds"
    if entry.method not in METHODS:
        return f"there is no method {entry.method!r}; {plugins.REMEDY}"
    if record.key.engine != ENGINE:
        return f"its results are from version {record.key.engine} of the engine, but this is version {ENGINE}"
    return ""
