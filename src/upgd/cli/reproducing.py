"""`upgd reproduce`."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from upgd.cli import remaining
from upgd.cli.executing import check, check_folder, given_options, option_names, options_of, terminable
from upgd.cli.options import (
    Execution,
    Json,
    Steps,
    UsageError,
    load_torch,
    once,
    option_name,
    plain_digits,
    read_steps,
    store_path,
)

if TYPE_CHECKING:
    from upgd.experiments.paper.catalogue import Study
    from upgd.experiments.paper.plans import Plan
    from upgd.experiments.paper.reproduce import Reproduction

__all__ = ["reproduce"]

#: Parsed options that are numbers of steps: option → study → problem → steps, with "" for all other problems.
Lengths = Mapping[str, Mapping[str, Mapping[str, int]]]


def reproduce(
    *names: str,
    scale: Literal["paper", "small", "smoke"] = "paper",
    panels: str | None = None,
    methods: str | None = None,
    grid: Literal["paper", "extended", "star", "climb", "coarse", "tiny"] | None = None,
    only: tuple[str, ...] = (),
    sweep_seeds: int | None = None,
    shortlist: int | None = None,
    shortlist_seeds: int | None = None,
    final_seeds: int | None = None,
    steps: Steps = None,
    sweep_steps: tuple[str, ...] = (),
    screen: tuple[str, ...] = (),
    keep: float | None = None,
    data: tuple[str, ...] = (),
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("reproduced"),
    resume_from: tuple[Path, ...] = (),
    dry_run: bool = False,
    as_json: Json = False,
    write_only: bool = False,
    execution: Execution = Execution(),  # noqa: B008  # frozen
) -> int:
    """Reproduce experiments of the paper: search, best setting of each method, final runs, figure and table.

    Without a name, lists the experiments. Runs that are in the store, or in the folder data next to the pages, are skipped,
    and interrupted runs continue.

    Examples:

        upgd reproduce all --scale small

        upgd reproduce input-permuted-mnist --panels weight-global --grid star --final-seeds 10

        upgd reproduce ablation --sweep-steps 500000 --sweep-steps output-permuted-cifar10=300000

    Parameters
    ----------
    names
        The experiments' names, or all.
    scale
        paper: full length and seeds; small: two cores, minutes; smoke: seconds, on embedded data.
    panels
        Run only these panels of the figure, separated by commas.
    methods
        Run only these methods, separated by commas.
    grid
        paper: all combinations of the paper's values; extended: also the values between them and those of the best known
        settings, showing the best within the paper's grid and the best overall; star: the best known setting, and all that
        differ from it in one hyperparameter; climb: repeated stars around the best setting until none is better; coarse:
        a handful; tiny: two learning rates.
    only
        Restrict a hyperparameter to these values of the grid, such as sigma=0.1,0.01; can be repeated. Every curve needs
        at least one setting.
    sweep_seeds
        Seeds per setting of the search.
    shortlist
        Number of best settings per method that are rerun on fresh seeds to choose the final one; 0 disables it.
    shortlist_seeds
        Seeds per setting of the shortlist.
    final_seeds
        Seeds per best setting; they are fresh.
    steps
        Number of steps per learner.
    sweep_steps
        Number of steps in the search, if fewer, such as 300000, or output-permuted-cifar10=300000 for one problem; can be
        repeated. The best setting of short runs need not be the best of long ones.
    screen
        With --grid extended: first run the settings outside the paper's grid for only so many steps, such as 250000, or
        output-permuted-cifar10=250000 for one problem; can be repeated. The search then tries the best of them.
    keep
        The fraction of the screened settings of each curve that the search tries, but at least as many as the shortlist
        has. Default: 0.25.
    data
        Replace a data set by another, such as emnist=emnist-subset; can be repeated.
    output
        Folder for pages and figures. Results are written to its subfolder data, one file per problem, and reused from
        there.
    resume_from
        Another folder with such files to reuse; can be repeated.
    dry_run
        Only print what is computed and what remains, by panel, and an estimate of the time.
    as_json
        With --dry-run, or to list the experiments: print JSON.
    write_only
        Only write the pages from the results in the store.
    """
    of_sweeps = {  # arguments of plan
        "panels": panels,
        "methods": methods,
        "grid": grid,
        "sweep_seeds": sweep_seeds,
        "sweep_steps": sweep_steps,
        "screen": screen,
        "keep": keep,
        "shortlist": shortlist,
        "shortlist_seeds": shortlist_seeds,
        "final_seeds": final_seeds,
        "steps": steps,
        "only": only,
        "data": data,
    }
    given = {name for name, value in of_sweeps.items() if value not in (None, ())} | given_options(execution)
    if not names:
        others = (scale != "paper", output != Path("reproduced"), resume_from, dry_run, write_only)
        if given or any(others):
            raise UsageError("name the experiments to reproduce, or all; `upgd reproduce` without arguments lists them")
        return _list(as_json)
    load_torch()

    from upgd.experiments.analysis import figures
    from upgd.experiments.paper.catalogue import UTILITY_QUALITY

    check(execution, dry_run=dry_run)
    if as_json and not dry_run:
        raise UsageError("--json applies to --dry-run only; remove it, or add --dry-run")
    studies = _studies(names, given)
    if execution.stop_after is not None:  # it cannot continue in the next piece, so the others would never be reached
        studies.sort(key=lambda study: study.name == UTILITY_QUALITY)
    for folder in resume_from:
        if not any(folder.glob("*.csv.gz")):
            raise UsageError(
                f"--resume-from {folder}: there are no results (*.csv.gz); name the subfolder data of an earlier --output"
            )
    if not dry_run:
        figures.check()
        check_folder(output, f"--output {output}")
    if keep is not None and not screen:
        raise UsageError(f"--keep {keep:g} applies to --screen only; remove it, or add --screen STEPS")
    typed = {"sweep_steps": sweep_steps, "screen": screen}
    lengths = {name: _lengths(name, texts, studies) for name, texts in typed.items()}
    plans = _plans(studies, scale, of_sweeps, lengths)
    folders, began = [*resume_from, output / "data"], time.monotonic()
    if as_json:
        print(json.dumps([remaining.facts(own, execution, folders) for own in plans.values()], indent=2))
        return 0

    def carry_out(study: "Study") -> bool:
        if study.name == UTILITY_QUALITY:
            return _utility_quality(scale, output, dry_run or write_only, _limited(execution, began).stop_after)
        if dry_run:
            _say_what_is_left(plans[study.name], execution, folders)
            return True
        command = _command(study, scale, of_sweeps, lengths)
        return _carry_out(plans[study.name], _limited(execution, began), output, command, write_only, resume_from)

    status = _each(studies, scale, carry_out, store_path(execution.store))
    return 0 if dry_run and status == 1 else status


def _studies(names: Sequence[str], given: set[str]) -> list["Study"]:
    """Return the named studies, after rejecting options of sweeps for the one that is not a sweep."""
    from upgd.experiments.paper.catalogue import STUDIES, UTILITY_QUALITY
    from upgd.experiments.paper.plans import study_named

    studies = list(STUDIES.values()) if "all" in names else [study_named(name) for name in dict.fromkeys(names)]
    if given and [study.name for study in studies] == [UTILITY_QUALITY]:  # with other studies, they apply to those
        raise UsageError(
            f"{UTILITY_QUALITY} is not a sweep and does not support {option_names(given)}; leave these options out, or use "
            "`upgd run utility-quality-weights`, which takes --seeds and --steps"
        )
    return studies


def _plans(studies: Sequence["Study"], scale: str, options: Mapping[str, Any], lengths: Lengths) -> dict[str, "Plan"]:
    """Parse options, and return the plans of the studies that are sweeps.

    Args:
        studies: the studies.
        scale: their scale.
        options: the options of sweeps, as typed.
        lengths: those of them that are numbers of steps, parsed.
    """
    from upgd.experiments.paper.catalogue import UTILITY_QUALITY
    from upgd.experiments.paper.plans import plan

    parsed = {
        **options,
        "panels": _names(options["panels"]),
        "methods": _names(options["methods"]),
        "only": _limits(options["only"]),
        "data": _stand_ins(options["data"], studies),
    }
    return {
        study.name: plan(
            study.name, scale, **parsed | {name: _by_problem(own[study.name], study) for name, own in lengths.items()}
        )
        for study in studies
        if study.name != UTILITY_QUALITY
    }


def _limited(execution: Execution, began: float) -> Execution:
    """Return options with the rest of the time limit, which counts from ``began``."""
    if execution.stop_after is None:
        return execution
    return replace(execution, stop_after=max(0.0, began + execution.stop_after - time.monotonic()))


def _each(studies: Sequence["Study"], scale: str, carry_out: Callable[["Study"], bool], store: Path) -> int:
    """Carry out one study after the other, and return the exit status; studies that cannot be carried out are skipped.

    Args:
        studies: the studies.
        scale: their scale.
        carry_out: carries out a study, and returns whether it was finished within the time limit.
        store: the store of the results.
    """
    from upgd.data import DataError

    failed = False
    for study in studies:
        print(f"\n{study.title} ({study.name}, {scale})" if len(studies) > 1 else f"{study.title} ({scale})")
        try:
            if not carry_out(study):
                print("  stopped at the time limit; repeat the command to continue")
                break
        except (DataError, _Nothing) as error:
            if len(studies) == 1:
                raise
            failed = True
            print(f"  left out: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(
                f"upgd: stopped; finished runs are in {store}, and unfinished ones are saved; repeat the command to continue",
                file=sys.stderr,
            )
            return 130
    return 1 if failed else 0


class _Nothing(ValueError):
    """There are no results for a page."""


def _list(as_json: bool) -> int:
    from upgd.experiments.analysis.layout import terminal_width, wrapped
    from upgd.experiments.paper.catalogue import STUDIES

    if as_json:
        facts = [
            {
                "name": study.name,
                "title": study.title,
                "panels": [{"name": panel.key, "title": panel.title} for panel in study.panels],
            }
            for study in STUDIES.values()
        ]
        print(json.dumps(facts, indent=2))
        return 0
    width, indent = terminal_width(), " " * 4
    for study in STUDIES.values():
        print(f"{study.name}: {study.title}")
        if study.panels:
            panels = f"{indent}panels: {', '.join(panel.key for panel in study.panels)}"
            print(wrapped(panels, width, indent=indent, breaks=", "))
    return 0


def _carry_out(
    plan: "Plan", execution: Execution, output: Path, command: str, write_only: bool, resume_from: Sequence[Path]
) -> bool:
    """Compute, write the page, and return whether everything is done."""
    from upgd.experiments.paper.pages import write_page
    from upgd.experiments.paper.pieces import as_shipped, piece, save, together
    from upgd.experiments.paper.reproduce import reproduce as carry_out
    from upgd.experiments.paper.reproduce import stored

    path, data, finished = store_path(execution.store), output / "data", True
    if write_only:
        with together(plan, path, [*resume_from, data]) as store:
            found = carry_out(plan, as_shipped(plan, stored(store)))
        if not found.records:
            places = [str(place) for place in (path, data, *resume_from) if place.exists()] or [str(path)]
            verb = "has" if len(places) == 1 else "have"
            raise _Nothing(
                f"{' and '.join(places)} {verb} no results of {plan.study.name} at this scale; leave out --write-only to run "
                "it"
            )
        save(found, data)
    else:
        unlimited = execution.ray is None and execution.stop_after is None
        if plan.scale.name == "paper" and unlimited and not execution.quiet:
            _say_what_is_left(plan, execution, [*resume_from, data])  # it may take weeks
        say = (lambda text: None) if execution.quiet else (lambda text: print(f"  {text}", flush=True))
        with terminable():
            found, finished = piece(
                plan, data, options_of(execution), resume_from=resume_from, progress=not execution.quiet, say=say
            )
    _say_what_came_out(found)
    print(f"  wrote {write_page(found, output, command)}")
    return finished


def _say_what_came_out(found: "Reproduction") -> None:
    from upgd.experiments.analysis.wording import plural

    for panel in found.plan.panels:
        comparison, _ = found.panel(panel)
        if comparison is None:
            print(f"  {panel.title}: not run yet")
            continue
        scores = ", ".join(f"{name} {row.mean:.4g}" for name, row in found.rows(panel))
        print(f"  {panel.title}, online {comparison.metric}: {scores}")
    missing = {
        "{} of the screening": (found.unscreened, "learner"),
        "{} of the search": (found.unsearched, "learner"),
        "{} of the shortlist": (found.unlisted, "run"),
        "{}": (found.missing, "final run"),
    }
    for where, (count, what) in missing.items():
        if count:
            print(f"  {where.format(plural(count, what))} {'is' if count == 1 else 'are'} missing")


def _say_what_is_left(plan: "Plan", execution: Execution, folders: Sequence[Path]) -> None:
    places = [str(place) for place in (store_path(execution.store), *folders) if place.exists()]
    print(remaining.text(remaining.facts(plan, execution, folders), plan, " and ".join(places)))


def _utility_quality(scale: str, output: Path, nothing: bool, seconds: float | None) -> bool:
    """Run the study that is not a sweep; it takes a few minutes and always starts from scratch.

    Args:
        scale: its scale.
        output: the folder for its page.
        nothing: whether to compute nothing.
        seconds: the rest of the time limit; None if there is none.

    Returns:
        Whether it was finished within the time limit, which does not interrupt it.
    """
    from upgd.experiments.paper._utility_page import main

    steps, seeds = {"paper": (2_000, 20), "small": (500, 5), "smoke": (40, 2)}[scale]
    if nothing:
        print(f"  no sweep: {seeds} runs of {steps:,} steps, computed anew each time")
    elif seconds is not None and (page := output / "utility-quality.md").exists():
        print(f"  skipped: {page} exists; delete it to compute it anew")
    elif seconds == 0:
        return False
    else:
        main(["--out", str(output), "--steps", str(steps), "--seeds", str(seeds)])
    return True


def _names(text: str | None) -> list[str]:
    """Parse names that are separated by commas."""
    return [name.strip() for name in text.split(",")] if text else []


def _stand_ins(data: Sequence[str], studies: Sequence["Study"]) -> dict[str, str]:
    """Parse --data, and check it against the studies' data sets."""
    from upgd.data.sources import OFFICIAL

    instead = once("--data", map(_pair, data))
    own = sorted({problem.rpartition("-")[2] for study in studies for problem in study.problems()} & {*OFFICIAL})
    for name, other in instead.items():
        if name not in own:
            remedy = f"choose among {', '.join(own)}" if own else "leave it out"
            raise UsageError(f"--data {name}={other}: {name!r} is not a data set of these experiments; {remedy}")
    return instead


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise UsageError(f"--data takes NAME=OTHER, such as emnist=emnist-subset, not {text!r}")
    return name, other


def _values(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    try:
        return name.strip().replace("-", "_"), [float(plain_digits(value)) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"--only takes NAME=VALUES, such as sigma=0.1,0.01, not {text!r}") from None


def _limits(texts: Sequence[str]) -> dict[str, list[float]]:
    """Parse --only; the values of a hyperparameter that is named several times are put together."""
    found: dict[str, list[float]] = {}
    for name, values in map(_values, texts):
        found[name] = [*dict.fromkeys([*found.get(name, ()), *values])]
    return found


def _lengths(name: str, texts: Sequence[str], studies: Sequence["Study"]) -> dict[str, dict[str, int]]:
    """Parse an option such as --sweep-steps: for each study, steps by problem, with "" for all others."""
    option = option_name(name)
    lengths = once(option, (_length(option, text) for text in texts))
    known = dict.fromkeys(problem for study in studies for problem in study.problems())
    for problem, steps in lengths.items():
        if problem and problem not in known:
            where = ", ".join(study.name for study in studies)
            raise UsageError(
                f"{option} {problem}={steps}: there is no problem {problem!r} in {where}; choose among {', '.join(known)}"
            )
    return {
        study.name: {problem: steps for problem, steps in lengths.items() if not problem or problem in study.problems()}
        for study in studies
    }


def _length(option: str, text: str) -> tuple[str, int]:
    problem, equals, number = text.rpartition("=")
    with suppress(ValueError):
        if problem or not equals:
            return problem.strip(), read_steps(number)
    raise UsageError(
        f"{option} takes a number or NAME=NUMBER, such as 300000 or output-permuted-cifar10=300000, not {text!r}"
    )


def _by_problem(lengths: Mapping[str, int], study: "Study") -> dict[str, int]:
    """Expand the key "" to all other problems, for :func:`upgd.experiments.paper.plans.plan`."""
    all_of_them = dict.fromkeys(study.problems(), lengths[""]) if "" in lengths else {}
    return all_of_them | {name: steps for name, steps in lengths.items() if name}


def _command(study: "Study", scale: str, options: Mapping[str, Any], lengths: Lengths) -> str:
    """Return the command that produces the same page."""
    own = {
        option: [f"{problem}={steps}" if problem else steps for problem, steps in by_study[study.name].items()]
        for option, by_study in lengths.items()
    }
    given_to_it = {"scale": scale, **options, **own}
    if not own["screen"]:  # --screen names problems of other studies
        given_to_it["keep"] = None
    words = ["upgd", "reproduce", study.name]
    for option, given in given_to_it.items():
        values = given if isinstance(given, tuple | list) else [] if given is None else [given]
        for value in values:
            words += [option_name(option), str(value)]
    return shlex.join(words)
