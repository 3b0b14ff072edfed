"""What `upgd reproduce --dry-run` prints: what is computed of a study, what is left, and how long that takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upgd.cli.options import Execution, store_path

if TYPE_CHECKING:
    from upgd.experiments.paper.plans import Plan

__all__ = ["facts", "text"]

#: The stages that are one line of the text. The shortlist consists of runs like the final ones.
_TOGETHER = {"screening": ("screening",), "search": ("search",), "final runs": ("shortlist", "final runs")}


def facts(plan: "Plan", execution: Execution, folders: Sequence[Path]) -> dict[str, Any]:
    """Return what is computed and what is left of a plan; ``seconds`` is None, with a reason, if data sets are missing."""
    from upgd.data import DataError
    from upgd.experiments.execution.work import device_named
    from upgd.experiments.execution.workers import processes_that_help
    from upgd.experiments.paper.pieces import together
    from upgd.experiments.paper.remaining import Remaining

    device = device_named(execution.device)
    workers = execution.workers or processes_that_help(device)
    with together(plan, store_path(execution.store), folders) as store:
        rest = Remaining(plan, store)
        stages = {name: rest.stage(name) for name in rest.stages}
        seconds, reason, jobs = None, None, 0
        try:
            planned = rest.planned(rest.stages, store, workers, device)
            jobs, seconds = len(planned), _seconds(planned, workers, device, execution)
        except DataError as error:
            reason = str(error)
    return {
        "study": plan.study.name,
        "panels": {
            panel.key: {
                name: {"computed": stage.computed, "wanted": stage.wanted}
                for name, stage in ((name, rest.stage(name, panel)) for name in rest.stages)
                if stage.wanted
            }
            for panel in plan.panels
        },
        "left": {
            name: {"learners": stage.learners, "learner_steps": stage.learner_steps} for name, stage in stages.items()
        },
        "device": device,
        "workers": min(workers, jobs) or workers,
        "seconds": seconds,
        **({} if reason is None else {"no_estimate": reason}),
    }


def _seconds(jobs: Sequence[Any], workers: int, device: str, execution: Execution) -> float:
    from upgd.experiments.execution import estimate

    by_problem: dict[tuple[str, str], list[Any]] = {}
    for job in jobs:
        by_problem.setdefault((job.problem, job.network), []).append(job)
    return sum(estimate.estimate(own, workers, device, execution.backend) for own in by_problem.values())


def text(found: dict[str, Any], plan: "Plan", places: str) -> str:
    """Return the facts as lines of text; ``places`` are the files and folders with results."""
    from upgd.experiments.analysis.wording import out_of, plural
    from upgd.experiments.execution.progress import duration

    lines = [
        f"{key}: {', '.join(f'{name} {out_of(**counts)}' for name, counts in stages.items())}"
        for key, stages in found["panels"].items()
    ]
    begun = False
    for what, names in _TOGETHER.items():
        left = [found["left"][name] for name in names if name in found["left"]]
        learners, steps = (sum(one[number] for one in left) for number in ("learners", "learner_steps"))
        if not learners:
            continue
        lines.append(
            f"then the {what}: {plural(steps, 'learner-step')}"
            if begun
            else f"left of the {what}: {plural(learners, 'learner')}, {plural(steps, 'learner-step')}"
        )
        begun = True
        if what == "search" and plan.grid == "climb":
            lines.append(
                "then a search around the best of them, repeated while it finds better settings; not included in the time"
            )
    if not begun:
        return f"  nothing is left to compute; all results are in {places}"
    if found["seconds"] is None:
        lines.append(f"no estimate of the time: {found['no_estimate']}")
    else:
        lines.append(f"about {duration(found['seconds'])}, measured on {found['workers']} × {found['device']} now")
    return "\n".join(f"  {line}" for line in lines)
