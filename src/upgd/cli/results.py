"""`upgd best`, `upgd table`, `upgd export`, `upgd import`, `upgd runs`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from upgd.cli.options import DEFAULTS, Json, Shown, Steps, StorePath, UsageError, read_seeds, store_files, store_path

if TYPE_CHECKING:
    from upgd.experiments import Results
    from upgd.experiments.analysis.compare import Best, Comparison
    from upgd.store import Record

__all__ = ["Filter", "best", "export", "import_", "runs", "table"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which results to use.

    Parameters
    ----------
    problem
        Use only the results of this problem.
    methods
        Use only these methods, separated by commas.
    network
        Use only the results of this network.
    steps
        Use only the results with this number of steps.
    seeds
        Use only the first N seeds (3), or a list (0,5,7).
    store
        The file of results. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    """

    problem: str | None = None
    methods: str | None = None
    network: str | None = None
    steps: Steps = None
    seeds: str | None = None
    store: StorePath = None

    def records(self, stores: Sequence[Path] = ()) -> "Sequence[Record]":
        """Return the matching records of the store, or of the stores given to the command."""
        from upgd.experiments.analysis.stores import open as open_stores

        seeds = None if self.seeds is None else read_seeds(self.seeds)
        paths = store_files(stores, self.store)
        return open_stores(
            *paths,
            problem=self.problem,
            methods=None if self.methods is None else _methods(self.methods, paths),
            network=self.network,
            steps=self.steps,
            seeds=range(seeds) if isinstance(seeds, int) else seeds,
        ).records

    def results(self, stores: Sequence[Path] = ()) -> "Results":
        """Return the matching results, or raise ValueError if there are none."""
        from upgd.experiments import Results

        records = self.records(stores)
        if not records:
            raise self.nothing_found(stores)
        return Results(records)

    def nothing_found(self, stores: Sequence[Path] = ()) -> ValueError:
        """Return the error that there are no matching results."""
        paths = store_files(stores, self.store)
        names, verb = " and ".join(map(str, paths)), "has" if len(paths) == 1 else "have"
        if self == Filter(store=self.store):
            return ValueError(f"{names} {verb} no results yet; run `upgd run` or `upgd sweep` first")
        return ValueError(f"{names} {verb} no matching results; `upgd runs` lists all")


def _methods(text: str, stores: Sequence[Path]) -> list[str]:
    """Parse a comma-separated list of methods; methods that no longer exist are accepted if a store has results of them."""
    from upgd.experiments.analysis.stores import open as open_stores
    from upgd.methods import METHODS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METHODS]:
        there = {record.key.method for record in open_stores(*stores, methods=unknown).records}
        unknown = [name for name in unknown if name not in there]
    if unknown:
        raise ValueError(
            f"--methods {text}: there is no method {' and no method '.join(map(repr, unknown))}; choose from "
            f"{', '.join(METHODS)}"
        )
    return names


def best(*stores: Path, which: Filter = Filter(), metric: Shown = None, as_json: Json = False) -> None:  # noqa: B008
    """Show the best setting of each method, by the area under its online curve, and the flatness of the optimum.

    Each variant of a method (--granularity, --scaling, --order, --noise) has its own best setting. Settings are sorted by
    number of diverged learners, then by score; ties are broken by the smaller lr.

    Parameters
    ----------
    stores
        The file of results; the same as --store. Several files are compared.
    metric
        The metric to show. Default: accuracy, or loss for regression. All metrics but accuracy, loss and forgetting require
        --look-every. Settings are always chosen by online accuracy or loss.
    as_json
        Print JSON.
    """
    from upgd.experiments.analysis.layout import terminal_width
    from upgd.experiments.analysis.variants import best_of_variants
    from upgd.experiments.analysis.wording import best_text

    chosen = [(c, one) for c in which.results(stores).comparisons(metric) for one in best_of_variants(c).values()]
    if as_json:
        print(json.dumps([_best_facts(c, b) for c, b in chosen], indent=2))
    else:
        print(best_text(chosen, terminal_width()))


def table(
    *stores: Path,
    which: Filter = Filter(),  # noqa: B008
    all_settings: Annotated[bool, Parameter(name="--all")] = False,
    against: str | None = None,
    pairs: bool = False,
    metric: Shown = None,
    as_json: Json = False,
) -> None:
    """Show means ± standard errors over seeds, the first and last quarter, and a paired test against the best method.

    A setting that was chosen among several is shown on its fresh seeds only, if it has some (see `upgd confirm`). p is
    corrected for the number of tests by Holm's procedure.

    Parameters
    ----------
    stores
        The file of results; the same as --store. Several files are compared.
    all_settings
        Show all settings, not only the best of each method and variant.
    against
        Compare with this method instead of the best one.
    pairs
        Compare every method with every other.
    metric
        The metric to show. Default: accuracy, or loss for regression. All metrics but accuracy, loss and forgetting require
        --look-every. Settings are always chosen by online accuracy or loss.
    as_json
        Print JSON.
    """
    from upgd.experiments.analysis.layout import terminal_width

    if pairs and (all_settings or against):
        raise UsageError(
            f"--pairs compares all methods with one another; remove {'--all' if all_settings else '--against'}"
        )
    results = which.results(stores)
    lines = (
        results.pairs(metric=metric)
        if pairs
        else results.table(all_settings=all_settings, against=against, metric=metric)
    )
    print(json.dumps(list(lines.lines), indent=2) if as_json else lines.text(terminal_width()))


def export(
    file: Path | None = None,
    *,
    which: Filter = Filter(),  # noqa: B008
    format: Literal["csv", "parquet"] | None = None,
    curves: bool = False,
    looks: bool = False,
    portable: bool = False,
    windows: int | None = None,
) -> None:
    """Write results as CSV or Parquet, one row per learner.

    Use --portable to move results to another machine, where `upgd import` adds them to a store.

    Parameters
    ----------
    file
        The output file. Default: CSV on the standard output.
    format
        csv or parquet. Default: determined by the file's suffix.
    curves
        Write one row per window of each learner.
    looks
        Write one row per diagnostics snapshot of each learner, as recorded by --look-every.
    portable
        Write one row per learner with everything but diagnostics, and a checksum, for `upgd import`. The file's name ends in
        .csv.gz, or in .csv for an uncompressed file.
    windows
        Maximum number of windows per curve of a --portable file; neighbours are merged. Default: 200.
    """
    from upgd import writing
    from upgd.experiments.analysis.exports import write_csv, write_parquet
    from upgd.experiments.analysis.wording import plural

    if portable:
        if file is None or not str(file).endswith((".csv", ".csv.gz")) or format == "parquet" or curves or looks:
            raise UsageError("--portable writes one kind of file: upgd export results.csv.gz --portable")
        if windows is not None and windows < 1:
            raise UsageError(f"--windows must be at least 1, not {windows}")
        _write_portable(which.results(), file, windows)
        return
    if windows is not None:
        raise UsageError("--windows applies to --portable files only; remove it, or add --portable")
    chosen = format or _format(file)
    if chosen == "parquet" and file is None:
        raise UsageError("Parquet needs an output file: upgd export results.parquet")
    if curves and looks:
        raise UsageError("--curves and --looks have different rows; remove one of them")
    if file is not None:
        writing.check(file)
    results = which.results()
    if looks and not any(record.diagnostics for record in results.records):
        raise ValueError("these learners have no diagnostics; run them with --look-every 1000, into another store")
    if chosen == "parquet":
        assert file is not None
        write_parquet(results, file, curves=curves, looks=looks)
    elif file is None:
        write_csv(results, sys.stdout, curves=curves, looks=looks)
    else:
        with writing.text(file) as stream:
            write_csv(results, stream, curves=curves, looks=looks)
    if file is not None:
        print(f"{plural(len(results), 'learner')} → {file}", file=sys.stderr)


def _write_portable(results: "Results", file: Path, windows: int | None) -> None:
    from upgd.experiments.analysis.portable import WINDOWS, coarsened, write
    from upgd.experiments.analysis.wording import plural

    write(file, [coarsened(record, windows or WINDOWS) for record in results.records])
    print(f"{plural(len(results), 'learner')} → {file}", file=sys.stderr)


def import_(*files: Path, store: StorePath = None) -> None:
    """Add results from files of `upgd export --portable` or `upgd reproduce` to a store.

    Existing results are not changed. If one of the files is damaged, nothing is added.

    Parameters
    ----------
    files
        The files, such as results.csv.gz.
    store
        The store to add to, created if necessary. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    """
    from upgd.experiments.analysis.portable import read

    if not files:
        raise UsageError("give the files to add: upgd import results.csv.gz")
    _add([(file, read(file)) for file in files], store_path(store))


def _format(file: Path | None) -> Literal["csv", "parquet"]:
    suffix = ".csv" if file is None else file.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise UsageError(f"{file} must end in .csv or .parquet; or use --format csv or --format parquet")
    return "csv" if suffix == ".csv" else "parquet"


runs = App(name="runs", default_parameter=DEFAULTS, help="List, merge and delete learners in the store.")


@runs.default
def list_runs(*, which: Filter = Filter(), as_json: Json = False) -> None:  # noqa: B008
    """List the learners in the store.

    Parameters
    ----------
    as_json
        Print JSON.
    """
    records = which.records()
    if not records and Filter(store=which.store).records():  # rather than that the store is empty
        raise which.nothing_found()
    if as_json:
        print(json.dumps([_run_facts(record) for record in records], indent=2))
        return
    from upgd.experiments.analysis.layout import terminal_width, wrapped
    from upgd.experiments.analysis.wording import plural, settings_text

    width = terminal_width()
    for record in records:
        key, facts = record.key, _run_facts(record)
        diverged = record.diverged_at is not None
        score = f"diverged at step {record.diverged_at:,}" if diverged else f"{facts['metric']} {facts['score']:.4f}"
        options = "".join(f", {name} {value}" for name, value in key.options.items())
        line = (
            f"{record.id:>6}  {key.problem}{options}  {key.network}  {key.method} ({settings_text(key.settings)})  "
            f"seed {key.seed}  {plural(key.steps, 'step')}  {score}  {record.finished[:16].replace('T', ' ')}"
        )
        print(wrapped(line, width, indent=" " * 8, breaks="  "))
    print(f"{plural(len(records), 'learner')} in {store_path(which.store)}", file=sys.stderr)


@runs.command
def merge(*files: Path, store: StorePath = None) -> None:
    """Add the results of other stores, such as those of a sweep that was split among machines by hand.

    Existing results and the other stores are not changed. If one store cannot be read, nothing is added.

    Parameters
    ----------
    files
        The other stores.
    store
        The store to add to, created if necessary. Default: UPGD_STORE if set, otherwise upgd.db in the current folder.
    """
    from upgd.store import Store

    if not files:
        raise UsageError("give the stores to add: upgd runs merge OTHER.db …")
    found = []
    for file in files:
        with Store.read(file) as other:
            found.append((file, other.records()))
    _add(found, store_path(store))


def _add(found: "Sequence[tuple[Path, Sequence[Record]]]", path: Path) -> None:
    """Add the records of each file to a store, and print how many are new."""
    from upgd.experiments.analysis.wording import plural
    from upgd.store import Store

    with Store.write(path) as store:
        for file, records in found:
            print(f"{plural(store.add(records), 'learner')} of {len(records):,} in {file} added to {path}")


@runs.command
def delete(
    *ids: str,
    which: Filter = Filter(),  # noqa: B008
    yes: Annotated[bool, Parameter(name=("--yes", "-y"))] = False,
) -> None:
    """Delete learners permanently: by id (shown by `upgd runs`), or all that match the options.

    Parameters
    ----------
    ids
        The ids, separated by spaces or commas.
    yes
        Do not ask for confirmation.
    """
    from upgd.experiments.analysis.wording import plural
    from upgd.store import Store

    described = which != Filter(store=which.store)
    numbers = [_id(word) for text in ids for word in text.split(",") if word.strip()]
    if bool(ids) == described or (ids and not numbers):
        raise UsageError("give what to delete: ids, or options such as --problem NAME; `upgd runs` lists all")
    path = store_path(which.store)
    there = [record.id for record in which.records() if record.id is not None]
    if missing := [str(number) for number in numbers if number not in there]:
        raise ValueError(f"{path} has no learner {', '.join(missing)}, so nothing was deleted; `upgd runs` lists all")
    chosen = numbers or there
    if not yes and not _confirmed(f"Permanently delete {plural(len(chosen), 'learner')} from {path}? [y/N] "):
        print("Nothing was deleted.")
        return
    with Store.write(path) as store:
        print(f"{plural(store.delete(chosen), 'learner')} deleted from {path}")


def _id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"an id is a whole number, such as 12, not {word!r}; `upgd runs` lists them") from None


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation without a terminal; use --yes to delete")
    return input(question).strip().lower() in ("y", "yes")


def _best_facts(comparison: "Comparison", chosen: "Best") -> dict[str, Any]:
    from upgd.experiments.analysis.wording import finite

    return {
        "problem": comparison.problem,
        "options": dict(comparison.options),
        "network": comparison.network,
        "steps": comparison.steps,
        "method": chosen.entry.method,
        "settings": dict(chosen.entry.settings),
        "metric": comparison.chosen_by,
        "score": finite(chosen.score),
        **_shown(comparison, chosen),
        "seeds": list(chosen.seeds),
        "diverged": chosen.diverged,
        "tried": chosen.tried,
        "left_out": chosen.left_out,
        "diverged_settings": chosen.diverged_settings,
        "within_1_percent": chosen.flat,
        "neighbours": {
            name: [{"value": value, "score": finite(score)} for value, score in near.items()]
            for name, near in chosen.neighbours.items()
        },
        "edges": list(chosen.edges),
        "search_seeds": list(chosen.search_seeds),
        "fresh_seeds": list(chosen.fresh_seeds),
    }


def _shown(comparison: "Comparison", chosen: "Best") -> dict[str, Any]:
    """Return the requested metric, if it differs from the one that chose the settings."""
    from upgd.experiments.analysis.wording import mean_score

    if comparison.metric == comparison.chosen_by:
        return {}
    return {comparison.metric: mean_score(chosen.shown, comparison.metric)}


def _run_facts(record: "Record") -> dict[str, Any]:
    from upgd.experiments.analysis.metrics import area, usual
    from upgd.experiments.analysis.wording import finite

    key, metric = record.key, usual(record)
    return {
        "id": record.id,
        "problem": key.problem,
        "options": dict(key.options),
        "network": key.network,
        "method": key.method,
        "settings": dict(key.settings),
        "seed": key.seed,
        "steps": key.steps,
        "metric": metric,
        "score": finite(area(record, metric)),
        "diverged_at": record.diverged_at,
        "device": record.device,
        "backend": record.backend,
        "seconds": record.seconds,
        "finished": record.finished,
    }
