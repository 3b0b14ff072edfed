"""Results of experiments: learners to select, compare, tabulate and plot."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from upgd.experiments.analysis.columns import columns_of, framed, moments_of, summary_of, windows_of
from upgd.experiments.analysis.compare import Best, Comparison, Entry, comparisons, pairs
from upgd.experiments.analysis.metrics import Metric
from upgd.experiments.analysis.tables import PairTable, Table, pair_line, table_line
from upgd.experiments.analysis.variants import best_of_variants, evaluated, table_rows, variant
from upgd.experiments.analysis.wording import plural
from upgd.store import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from upgd.experiments.analysis.figures import Band

__all__ = ["Results", "Table", "check_seeds"]


@dataclass(frozen=True, repr=False)
class Results:
    """Finished learners of one or several experiments.

    Attributes:
        records: One record per learner, with its curves.

    Example:
        >>> results = upgd.open("upgd.db")  # doctest: +SKIP
        >>> print(results.select(methods=["upgd", "sgd"]).table(against="sgd"))  # doctest: +SKIP
    """

    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        problems = "; ".join(comparison.title for comparison in self.comparisons())
        return f"<{plural(len(self), 'learner')}: {problems}>" if problems else "<no learners>"

    def frame(self) -> Any:
        """Return one row per learner: its key, and its mean loss and accuracy over all steps and the first and last quarter.

        Each further metric that was recorded, such as ``forgetting`` and ``dormant_units``, has a column.

        Returns:
            A pandas DataFrame if pandas is installed, otherwise a dictionary of columns.
        """
        return framed(self.columns())

    def curves(self) -> Any:
        """Return one row per window of each learner; ``step`` is its end. The type is that of :meth:`frame`."""
        return framed(self.columns(curves=True))

    def looks(self) -> Any:
        """Return one row per diagnostics snapshot of each learner (``look_every``). The type is that of :meth:`frame`.

        Every diagnostic has a column; a list, such as a histogram, has a column for each of its entries
        (``gate_histogram/0[3]``).
        """
        return framed(self.columns(looks=True))

    def columns(self, *, curves: bool = False, looks: bool = False) -> dict[str, list[Any]]:
        """Return the columns of :meth:`frame`, :meth:`curves` or :meth:`looks` as plain lists."""
        if curves and looks:
            raise ValueError("curves and looks have different rows; choose one of them")
        if curves:
            return columns_of([row for record in self.records for row in windows_of(record)])
        if looks:
            return columns_of([row for record in self.records for row in moments_of(record)])
        return columns_of([summary_of(record) for record in self.records])

    def select(
        self,
        *,
        problem: str | None = None,
        methods: str | Collection[str] | None = None,
        network: str | None = None,
        steps: int | None = None,
        seeds: Collection[int] | None = None,
    ) -> "Results":
        """Return the learners that match all given criteria; None matches all."""
        check_seeds(seeds)
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
        """Group the learners into comparisons: same problem, network and steps.

        Args:
            metric: The metric of tables and figures, such as ``"forgetting"``; see
                :mod:`upgd.experiments.analysis.metrics`. Default: online accuracy, or online loss for regression.
        """
        return comparisons(self.records, metric)

    def best(self, metric: Metric | None = None) -> list[Best]:
        """Return the best setting of every method, and of every variant of it, in every comparison.

        See :mod:`upgd.experiments.analysis.compare` for the rules and :mod:`upgd.experiments.analysis.variants` for variants.
        Settings are chosen by online accuracy or loss, regardless of ``metric``.
        """
        return [one for comparison in self.comparisons(metric) for one in best_of_variants(comparison).values()]

    def table(self, *, all_settings: bool = False, against: str | None = None, metric: Metric | None = None) -> "Table":
        """Return the mean ± standard error over seeds of every method and variant at its best setting, or of all settings.

        Best settings with fresh seeds are shown on these only. *p* is that of a paired *t*-test, corrected for the number of
        tests by Holm's procedure. See :mod:`upgd.experiments.analysis.compare` for the rules.

        Args:
            all_settings: Show all settings, not only the best of each method; p-values are not corrected then.
            against: The method, or the label of a variant (``"UPGD, local"``), to compare the others with. Default: the
                best.
            metric: The metric to show; see :meth:`comparisons`.
        """
        lines: list[dict[str, Any]] = []
        for comparison in self.comparisons(metric):
            chosen = {} if all_settings else best_of_variants(comparison)
            found = table_rows(comparison, all_settings=all_settings, against=against)
            lines += [table_line(comparison, row, against, chosen.get(variant(row.entry))) for row in found]
        return Table(lines)

    def pairs(self, *, metric: Metric | None = None) -> "PairTable":
        """Compare every method and variant, at its best setting, with every other: differences over common seeds.

        *p* is corrected for the number of pairs by Holm's procedure.

        Args:
            metric: The metric to compare; see :meth:`comparisons`.
        """
        return PairTable(
            [
                pair_line(comparison, pair, evaluation)
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
        """Plot the online curves of methods and variants at their best settings, of the first comparison, with bands.

        The figure follows matplotlib's rcParams where they differ from matplotlib's defaults.

        Args:
            ax: The axes to draw into. Default: a new figure.
            methods: Methods, or labels of variants (``"UPGD, local"``), in the order given. Default: all.
            legend: True draws a legend, False nothing. Default: None, which writes every curve's name at its end.
            band: ``"ci"``, the 95% confidence interval of the mean; ``"sd"``, one standard deviation of the seeds to either
                side; ``"range"``, from the smallest to the largest; None or False, nothing. Requires at least three seeds.
            title: Default: the problem's name.
            metric: The metric to plot; see :meth:`comparisons`.
        """
        from upgd.experiments.analysis import figures

        if not self.records:
            raise ValueError("there is nothing to plot: these results contain no learners; select others")
        comparison = self.comparisons(metric)[0]
        entries = None if methods is None else _chosen(comparison, [methods] if isinstance(methods, str) else methods)
        return figures.curves(comparison, entries, ax=ax, legend=legend, band=band, title=title)


def check_seeds(seeds: Collection[int] | None) -> None:
    """Raise TypeError for a number of seeds, which selects nothing."""
    if isinstance(seeds, int):
        raise TypeError(f"seeds must be a list of seeds, such as range({seeds}), not {seeds}")


def _chosen(comparison: Comparison, methods: Sequence[str]) -> list[Entry]:
    """Return the best settings of these methods or variants, in this order."""
    best = best_of_variants(comparison)
    found: list[Entry] = []
    for name in methods:
        own = [one.shown for variant, one in best.items() if name in (variant.method, variant.label)]
        if not own:
            labels = "; ".join(variant.label for variant in best)
            raise ValueError(f"methods: there is no {name!r} in {comparison.title}; choose among {labels}")
        found += [entry for entry in own if not any(entry.settings is other.settings for other in found)]
    return found
