"""`upgd confirm`."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from upgd.cli.options import Execution, Json, Steps, load_torch, read_seeds, store_files
from upgd.cli.results import Filter
from upgd.cli.running import computed, estimate_text, estimated

__all__ = ["confirm"]


def confirm(
    store_file: Path | None = None,
    /,
    *,
    seeds: str | None = None,
    problem: str | None = None,
    methods: str | None = None,
    network: str | None = None,
    steps: Steps = None,
    execution: Execution = Execution(),  # noqa: B008  # frozen
    dry_run: bool = False,
    as_json: Json = False,
) -> int:
    """Run the best setting of every method on fresh seeds, and compare the methods on these.

    Scores on the seeds of a search are optimistic for the settings that it chose. Fresh seeds follow those of the search
    and are the same for all methods. Runs that are already in the store are skipped, and interrupted runs continue.

    Example:

        upgd sweep output-permuted-digits --methods upgd,sgd,adamw --seeds 3

        upgd confirm --seeds 20

    Parameters
    ----------
    store_file
        The file with the results of the search, as for --store.
    seeds
        Number of fresh seeds (20), or a list (100,101). Default: 20, or 10 on CIFAR-10, as in the paper.
    problem
        Use only the results of this problem.
    methods
        Use only these methods, separated by commas.
    network
        Use only the results of this network.
    steps
        Use only the results with this number of steps.
    dry_run
        Only print what would be run and an estimate of the time.
    as_json
        Print JSON; at the time limit of --stop-after, a list of what is finished, which may be empty.
    """
    load_torch()
    from upgd.experiments import Results
    from upgd.experiments.analysis.layout import terminal_width
    from upgd.experiments.execution.confirming import confirmations

    wanted = None if seeds is None else read_seeds(seeds)
    (path,) = store_files([store_file] if store_file else [], execution.store)
    execution = replace(execution, store=path)
    which = Filter(problem=problem, methods=methods, network=network, steps=steps, store=execution.store)
    experiments, left_out = confirmations(which.results().records, wanted)
    for sentence in left_out:
        print(f"upgd: {sentence}", file=sys.stderr)
    if dry_run:
        facts = [estimated(experiment, execution) for experiment in experiments]
        text = "\n\n".join(estimate_text(one, path) for one in facts)
        print(json.dumps(facts, indent=2) if as_json else text)
        return 0
    results = computed(experiments, execution)
    stopped = isinstance(results, int)
    if isinstance(results, int) and not (as_json and results == 0):  # at the time limit, scripts expect JSON
        return results
    places = [(e.problem, dict(e.options), e.network, e.steps) for e in experiments]
    records = [
        record
        for record in which.records()
        if (record.key.problem, dict(record.key.options), record.key.network, record.key.steps) in places
    ]
    table = Results(records).table()
    if stopped:  # without the methods that only have results of the search
        table = replace(table, lines=[line for line in table.lines if line["evaluation"] == "fresh"])
    print(json.dumps(list(table.lines), indent=2) if as_json else table.text(terminal_width()))
    return 0
