"""Tables of methods and of pairs of methods, as text and as HTML."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upgd.experiments.analysis.compare import Best, Comparison, Entry, Evaluation, Pair, Row, engine_text
from upgd.experiments.analysis.layout import laid_out, number_format, number_text, p_text, terminal_width, wrapped
from upgd.experiments.analysis.metrics import how_to_record
from upgd.experiments.analysis.variants import variant
from upgd.experiments.analysis.wording import AT_EDGE, finite, note_html, plural, settings_text, value_text

__all__ = ["CAVEAT", "PairTable", "Table", "pair_line", "table_line"]


@dataclass(frozen=True, repr=False)
class Table:
    """Lines with the same columns. Prints as text, and shows as HTML in a notebook.

    Attributes:
        lines: One dictionary per line, with unrounded numbers.
    """

    lines: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text(terminal_width())  # for the interactive prompt

    def text(self, width: int | None = None) -> str:
        """Return the table as text of at most ``width`` columns, omitting what does not fit; None for no limit."""
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
        """Return caveats about these numbers."""
        tested = any(line["evaluation"] == "search" and line["p_holm"] is not None for line in self.lines)
        lacking = {
            line["metric"]: line["steps"]
            for line in self.lines
            if line.get("mean", 0) is None and line["diverged"] < line["seeds"]
        }
        missing = [f"–: {metric} was not recorded; {how_to_record(metric, steps)}" for metric, steps in lacking.items()]
        return [AT_EDGE] * any(line.get("edges") for line in self.lines) + [CAVEAT] * tested + missing

    def _repr_html_(self) -> str:
        tables = "".join(f"<p>{html.escape(title)}</p>{_html(rows)}" for title, rows in self._parts())
        return tables + "".join(f"<p>{note_html(note)}</p>" for note in self.notes())

    def _parts(self) -> list[tuple[str, list[list[str]]]]:
        """Return a title and rows of cells for each comparison; the first row holds the names of the columns."""
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for line in self.lines:
            options = "".join(f", {name} {value_text(value)}" for name, value in line["options"].items())
            steps = f"{plural(line['steps'], 'step')}{engine_text(line['engine'])}"
            metric = f"{'online ' * (line['metric'] in ('accuracy', 'loss'))}{line['metric']}"
            title = f"{line['problem']}{options}, network {line['network']}, {steps}: {metric}"
            reference = f", compared with {line['against']}" if line.get("against") else ""
            parts.setdefault(f"{title}{_ON[line['evaluation']]}{reference}", []).append(line)
        return [(title, self._cells(lines)) for title, lines in parts.items()]

    def _cells(self, lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        spec = number_format(line[name] for line in lines for name in ("mean", "first_quarter", "last_quarter"))

        def number(value: float | None, sign: str = "") -> str:
            return number_text(value, sign + spec)

        difference = "vs. best" if lines[0]["against"] is None else "vs. reference"
        columns: dict[str, list[str]] = {
            "method": [line["method"] + (f" ({line['source']})" if line["source"] else "") for line in lines],
            "settings": [settings_text(line["settings"], line.get("edges") or ()) for line in lines],
            "mean ± s.e.": [f"{number(line['mean'])} ± {number(line['standard_error'])}" for line in lines],
            "first quarter": [number(line["first_quarter"]) for line in lines],
            "last quarter": [number(line["last_quarter"]) for line in lines],
            difference: [number(line["difference"], "+") for line in lines],
            "p (Holm)": [p_text(line["p_holm"]) for line in lines],
            "tried": [value_text(line.get("tried")) for line in lines],
            "seeds": [value_text(line["seeds"]) for line in lines],
            "diverged": [value_text(line["diverged"]) for line in lines],
            "learner-steps": [value_text(line["learner_steps"]) for line in lines],
        }
        if not any(line["diverged"] for line in lines):
            del columns["diverged"]
        if all(line.get("tried") in (None, 1) for line in lines):
            del columns["tried"]
        if len(lines) == 1 or all(line["p_holm"] is None for line in lines):
            del columns["p (Holm)"]
        if len(lines) == 1:
            del columns[difference]
        return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


class PairTable(Table):
    """Pairs of methods: their differences and p-values."""

    def _cells(self, lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        spec = number_format(line["difference"] for line in lines)
        columns = {
            "method": [_label(line["method"], line["settings"], line["source"]) for line in lines],
            "minus": [_label(line["other"], line["other_settings"], line["other_source"]) for line in lines],
            "difference": [number_text(line["difference"], f"+{spec}") for line in lines],
            "p (Holm)": [p_text(line["p_holm"]) for line in lines],
            "seeds": [value_text(line["seeds"]) for line in lines],
        }
        return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


def _label(method: str, settings: Mapping[str, Any], source: str | None) -> str:
    return variant(Entry(method, settings, {}, source or "")).label


#: A caveat for tests on the same seeds as the search.
CAVEAT = (
    "The settings were chosen on the seeds that are compared, which favours methods with many settings and makes p too "
    "small; `upgd confirm` runs the best settings on fresh seeds."
)


_ON: dict[Evaluation, str] = {None: "", "fresh": ", on fresh seeds", "search": ", on the seeds of the search"}


def _html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    # Pages without room for columns show their names next to the cells.
    names = [f' data-label="{html.escape(name)}"' for name in rows[0]]
    body = "".join(
        "<tr>" + "".join(f"<td{name}>{html.escape(cell)}</td>" for name, cell in zip(names, row, strict=True)) + "</tr>"
        for row in rows[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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


def pair_line(comparison: Comparison, pair: Pair, evaluation: Evaluation) -> dict[str, Any]:
    """Return a line of a table of pairs."""
    return {
        **_where(comparison, evaluation),
        "source": pair.first.source or None,
        "method": pair.first.method,
        "settings": dict(pair.first.settings),
        "other_source": pair.second.source or None,
        "other": pair.second.method,
        "other_settings": dict(pair.second.settings),
        "seeds": pair.seeds,
        "difference": pair.difference,
        "p": pair.p,
        "p_holm": pair.p_holm,
    }


def table_line(comparison: Comparison, row: Row, against: str | None, best: Best | None = None) -> dict[str, Any]:
    """Return a line of a table; for the ``best`` setting of a method, it includes how it was found."""
    return {
        **_where(comparison, row.evaluation),
        "source": row.entry.source or None,
        "method": row.entry.method,
        "settings": dict(row.entry.settings),
        "mean": finite(row.mean),
        "standard_error": finite(row.error),
        "first_quarter": finite(row.first_quarter),
        "last_quarter": finite(row.last_quarter),
        "seeds": row.seeds,
        "diverged": row.diverged,
        "learner_steps": row.learner_steps,
        "against": against,
        "difference": row.difference,
        "p": row.p,
        "p_holm": row.p_holm,
        **({} if best is None else {"tried": best.tried, "edges": list(best.edges)}),
    }
