"""The paper's first experiment: the rank correlation of approximate utilities with the true utility.

A network learns online to add two of its five inputs. At every step, before the update, the true utilities of all items (351
weights and biases, or 100 features) are compared by rank with their approximations. All seeds run together.

    >>> result = run("weight", activations=["relu"], seeds=range(2), steps=100)
    >>> print(result.table())  # doctest: +SKIP

``python -m upgd.experiments.paper.utility_quality --out docs/results`` runs the whole study and writes its figures and page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from upgd.experiments.analysis.layout import number_text
from upgd.experiments.paper._batched_utility import ACTIVATIONS, TITLES, Pass, initial_layers
from upgd.noise import Purpose, uniforms
from upgd.streams import make
from upgd.utility.ranks import centred_ranks, cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MEASURES", "PAPER_ORDER", "SCOPES", "UtilityQuality", "run"]

Granularity = Literal["weight", "feature"]
#: The order reported in the paper, best first; random has no correlation.
PAPER_ORDER = ("second order", "first order", "magnitude", "random")
MEASURES = (*PAPER_ORDER, "squared gradient")
#: Measures that are compared by positions in sorted order instead of ranks, as in the authors' code.
BY_ARGSORT = ("second order", "first order")
SCOPES = ("global", "local")
_SIZES: Mapping[Granularity, tuple[int, ...]] = {"weight": (5, 50, 1), "feature": (5, 50, 50, 1)}
#: Number of steps whose utilities are ranked together.
_CHUNK = 100


def run(
    granularity: Granularity = "weight",
    *,
    activations: Sequence[str] = ("relu", "tanh", "leaky_relu"),
    seeds: Sequence[int] = range(20),
    steps: int = 2_000,
    lr: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> "UtilityQuality":
    """Measure the rank correlation of approximate utilities with the true utility at every step of online learning.

    Args:
        granularity: ``"weight"``, the default: the 351 weights and biases of a network 5-50-1; ``"feature"``: the 100 hidden
            units of a network 5-50-50-1.
        activations: ``"relu"``, ``"tanh"``, ``"leaky_relu"``.
        seeds: One run each.
        steps: Number of samples per run.
        lr: SGD's step size. The paper does not state it; the default is that of the authors' public code.
        progress: Called from time to time with the number of steps done and their total, over all activations.

    Returns:
        The correlations, with ``table()`` and ``plot()``.
    """
    if granularity not in _SIZES:
        raise ValueError(f"granularity must be 'weight' or 'feature', not {granularity!r}")
    for activation in activations:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activations must be among {', '.join(ACTIVATIONS)}, not {activation!r}")
    if steps < 1 or not len(seeds):
        raise ValueError(f"steps and the number of seeds must be at least 1, not {steps} and {len(seeds)}")
    curves, losses, by_argsort = {}, {}, {}
    for number, activation in enumerate(activations):

        def tell(done: int, before: int = number * steps) -> None:
            if progress is not None:
                progress(before + done, len(activations) * steps)

        found = _learn(granularity, activation, list(seeds), steps, lr, tell)
        curves[activation], losses[activation], by_argsort[activation] = found
    return UtilityQuality(granularity, tuple(seeds), steps, lr, curves, losses, by_argsort)


@dataclass(frozen=True)
class UtilityQuality:
    """Correlations with the true utility.

    Attributes:
        granularity: ``"weight"`` or ``"feature"``.
        seeds: as given.
        steps: as given.
        lr: as given.
        curves: activation → scope (``"global"``, ``"local"``) → measure → (seeds, steps). Global correlations rank all
            items together; local ones rank within each layer and are averaged. NaN where the true utility is constant.
        losses: activation → (seeds, steps), each before the update.
        by_argsort: as ``curves``, of :data:`BY_ARGSORT`, where ``argsort`` is taken for ranks: entry i is the index of the
            i-th smallest item, and not the rank of item i.
    """

    granularity: Granularity
    seeds: tuple[int, ...]
    steps: int
    lr: float
    curves: dict[str, dict[str, dict[str, Tensor]]]
    losses: dict[str, Tensor]
    by_argsort: dict[str, dict[str, dict[str, Tensor]]]

    def means(self, activation: str, scope: str, measure: str, last: int | None = None) -> Tensor:
        """Return the mean correlation of each seed (seeds,), over all steps or the ``last`` ones."""
        return self.curves[activation][scope][measure][:, -(last or self.steps) :].nanmean(-1)

    def mean_by_argsort(self, activation: str, scope: str, measure: str) -> float:
        """Return the mean correlation over seeds and steps if ``argsort`` is used as ranks."""
        return float(self.by_argsort[activation][scope][measure].nanmean())

    def table(self, last: int | None = None) -> str:
        """Return mean correlations ± standard errors over seeds, in Markdown; over all steps or the ``last`` ones."""
        lines = [["activation", "scope", *MEASURES], ["---", "---", *["---:"] * len(MEASURES)]]
        for activation, scope in self.settings():
            cells = [_with_error(self.means(activation, scope, measure, last)) for measure in MEASURES]
            lines.append([TITLES[activation], scope, *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the means as numbers: activation → scope → measure."""
        return {
            activation: {
                scope: {measure: float(self.means(activation, scope, measure).mean()) for measure in MEASURES}
                for scope in SCOPES
            }
            for activation in self.curves
        }

    def settings(self) -> Iterator[tuple[str, str]]:
        """Iterate over all pairs (activation, scope)."""
        return ((activation, scope) for activation in self.curves for scope in SCOPES)

    def wins(self, activation: str, scope: str, better: str, worse: str, last: int | None = None) -> int:
        """Return the number of seeds in which ``better`` has the higher mean correlation of the two measures."""
        ahead = self.means(activation, scope, better, last) > self.means(activation, scope, worse, last)
        return int(ahead.sum())

    def plot(self) -> "Figure":
        """Plot the curves: one column per activation and one row per scope; means over seeds, bands of one standard
        deviation."""
        from upgd.experiments.paper._utility_figure import draw

        return draw(self)


def _learn(
    granularity: Granularity, activation: str, seeds: list[int], steps: int, lr: float, tell: Callable[[int], None]
) -> tuple[dict[str, dict[str, Tensor]], Tensor, dict[str, dict[str, Tensor]]]:
    """Run SGD for all seeds; correlations scope → measure → (seeds, steps), losses (seeds, steps), and correlations of
    ``argsort``."""
    stream = make(f"utility-quality-{granularity}s")
    layers = initial_layers(_SIZES[granularity], seeds)
    parts: list[dict[str, dict[str, Tensor]]] = []
    sorted_parts: list[dict[str, dict[str, Tensor]]] = []
    losses: list[Tensor] = []
    for start in range(0, steps, _CHUNK):
        chunk = stream.chunk(seeds, start, min(_CHUNK, steps - start))
        inputs, targets = chunk.inputs().double(), chunk.targets.double()
        seen: list[dict[str, list[Tensor]]] = []
        for offset in range(inputs.shape[1]):
            step = Pass(layers, inputs[:, offset], targets[:, offset], activation)
            seen.append(step.of_weights() if granularity == "weight" else step.of_features())
            losses.append(step.loss())
            layers = step.descend(lr)
        # Measure → layers of (seeds, steps, items).
        stacked = {
            measure: [torch.stack(of_steps, 1) for of_steps in zip(*(u[measure] for u in seen), strict=True)]
            for measure in seen[0]
        }
        stacked["random"] = _random(stacked["true"], seeds, start)
        parts.append(_correlations(stacked))
        sorted_parts.append(_correlations(stacked, BY_ARGSORT, _centred_places))
        tell(start + inputs.shape[1])
    return _joined(parts), torch.stack(losses, 1), _joined(sorted_parts)


def _joined(parts: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Concatenate chunks of steps."""
    return {
        scope: {measure: torch.cat([part[scope][measure] for part in parts], 1) for measure in parts[0][scope]}
        for scope in SCOPES
    }


def _correlations(
    utilities: Mapping[str, Sequence[Tensor]],
    measures: Sequence[str] = MEASURES,
    ranks: Callable[[Tensor], Tensor] = centred_ranks,
) -> dict[str, dict[str, Tensor]]:
    """Convert utilities (measure → layers) to correlations with the true ones (scope → measure)."""
    wanted = {measure: utilities[measure] for measure in (*measures, "true")}
    overall = {measure: ranks(torch.cat(list(layers), -1)) for measure, layers in wanted.items()}
    by_layer = {measure: [ranks(layer) for layer in layers] for measure, layers in wanted.items()}
    return {
        "global": {measure: cosine(overall[measure], overall["true"]) for measure in measures},
        "local": {measure: _mean_cosine(by_layer[measure], by_layer["true"]) for measure in measures},
    }


def _centred_places(values: Tensor) -> Tensor:
    """Return ``argsort``, used as ranks, minus its mean."""
    return values.argsort(-1).double() - (values.shape[-1] - 1) / 2


def _mean_cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([cosine(*pair) for pair in zip(a, b, strict=True)]).nanmean(0)


def _random(like: Sequence[Tensor], seeds: list[int], start: int) -> list[Tensor]:
    """Return the uninformed measure, independent for every seed and step."""
    sizes = [layer.shape[-1] for layer in like]
    steps = torch.arange(start, start + like[0].shape[1])
    drawn = uniforms(torch.tensor(seeds)[:, None], Purpose.NOISE, steps, sum(sizes))
    return list(torch.split(drawn, sizes, -1))


def _with_error(of_seeds: Tensor) -> str:
    mean = number_text(of_seeds.mean().item(), "z.3f")
    return f"{mean} ± {of_seeds.std().item() / len(of_seeds) ** 0.5:.3f}" if len(of_seeds) > 1 else mean


if __name__ == "__main__":
    from upgd.experiments.paper._utility_page import main

    main()
