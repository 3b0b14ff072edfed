"""Split a long study into pieces: each piece reads the results so far, computes for a limited time, and writes its results.

The results are kept in a folder with one file per problem (:mod:`upgd.experiments.analysis.portable`), small enough for a
repository. A piece does not need the store of an earlier one, so each can run on a new machine.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from upgd.experiments.analysis import portable
from upgd.experiments.analysis.results import Results
from upgd.experiments.execution.running import Options, Runner, TimeUp
from upgd.experiments.paper.plans import Plan
from upgd.experiments.paper.reproduce import Compute, Reproduction, reproduce, stored
from upgd.experiments.spec.declare import Experiment
from upgd.store import Record, Store

__all__ = ["as_shipped", "piece", "save", "shipped", "take_up", "together"]


def piece(
    plan: Plan,
    folder: str | os.PathLike[str],
    options: Options,
    *,
    resume_from: Iterable[str | os.PathLike[str]] = (),
    progress: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Reproduction, bool]:
    """Carry out a plan, or as much of it as the time limit allows.

    Args:
        plan: see :func:`~upgd.experiments.paper.reproduce.plan`.
        folder: the folder with the results of all pieces, created if necessary. They are read first, and written again after
            every stage, when the time limit is reached, and on Ctrl-C.
        options: how to compute, for example ``Options(store=Path("upgd.db"), device="cuda", stop_after=500, job_size=256)``.
        resume_from: other folders whose results are reused.
        progress: whether to show progress.
        say: called with a description of the next stage.

    Returns:
        The results, and whether they are complete.
    """
    with Runner(options, progress=progress) as runner:
        there = take_up([*resume_from, folder], plan.problems())
        if there:
            say(f"read {len(there):,} learners, {runner.store.add(there):,} of them new")
        rounded = as_shipped(plan, runner)

        def compute(experiment: Experiment) -> Results:
            before, results = runner.added, rounded(experiment)
            if runner.added > before:  # at once, since the machine may be taken away
                _merge(results.records, folder)
            return results

        finished = True
        try:
            found = reproduce(plan, compute, say)
        except KeyboardInterrupt as stop:
            found, finished = reproduce(plan, as_shipped(plan, stored(runner.store))), False
            if not isinstance(stop, TimeUp):
                save(found, folder)
                raise
        save(found, folder)
    return found, finished


def take_up(folders: Iterable[str | os.PathLike[str]], problems: Sequence[str]) -> list[Record]:
    """Return the results of these problems in folders; of duplicate learners, those with the longest curves.

    Raises:
        ValueError: a file is damaged.
    """
    found: dict[str, Record] = {}
    for folder in folders:
        for problem in problems:
            path = Path(folder) / f"{problem}.csv.gz"
            for record in portable.read(path) if path.exists() else ():
                there = found.get(record.key.digest)
                if there is None or len(there.loss) < len(record.loss):
                    found[record.key.digest] = record
    return list(found.values())


def as_shipped(plan: Plan, compute: Compute) -> Compute:
    """Return ``compute`` with its results rounded as in the files, so that the files alone give the same choices and numbers.

    Runs of the search are reduced to means over quarters, all others to the curves of the figures.
    """
    searched = range(plan.sweep_seeds)

    def rounded(experiment: Experiment) -> Results:
        return Results(
            [
                portable.coarsened(one, portable.SUMMARY if one.key.seed in searched else portable.WINDOWS)
                for one in compute(experiment).records
            ]
        )

    return rounded


def save(found: Reproduction, folder: str | os.PathLike[str]) -> None:
    """Add the results of a reproduction to the files in a folder, one per problem."""
    _merge(found.records, folder)


def _merge(records: Iterable[Record], folder: str | os.PathLike[str]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    by_problem: dict[str, list[Record]] = {}
    for record in records:
        by_problem.setdefault(record.key.problem, []).append(record)
    for problem, own in by_problem.items():
        portable.merge(folder / f"{problem}.csv.gz", own)


def together(plan: Plan, store: Path, folders: Iterable[str | os.PathLike[str]]) -> Store:
    """Return a store in memory with the results of a plan's problems from a store, if it exists, and from folders."""
    both = Store.write(":memory:")
    if store.exists():
        with Store.read(store) as opened:
            both.add(record for problem in plan.problems() for record in opened.records(problem=problem))
    both.add(take_up(folders, plan.problems()))
    return both


def shipped(plan: Plan, folder: str | os.PathLike[str]) -> Reproduction:
    """Return the results of a plan in the files of a folder, as shown on its page."""
    with Store.write(":memory:") as store:
        store.add(take_up([folder], plan.problems()))
        return reproduce(plan, as_shipped(plan, stored(store)))
