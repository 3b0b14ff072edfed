"""Test whether a method computes every learner of a population separately.

A tensor of the torch backend holds all learners of a group, so a rule such as ``w - h.lr * g / g.norm()`` makes each learner
depend on the others. Such a rule is correct as the optimizer of one network, so only a comparison reveals it.
"""

from collections.abc import Hashable

import torch

from upgd.methods.reset_tracing import traced_reset
from upgd.methods.tracing import CannotTrace, traced
from upgd.networks import MLP
from upgd.population.backend import Group, Tally
from upgd.population.torch_backend import TorchBackend
from upgd.streams.contract import Chunk

__all__ = ["check_separate"]

_STEPS = 12
_CPU = torch.device("cpu")
_separate: dict[Hashable, bool] = {}


def check_separate(group: Group) -> None:
    """Raise ValueError if learners of this kind depend on each other."""
    values = tuple((name, float(each[0])) for name, each in group.values.items())
    key = type(group.method), group.kind, values
    if key not in _separate:
        _separate[key] = _works_on_entries(group) or _is_the_same_alone(group)
    if not _separate[key]:
        raise ValueError(
            f"{group.method.name} cannot run in a population, because its rule computes other results for a learner among "
            "others than for the same learner alone; declare reductions, such as {'size': ('norm', 'layer')}, instead of "
            "reducing tensors, and use the argument noise instead of other random numbers"
        )


def _works_on_entries(group: Group) -> bool:
    """Return whether the rule can be traced as operations on single entries, which cannot mix learners."""
    try:
        traced(group.method, resets=True)
        traced_reset(group.method)
    except CannotTrace:
        return False
    return True


def _is_the_same_alone(group: Group) -> bool:
    """Return whether the first learner's weights are the same after some steps alone and beside a very different learner."""
    try:
        alone, beside = _first_weights(group, 1), _first_weights(group, 2)
    except Exception:  # the population itself raises it, or works with another network
        return True
    return torch.allclose(alone, beside, rtol=1e-6, atol=1e-9, equal_nan=True)


def _first_weights(group: Group, learners: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def normals(*shape: int) -> torch.Tensor:
        numbers = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        numbers[1] *= 10
        return numbers[:learners]

    network, rows = MLP((6, 5, 4, 3)), torch.arange(learners)
    same = Group(
        group.kind._replace(gated="all"),
        group.method,
        seeds=rows,
        rows=rows,
        values={name: each[:1].expand(learners) for name, each in group.values.items()},
    )
    weights = {name: normals(*p.shape) for name, p in network.named_parameters()}
    backend = TorchBackend(network, same, weights, _CPU, torch.float64)
    targets = (torch.arange(_STEPS) % 3).repeat(learners, 1)
    backend.advance(Chunk(0, targets, dense=normals(_STEPS, 6)), "cross_entropy", Tally.empty(learners))
    return torch.cat([p[0].flatten() for p in backend.parameters().values()])
