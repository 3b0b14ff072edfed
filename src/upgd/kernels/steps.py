"""What an optimizer's step is made of, whoever computes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from upgd.kernels.source import reached
from upgd.methods.tracing import Rule

__all__ = ["Engine", "Part", "Reductions", "scalars_of", "states_of"]

#: Name, operation and range of every reduction; see :attr:`upgd.methods.Method.reductions`.
Reductions = tuple[tuple[str, str, str], ...]


@dataclass
class Part:
    """One parameter group's part in a step: tensors that lie in one piece, each in row-major order.

    Attributes:
        rule: what to compute. Its reductions are those of the step, or none.
        noise: 0 for none, 1 for white, 2 for anticorrelated noise.
        values: the numbers that the rule finds in ``h``; the learning rate may be a tensor.
        sign: −1 to maximize.
        states: the tensors of each state that the rule uses, in the order of :func:`states_of`.
        curvatures, steps: empty where the rule needs none.
        numbers: the parameters' places among all parameters of the optimizer.
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
            reductions: what to reduce; over the learner means over all parts.
            seed: of the noise.
            grad_scale: what gradients are to be divided by.
            found_inf: a step with anything but 0 here does nothing.
            everywhere: takes a maximum over the learner to that over all processes.
        """
        ...


def states_of(rule: Rule) -> list[int]:
    """The numbers of the states that a rule reads or writes."""
    new = [place for place in rule.new_state if place is not None]
    needed = reached(rule, [rule.new_weight, *new, *rule.observed])
    read = {rule.nodes[place][1] for place in needed if rule.nodes[place][0] == "state"}
    return [n for n, place in enumerate(rule.new_state) if n in read or place is not None]


def scalars_of(rule: Rule) -> list[int]:
    """The numbers of the scalars that a rule needs."""
    new = [place for place in rule.new_state if place is not None]
    needed = reached(rule, [rule.new_weight, *new, *rule.observed])
    return sorted({rule.nodes[place][1] for place in needed if rule.nodes[place][0] == "scalar"})
