"""`upgd run`, `upgd sweep`, `upgd bench`."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from upgd.cli.executing import check, check_folder, given_options, option_names, options_of, terminable
from upgd.cli.options import Declaration, Execution, Json, MethodName, MethodNames, UsageError, load_torch, store_path

if TYPE_CHECKING:
    from upgd.experiments import Experiment, Results

__all__ = ["bench", "computed", "estimate_text", "estimated", "run", "sweep"]

_INTERVAL_S = 10.0  #: between two reports of progress


def run(
    problem: str,
    *,
    method: MethodName = None,
    setting: Literal["published"] | None = None,
    declaration: Declaration = Declaration(),  # noqa: B008  # frozen
    execution: Execution = Execution(),  # noqa: B008
    dry_run: bool = False,
    as_json: Json = False,
) -> int:
    """Run one method with the given settings and print its results.

    Runs that are already in the store are skipped, and interrupted runs continue.

    Example:

        upgd run output-permuted-digits --method upgd --lr 0.03 --beta-utility 0.9 --seeds 20 --option task_length=500

    Two problems compare approximations of utility; they take no method and write a figure to the current folder:

        upgd run utility-quality-weights

    Parameters
    ----------
    problem
        Name of the problem; `upgd problems` lists them and their options.
    setting
        published: the method's published setting for this problem; options override single values.
    dry_run
        Only print what would be run and an estimate of the time.
    as_json
        Print JSON; at the time limit of --stop-after, a list of what is finished, which may be empty.
    """
    load_torch()
    from upgd.experiments import Experiment
    from upgd.streams import registry

    if problem.endswith(".toml"):
        raise UsageError(
            f"`upgd run` takes a problem and one method; a declared experiment is run by `upgd sweep {problem}`"
        )
    if problem in _STUDIES:
        if dry_run:
            raise UsageError(f"{problem} takes a few minutes and has no --dry-run")
        return _study(problem, method, declaration, execution, as_json)
    registry.factory(problem)  # reports an unknown problem before anything that depends on it
    if method is None:
        raise UsageError("choose a method, such as --method upgd; `upgd methods` lists them")
    if "," in method:
        raise UsageError(f"`upgd run` takes one method, not {method!r}; `upgd sweep` takes several with --methods")
    settings: dict[str, Any] = declaration.settings()
    if setting is not None:
        from upgd.experiments.paper.best_known import published

        settings = published(problem, method) | settings
    experiment = Experiment(problem, {method: settings}, **declaration.rest())
    return _dry_run(experiment, execution, as_json) if dry_run else _execute(experiment, execution, as_json)


def sweep(
    problem: str,
    *,
    methods: MethodNames = None,
    grid: Literal["short", "paper", "published"] | None = None,
    declaration: Declaration = Declaration(),  # noqa: B008
    execution: Execution = Execution(),  # noqa: B008
    dry_run: bool = False,
    as_json: Json = False,
) -> int:
    """Run methods with all combinations of the given values, and print the best of each.

    Without values, each method uses its own short grid. Values given by options apply to every method that has the setting.
    Runs that are already in the store are skipped, and interrupted runs continue.

    Examples:

        upgd sweep output-permuted-digits --methods sgd,adamw,upgd --seeds 5

        upgd sweep input-permuted-mnist --methods upgd,sgdw,adamw --grid paper --seeds 3

        upgd sweep output-permuted-digits --methods sgd,upgd --lr 0.1,0.03,0.01 --dry-run

        upgd sweep my-experiment.toml

    Parameters
    ----------
    problem
        Name of the problem (`upgd problems` lists them), or a TOML file that declares an experiment.
    grid
        short: each method's own short grid, the default if no values are given. paper: the paper's values. published: each
        method's published setting for this problem. Options override parts of the grid. Without a grid, other settings keep
        their defaults.
    dry_run
        Only print what would be run and an estimate of the time.
    as_json
        Print JSON; at the time limit of --stop-after, a list of what is finished, which may be empty.
    """
    load_torch()
    experiment = _declared(problem, methods, grid, declaration)
    return _dry_run(experiment, execution, as_json) if dry_run else _execute(experiment, execution, as_json)


def bench(*, device: str = "auto", as_json: Json = False) -> None:
    """Benchmark this machine: learner-steps per second of methods on the paper's networks.

    Parameters
    ----------
    device
        auto, cpu, cuda, cuda:1 …
    as_json
        Print JSON.
    """
    load_torch()
    from upgd.experiments.execution.bench import measure

    lines = []
    for line in measure(device):
        lines.append(line)
        if not as_json:
            print(
                f"{line['network']:<46}{line['method']:<8}{line['learners']:>4} learners"
                f"{line['learner_steps_per_second']:>12,.0f} learner-steps/s   ({line['backend']}, {line['device']})",
                flush=True,
            )
    if as_json:
        print(json.dumps(lines, indent=2))


#: Problems that compare approximations of utility instead of methods.
_STUDIES: dict[str, Literal["weight", "feature"]] = {
    "utility-quality-weights": "weight",
    "utility-quality-features": "feature",
}


def _refuse_study(problem: str) -> None:
    """Reject a study of utilities as a problem to compare methods on."""
    if problem in _STUDIES:
        raise UsageError(
            f"{problem} compares approximations of utility and not methods; use `upgd run {problem}`, without a method"
        )


def _study(problem: str, method: str | None, declaration: Declaration, execution: Execution, as_json: bool) -> int:
    """Measure the rank correlations of approximate utilities; print them and save the figure."""
    from upgd import writing
    from upgd.experiments.analysis import figures
    from upgd.experiments.paper.utility_quality import run as measure

    given = {**declaration.settings(), **declaration.rest()}
    extra = given.keys() - {"seeds", "steps", "options"} | given_options(execution)
    extra |= {name for name, value in (("method", method), ("option", declaration.option)) if value}
    if extra:
        raise UsageError(f"{problem} takes --seeds and --steps only; leave out {option_names(extra)}")
    if not as_json:
        figures.check()
        check_folder(Path(), f"this folder, {Path.cwd()}")
    seeds = given.get("seeds", 20)
    result = measure(
        _STUDIES[problem],
        seeds=range(seeds) if isinstance(seeds, int) else seeds,
        steps=given.get("steps", 2_000),
        progress=None if execution.quiet else _say_now_and_then(),
    )
    if as_json:
        print(json.dumps(result.summary(), indent=2))
        return 0
    print("Rank correlation with the true utility, mean ± standard error over seeds:\n")
    print(result.table())
    figure = Path(f"{problem}.png")
    with writing.output(figure) as file:
        result.plot().savefig(file, format="png")
    print(f"\nThe curves are in {figure}.")
    return 0


def _say_now_and_then() -> Callable[[int, int], None]:
    """Return a function that reports progress on standard error at regular intervals."""
    from upgd.experiments.execution.progress import duration

    began = said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _INTERVAL_S:
            said = now
            left = (now - began) * (total - done) / done
            print(f"{done / total:4.0%}, about {duration(left)} left", file=sys.stderr, flush=True)

    return tell


def _declared(
    problem: str, methods: str | None, grid: Literal["short", "paper", "published"] | None, declaration: Declaration
) -> "Experiment":
    from upgd.experiments import Experiment, load
    from upgd.streams import registry

    settings, rest = declaration.settings(), declaration.rest()
    if problem.endswith(".toml"):
        given = (
            {name for name, value in (("methods", methods), ("grid", grid)) if value} | settings.keys() | rest.keys()
        )
        if given:
            raise UsageError(f"{problem} declares the whole experiment; leave out {option_names(given)}")
        experiment = load(problem)
        _refuse_study(experiment.problem)
        return experiment
    _refuse_study(problem)
    registry.factory(problem)
    if not methods:
        raise UsageError("choose the methods to compare, such as --methods upgd,sgdw,adamw; `upgd methods` lists them")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if grid is None:
        return Experiment(problem, names, grid=settings or None, **rest)
    from upgd.experiments.paper.best_known import published
    from upgd.experiments.spec.declare import check_shared, which_it_has

    check_shared(settings, names)
    chosen = {name: which_it_has(name, settings) for name in names}
    if grid == "published":
        return Experiment(problem, {name: published(problem, name) | own for name, own in chosen.items()}, **rest)
    return Experiment(problem, chosen, grid=grid, **rest)


def _execute(experiment: "Experiment", execution: Execution, as_json: bool) -> int:
    results = computed([experiment], execution)
    if not isinstance(results, int):
        _print(results[0], as_json)
        return 0
    if as_json and results == 0:  # at the time limit: scripts expect JSON with this status
        _print(_finished(experiment, store_path(execution.store)), as_json)
    return results


def _finished(experiment: "Experiment", path: Path) -> "Results":
    """Return the results of an experiment that are in a store."""
    from upgd.experiments import Results
    from upgd.experiments.execution.jobs import whole
    from upgd.store import Store

    with Store.read(path) as store:
        return Results(store.records(problem=experiment.problem, digests=whole(experiment).digests))


def computed(experiments: "Iterable[Experiment]", execution: Execution) -> "list[Results] | int":
    """Return the results of experiments, computing what the store lacks; or the exit status if that was stopped."""
    from upgd.experiments.analysis.wording import plural
    from upgd.experiments.execution.running import Runner, TimeUp

    options = options_of(execution)
    runner = Runner(options, progress=not execution.quiet)
    with terminable():
        try:
            with runner:
                return [runner(experiment) for experiment in experiments]
        except KeyboardInterrupt as stop:
            added = f"{plural(runner.added, 'learner')} added to {options.store}, and " if runner.added else ""
            print(f"upgd: stopped; {added}unfinished runs are saved; repeat the command to continue", file=sys.stderr)
            return 0 if isinstance(stop, TimeUp) else 130


def _dry_run(experiment: "Experiment", execution: Execution, as_json: bool) -> int:
    facts = estimated(experiment, execution)
    print(json.dumps(facts, indent=2) if as_json else estimate_text(facts, store_path(execution.store)))
    return 0


def estimated(experiment: "Experiment", execution: Execution) -> dict[str, Any]:
    """Return what an experiment has to compute and an estimate of the time, without computing it."""
    from upgd.experiments.execution.estimate import estimate
    from upgd.experiments.execution.running import pending
    from upgd.experiments.execution.work import device_named
    from upgd.store import Store

    check(execution, dry_run=True)
    path = store_path(execution.store)
    device = device_named(execution.device)
    workers = options_of(execution).workers_for(experiment, device)
    with Store.read(path) if path.exists() else Store.write(":memory:") as store:
        jobs = pending(experiment, store, workers, device)
    return {
        "problem": experiment.problem,
        "options": dict(experiment.options),
        "network": experiment.network,
        "steps": experiment.steps,
        "methods": Counter(learner.method for learner in experiment.learners()),
        "learners": len(experiment.learners()),
        "stored": len(experiment.learners()) - sum(len(job.learners) for job in jobs),
        "jobs": len(jobs),
        "learner_steps": sum(job.learner_steps for job in jobs),
        "workers": min(workers, max(1, len(jobs))),
        "device": device,
        "seconds": estimate(jobs, workers, device, execution.backend),
    }


def estimate_text(facts: dict[str, Any], store: Path) -> str:
    """Return the plan as text."""
    from upgd.experiments.analysis.wording import plural, value_text
    from upgd.experiments.execution.progress import duration

    options = "".join(f", {name} {value_text(value)}" for name, value in facts["options"].items())
    verb = "is" if facts["learners"] == 1 else "are"
    lines = [
        f"{facts['problem']}{options}, network {facts['network']}, {plural(facts['steps'], 'step')}",
        *(
            f"  {method:<20}{count:>6,} {'learner' if count == 1 else 'learners'}"
            for method, count in facts["methods"].items()
        ),
        f"  {facts['stored']:,} of {plural(facts['learners'], 'learner')} {verb} in {store} already",
        f"  to do: {plural(facts['learner_steps'], 'learner-step')} in {plural(facts['jobs'], 'job')} on "
        f"{facts['workers']} × {facts['device']}",
        f"  about {duration(facts['seconds'])}, measured on this machine now",
    ]
    return "\n".join(lines)


def _print(results: "Results", as_json: bool) -> None:
    from upgd.experiments.analysis.layout import terminal_width

    table = results.table()
    print(json.dumps(list(table.lines), indent=2) if as_json else table.text(terminal_width()))
