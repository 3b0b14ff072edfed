"""What experiments have shown: columns, tables, pictures."""

import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from upgd.experiments.analysis.compare import (
    Best,
    Comparison,
    Entry,
    Evaluation,
    Pair,
    Row,
    comparisons,
    engine_text,
    pairs,
)
from upgd.experiments.analysis.layout import laid_out, number_format, p_text, terminal_width, wrapped
from upgd.experiments.analysis.metrics import METRICS, Metric, area, how_to_record, quarter
from upgd.experiments.analysis.variants import best_of_variants, evaluated, table_rows, variant
from upgd.experiments.spec.settings import is_usual, ordered, symbol
from upgd.store import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from upgd.experiments.analysis.figures import Band

__all__ = ["Results", "Table"]


@dataclass(frozen=True, repr=False)
class Results:
    """Finished learners, of one experiment or of many.

    Attributes:
        records: one for each learner, with its curves.
    """

    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        problems = "; ".join(comparison.title for comparison in self.comparisons())
        return f"<{len(self):,} learners: {problems}>" if problems else "<no learners>"

    def frame(self) -> Any:
        """One row for each learner: what it was, and its mean loss and accuracy over all steps and over the outer quarters.

        There is a column for each further metric that was recorded, such as ``forgetting`` and ``dormant_units``.

        Returns:
            A pandas DataFrame where pandas is installed; else a dictionary of columns.
        """
        return _framed(self.columns())

    def curves(self) -> Any:
        """One row for each window of each learner: ``step`` is where it ends. In the form of :meth:`frame`."""
        return _framed(self.columns(curves=True))

    def looks(self) -> Any:
        """One row for each look inside each learner (``look_every``): ``step`` is when. In the form of :meth:`frame`.

        Every figure has a column; one that is a list, such as a histogram, has a column for each of its entries
        (``gate_histogram/0[3]``).
        """
        return _framed(self.columns(looks=True))

    def columns(self, *, curves: bool = False, looks: bool = False) -> dict[str, list[Any]]:
        """What :meth:`frame`, or :meth:`curves`, or :meth:`looks`, has, as plain lists."""
        if curves and looks:
            raise ValueError("curves and looks have rows of their own; ask for one of them")
        if curves:
            return _columns([row for record in self.records for row in _windows(record)])
        if looks:
            return _columns([row for record in self.records for row in _moments(record)])
        return _columns([_summary(record) for record in self.records])

    def select(
        self,
        *,
        problem: str | None = None,
        methods: str | Collection[str] | None = None,
        network: str | None = None,
        steps: int | None = None,
        seeds: Collection[int] | None = None,
    ) -> "Results":
        """The learners that match all that is given; None matches everything."""
        names = [methods] if isinstance(methods, str) else methods
        return Results(
            [
                record
                for record in self.records
                if problem in (None, record.key.problem)
                and (names is None or record.key.method in names)
                and network in (None, record.key.network)
                and steps in (None, record.key.steps)
                and (seeds is None or record.key.seed in seeds)
            ]
        )

    def comparisons(self, metric: Metric | None = None) -> list[Comparison]:
        """The learners sorted into what can be compared: same problem, network and steps.

        Args:
            metric: what tables and figures of them show, such as ``"forgetting"``; by default online accuracy, in regression
                online loss. :mod:`upgd.experiments.analysis.metrics` has all.
        """
        return comparisons(self.records, metric)

    def best(self, metric: Metric | None = None) -> list[Best]:
        """The best setting of every method, and of every variant of it, in every comparison.

        :mod:`upgd.experiments.analysis.compare` has the rules; :mod:`upgd.experiments.analysis.variants` says what a
        variant is. Settings are chosen by online accuracy or loss, whatever else the ``metric`` is.
        """
        return [one for comparison in self.comparisons(metric) for one in best_of_variants(comparison).values()]

    def table(self, *, all_settings: bool = False, against: str | None = None, metric: Metric | None = None) -> "Table":
        """Mean ± standard error over seeds of every method and variant at its best setting, or of all settings.

        A best setting that has fresh seeds is shown on these alone. *p* is that of a paired *t*-test, corrected for the
        number of tests by Holm's procedure. :mod:`upgd.experiments.analysis.compare` has the rules.

        Args:
            all_settings: all settings, and not only the best of each; nothing is corrected then.
            against: the method, or the label of a variant (``"UPGD, local"``), with which the others are compared; by
                default the best.
            metric: what to show; see :meth:`comparisons`.
        """
        lines: list[dict[str, Any]] = []
        for comparison in self.comparisons(metric):
            chosen = {} if all_settings else best_of_variants(comparison)
            found = table_rows(comparison, all_settings=all_settings, against=against)
            lines += [_line(comparison, row, against, chosen.get(variant(row.entry))) for row in found]
        return Table(lines)

    def pairs(self, *, metric: Metric | None = None) -> "PairTable":
        """Every method and variant, at its best setting, against every other: differences over common seeds.

        *p* is corrected for the number of pairs by Holm's procedure.

        Args:
            metric: what to compare; see :meth:`comparisons`.
        """
        return PairTable(
            [
                _pair_line(comparison, pair, evaluation)
                for comparison in self.comparisons(metric)
                for evaluation, entries in evaluated(comparison)
                for pair in pairs(comparison, entries)
            ]
        )

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        methods: str | Sequence[str] | None = None,
        legend: bool | None = None,
        band: "Band | bool" = "ci",
        title: str | None = None,
        metric: Metric | None = None,
    ) -> "Axes":
        """The online curves of methods and variants at their best settings, of the first comparison, with bands.

        The figure follows matplotlib's rcParams wherever these differ from matplotlib's own defaults.

        Args:
            ax: where to draw; by default a new figure.
            methods: which methods, or labels of variants (``"UPGD, local"``), in which order; by default all.
            legend: True draws a legend, False nothing; by default every curve's name stands at its end.
            band: ``"ci"``, the 95 % confidence interval of the mean; ``"sd"``, one standard deviation of the seeds to either
                side; ``"range"``, from the smallest to the largest; None or False, nothing. From three seeds on.
            title: by default the problem's name.
            metric: what to draw; see :meth:`comparisons`.
        """
        from upgd.experiments.analysis import figures

        if not self.records:
            raise ValueError("there is nothing to plot: no learner is in these results")
        comparison = self.comparisons(metric)[0]
        entries = None if methods is None else _chosen(comparison, [methods] if isinstance(methods, str) else methods)
        return figures.curves(comparison, entries, ax=ax, legend=legend, band=band, title=title)


def _chosen(comparison: Comparison, methods: Sequence[str]) -> list[Entry]:
    """The best settings of these methods or variants, in this order."""
    best = best_of_variants(comparison)
    found: list[Entry] = []
    for name in methods:
        own = [one.shown for variant, one in best.items() if name in (variant.method, variant.label)]
        if not own:
            labels = "; ".join(variant.label for variant in best)
            raise ValueError(f"methods: there is no {name!r} in {comparison.title}; choose among {labels}")
        found += [entry for entry in own if not any(entry.settings is other.settings for other in found)]
    return found


@dataclass(frozen=True, repr=False)
class Table:
    """Lines with the same columns; prints as text, shows as HTML in a notebook.

    Attributes:
        lines: a dictionary each, with all numbers unrounded.
    """

    lines: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text(terminal_width())  # at the prompt

    def text(self, width: int | None = None) -> str:
        """The table in lines of at most ``width``, with what there is room for; None: all of it, however wide."""
        parts: list[str] = []
        missing: dict[str, None] = {}
        for title, cells in self._parts():
            table, left_out = laid_out(cells, width)
            parts.append(f"{wrapped(title, width, breaks=', ')}\n{table}")
            missing.update(dict.fromkeys(left_out))
        parts += [wrapped(note, width) for note in self.notes()]
        if missing:
            parts.append(wrapped(f"(no room for {', '.join(missing)})", width))
        return "\n\n".join(parts) or "(nothing)"

    def notes(self) -> list[str]:
        """What to keep in mind with these numbers."""
        tested = any(line["evaluation"] == "search" and line["p_holm"] is not None for line in self.lines)
        lacking = {
            line["metric"]: line["steps"]
            for line in self.lines
            if line.get("mean", 0) is None and line["diverged"] < line["seeds"]
        }
        missing = [f"–: there is no {metric}; {how_to_record(metric, steps)}" for metric, steps in lacking.items()]
        return [AT_EDGE] * any(line.get("edges") for line in self.lines) + [CAVEAT] * tested + missing

    def _repr_html_(self) -> str:
        tables = "".join(f"<p>{html.escape(title)}</p>{_html(rows)}" for title, rows in self._parts())
        return tables + "".join(f"<p>{note_html(note)}</p>" for note in self.notes())

    def _parts(self) -> list[tuple[str, list[list[str]]]]:
        """For each comparison, a title and rows of cells; the first row has the columns' names."""
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for line in self.lines:
            options = "".join(f", {name} {_text(value)}" for name, value in line["options"].items())
            steps = f"{line['steps']:,} steps{engine_text(line['engine'])}"
            metric = f"{'online ' * (line['metric'] in ('accuracy', 'loss'))}{line['metric']}"
            title = f"{line['problem']}{options}, network {line['network']}, {steps}: {metric}"
            reference = f", compared with {line['against']}" if line.get("against") else ""
            parts.setdefault(f"{title}{_ON[line['evaluation']]}{reference}", []).append(line)
        return [(title, self._cells(lines)) for title, lines in parts.items()]

    def _cells(self, lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        return _cells(lines)


class PairTable(Table):
    """Pairs of methods: how far apart they are, and how likely that is by chance."""

    def _cells(self, lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        spec = number_format(line["difference"] for line in lines)
        columns = {
            "method": [line["method"] for line in lines],
            "minus": [line["other"] for line in lines],
            "difference": [
                "–" if line["difference"] is None else format(line["difference"], f"+{spec}").replace("-", "−")
                for line in lines
            ],
            "p (Holm)": [p_text(line["p_holm"]) for line in lines],
            "seeds": [_text(line["seeds"]) for line in lines],
        }
        return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


#: What a test says after a search on the same seeds.
CAVEAT = (
    "The settings were chosen on the seeds that are compared, which favours methods with many settings and makes p too "
    "small; `upgd confirm` runs the best settings on fresh seeds."
)


def note_html(text: str) -> str:
    """A note for a page: what stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


#: What the column of differences is called: to a reference, to the best.
_DIFFERENCE = ("to the reference", "to the best")
_ON: dict[Evaluation, str] = {None: "", "fresh": ", on fresh seeds", "search": ", on the seeds of the search"}


def _cells(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    spec = number_format(line[name] for line in lines for name in ("mean", "first_quarter", "last_quarter"))

    def number(value: float | None, sign: str = "") -> str:
        return "–" if value is None else format(value, sign + spec)

    columns: dict[str, list[str]] = {
        "method": [line["method"] + (f" ({line['source']})" if line["source"] else "") for line in lines],
        "settings": [settings_text(line["settings"], line.get("edges") or ()) for line in lines],
        "mean ± s.e.": [f"{number(line['mean'])} ± {number(line['standard_error'])}" for line in lines],
        "first quarter": [number(line["first_quarter"]) for line in lines],
        "last quarter": [number(line["last_quarter"]) for line in lines],
        _DIFFERENCE[lines[0]["against"] is None]: [number(line["difference"], "+").replace("-", "−") for line in lines],
        "p (Holm)": [p_text(line["p_holm"]) for line in lines],
        "tried": [_text(line.get("tried")) for line in lines],
        "seeds": [_text(line["seeds"]) for line in lines],
        "diverged": [_text(line["diverged"]) for line in lines],
        "learner-steps": [_text(line["learner_steps"]) for line in lines],
    }
    if not any(line["diverged"] for line in lines):
        del columns["diverged"]
    if all(line.get("tried") in (None, 1) for line in lines):
        del columns["tried"]
    if len(lines) == 1 or all(line["p_holm"] is None for line in lines):
        del columns["p (Holm)"]
    if len(lines) == 1:
        del columns[_DIFFERENCE[lines[0]["against"] is None]]
    return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


def _html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    # Where a page has no room for columns, it can show their names beside the cells.
    names = [f' data-label="{html.escape(name)}"' for name in rows[0]]
    body = "".join(
        "<tr>" + "".join(f"<td{name}>{html.escape(cell)}</td>" for name, cell in zip(names, row, strict=True)) + "</tr>"
        for row in rows[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


#: What the mark of :func:`settings_text` means.
AT_EDGE = "* the smallest or largest value that was tried: a wider grid may find better"


def settings_text(settings: Mapping[str, Any], edges: Collection[str] = ()) -> str:
    """Settings in a few letters; what a method does unless told otherwise is left out. Those at an ``edge`` are marked."""
    names = [name for name in ordered(settings) if not is_usual(name, settings[name])]
    return ", ".join(f"{symbol(name)} {_text(settings[name])}{'*' * (name in edges)}" for name in names)


def short_names(names: Iterable[str]) -> str:
    """Settings' names as the tables have them."""
    return " and ".join(map(symbol, names))


def best_text(chosen: Iterable[tuple[Comparison, Best]], width: int | None = None) -> str:
    """The best settings in words, comparison by comparison, in lines of at most ``width``."""
    parts: dict[str, list[str]] = {}
    for comparison, one in chosen:
        seeds = plural(len(one.seeds), "seed")
        score = f"{comparison.chosen_by} {one.score:.4f}, mean of {seeds}"
        if math.isnan(one.score):
            score = f"diverged with {seeds}"
        source = f" ({one.entry.source})" if one.entry.source else ""
        lines = [
            f"  {one.entry.method}{source}: {settings_text(one.entry.settings)}",
            f"    {score}; {plural(one.tried, 'setting')} tried, {one.flat:.0%} within 1 % of the best",
        ]
        if one.diverged_settings:
            lines[-1] += f", {one.diverged_settings} with learners that diverged"
        if one.left_out:
            lines.append(f"    {plural(one.left_out, 'setting')} left out, without a seed in common with these")
        if one.fresh_seeds:
            fresh = mean_score(one.shown, comparison.chosen_by)
            lines.append(f"    on {plural(len(one.fresh_seeds), 'fresh seed')}: {comparison.chosen_by} {_text(fresh)}")
        if comparison.metric != comparison.chosen_by:
            lines.append(f"    {comparison.metric} {_text(mean_score(one.shown, comparison.metric))}")
        for name, near in one.neighbours.items():
            scores = ", ".join(f"{_text(value)} → {'diverged' if s != s else f'{s:.4f}'}" for value, s in near.items())
            lines.append(f"    next to it: {symbol(name)} {scores}")
        if one.edges:
            lines.append(f"    {short_names(one.edges)} at the edge of what was tried: a wider grid may find better")
        parts.setdefault(comparison.title, []).extend(lines)
    return "\n\n".join(
        "\n".join(wrapped(line, width, indent="      ") for line in [title, *lines]) for title, lines in parts.items()
    )


def mean_score(entry: Entry, metric: Metric) -> float | None:
    """The metric's mean over seeds; None where no seed has it."""
    areas = [score for record in entry.records.values() if not math.isnan(score := area(record, metric))]
    return sum(areas) / len(areas) if areas else None


def _where(comparison: Comparison, evaluation: Evaluation) -> dict[str, Any]:
    return {
        "problem": comparison.problem,
        "options": dict(comparison.options),
        "network": comparison.network,
        "steps": comparison.steps,
        "engine": comparison.engine,
        "metric": comparison.metric,
        "evaluation": evaluation,
    }


def _pair_line(comparison: Comparison, pair: Pair, evaluation: Evaluation) -> dict[str, Any]:
    return {
        **_where(comparison, evaluation),
        "method": variant(pair.first).label,
        "settings": dict(pair.first.settings),
        "other": variant(pair.second).label,
        "other_settings": dict(pair.second.settings),
        "seeds": pair.seeds,
        "difference": pair.difference,
        "p": pair.p,
        "p_holm": pair.p_holm,
    }


def _line(comparison: Comparison, row: Row, against: str | None, best: Best | None = None) -> dict[str, Any]:
    """A line of a table; for the ``best`` setting of a method it says how it was found."""
    return {
        **_where(comparison, row.evaluation),
        "source": row.entry.source or None,
        "method": row.entry.method,
        "settings": dict(row.entry.settings),
        "mean": _number(row.mean),
        "standard_error": _number(row.error),
        "first_quarter": _number(row.first_quarter),
        "last_quarter": _number(row.last_quarter),
        "seeds": row.seeds,
        "diverged": row.diverged,
        "learner_steps": row.learner_steps,
        "against": against,
        "difference": row.difference,
        "p": row.p,
        "p_holm": row.p_holm,
        **({} if best is None else {"tried": best.tried, "edges": list(best.edges)}),
    }


def _summary(record: Record) -> dict[str, Any]:
    quarters = {
        f"{metric}_{which}_quarter": quarter(record, metric, which)
        for metric in ("loss", "accuracy")
        for which in ("first", "last")
        if metric == "loss" or record.accuracy is not None
    }
    accuracy = math.nan if record.accuracy is None else area(record, "accuracy")
    return {
        **_identity(record),
        "loss": area(record, "loss"),
        "accuracy": accuracy,
        **quarters,
        **{_column(metric): area(record, metric) for metric in _DERIVED if METRICS[metric].series(record) is not None},
        "diverged_at": record.diverged_at,
        "device": record.device,
        "backend": record.backend,
        "seconds": record.seconds,
        "finished": record.finished,
        **({"plugins": plugins_text(record.plugins)} if record.plugins else {}),
    }


def plugins_text(plugins: Mapping[str, str]) -> str:
    """Modules and versions in one line: ``decay_home.method (decay-home 0.1.0)``."""
    return ", ".join(f"{module} ({version})" if version else module for module, version in plugins.items())


def _windows(record: Record) -> list[dict[str, Any]]:
    identity = _identity(record)
    accuracies = [None] * len(record.loss) if record.accuracy is None else record.accuracy.tolist()
    return [
        {**identity, "step": step, "loss": loss, "accuracy": accuracy}
        for step, loss, accuracy in zip(record.ends.tolist(), record.loss.tolist(), accuracies, strict=True)
    ]


def _moments(record: Record) -> list[dict[str, Any]]:
    """A row for each look inside a learner."""
    found = record.diagnostics or {"step": []}
    identity = _identity(record)
    rows: list[dict[str, Any]] = []
    for i, step in enumerate(found["step"]):
        row = {**identity, "step": step}
        for name in (name for name in found if name != "step"):
            row |= _spread(name, found[name][i])
        rows.append(row)
    return rows


def _spread(name: str, figure: Any) -> dict[str, Any]:
    if not isinstance(figure, list):
        return {name: figure}
    return {key: value for i, part in enumerate(figure) for key, value in _spread(f"{name}[{i}]", part).items()}


def _identity(record: Record) -> dict[str, Any]:
    key = record.key
    options = {f"option_{name}": value for name, value in key.options.items()}
    settings = {name: key.settings[name] for name in ordered(key.settings)}
    if isinstance(betas := settings.get("betas"), list | tuple) and len(betas) == 2:
        del settings["betas"]
        settings["beta1"], settings["beta2"] = betas
    # A setting of somebody's own method may have the name of a column.
    settings = {f"setting_{name}" if name in _COLUMNS else name: value for name, value in settings.items()}
    return {
        **({"source": record.source} if record.source else {}),
        **{"problem": key.problem, "network": key.network, "steps": key.steps, **options},
        **{"method": key.method, **settings, "seed": key.seed},
    }


#: The metrics that are columns of a frame where they were recorded.
_DERIVED = tuple(metric for metric in METRICS if metric not in ("loss", "accuracy"))


def _column(metric: Metric) -> str:
    return metric.replace("-", "_")


#: The names that columns have besides those of settings.
_COLUMNS = {
    *map(_column, _DERIVED),
    *("source", "problem", "network", "steps", "method", "seed", "step", "loss", "accuracy", "diverged_at", "device"),
    *("backend", "seconds", "finished"),
    *(f"{metric}_{which}_quarter" for metric in ("loss", "accuracy") for which in ("first", "last")),
}


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


def _framed(columns: dict[str, list[Any]]) -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError:
        return columns
    return pd.DataFrame(columns)


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _text(value: Any, digits: int = 4) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return "/".join(_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
