"""The inputs of an optimizer's step, shared by the CPU and GPU engines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from upgd.kernels.source import reached
from upgd.methods.tracing import Rule

__all__ = ["Engine", "Part", "Reductions", "scalars_of", "states_of"]

#: Name, operation and range of every reduction; see :attr:`upgd.methods.Method.reductions`.
Reductions = tuple[tuple[str, str, str], ...]


@dataclass
class Part:
    """One parameter group's part in a step: contiguous tensors in row-major order.

    Attributes:
        rule: the rule. Its reductions are those of the step, or none.
        noise: 0 for none, 1 for white, 2 for anticorrelated noise.
        values: the numbers in ``h``; the learning rate may be a tensor.
        sign: −1 to maximize.
        states: the tensors of each state that the rule uses, in the order of :func:`states_of`.
        curvatures, steps: empty if the rule does not use them.
        numbers: the indices of the parameters among all parameters of the optimizer.
        starts: the index of the first entry of each parameter in the whole parameter, for shards; empty if all are whole.
        split: the indices of parameters whose unit is split across processes, because they have one dimension.
        slots: for the parameter, and for each state that the rule uses, the slot of the random numbers with which it is
            rounded (see :data:`upgd.noise.Purpose.ROUNDING`), or None if it is not; empty if none is.
        scales: for states with 8 bits, the scales of each state that the rule uses; otherwise empty.
        layout: data that the engine reuses for steps in which only gradients and values change.
    """

    rule: Rule
    noise: int
    values: Mapping[str, Any]
    sign: float
    params: list[Tensor]
    grads: list[Tensor]
    curvatures: list[Tensor]
    states: list[list[Tensor]]
    steps: list[Tensor]
    numbers: list[int]
    starts: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    slots: tuple[int | None, ...] = ()
    scales: list[list[Tensor]] = field(default_factory=list)
    layout: Any = None


class Engine(Protocol):
    """Computes the steps of one optimizer."""

    def step(
        self,
        parts: Sequence[Part],
        reductions: Reductions,
        seed: int,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        everywhere: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take one step.

        Args:
            parts: the parameter groups.
            reductions: the reductions; a reduction over the learner is over all parts.
            seed: the seed of the noise.
            grad_scale: gradients are divided by this value.
            found_inf: if not 0, the step is skipped.
            everywhere: a function that reduces a maximum over the learner across all processes.
        """
        ...


def states_of(rule: Rule) -> list[int]:
    """Return the numbers of the states that a rule reads or writes."""
    new = [place for place in rule.new_state if place is not None]
    needed = reached(rule, [rule.new_weight, *new, *rule.observed])
    read = {rule.nodes[place][1] for place in needed if rule.nodes[place][0] == "state"}
    return [n for n, place in enumerate(rule.new_state) if n in read or place is not None]


def scalars_of(rule: Rule) -> list[int]:
    """Return the numbers of the scalars that a rule needs."""
    new = [place for place in rule.new_state if place is not None]
    needed = reached(rule, [rule.new_weight, *new, *rule.observed])
    return sorted({rule.nodes[place][1] for place in needed if rule.nodes[place][0] == "scalar"})
