"""The interface between the engine and a backend.

The engine (:mod:`upgd.population.engine`) splits a population into groups of learners whose computation has the same
shape (:class:`Kind`), creates their initial parameters, fetches blocks of the stream, and collects windows and results. A
backend advances one group through one block of steps. It does not handle windows, files, progress or other groups::

    backend = SomeBackend(network, group, parameters, device, dtype)
    for block in blocks:                          # in order, without gaps; any lengths
        backend.advance(checked_chunk(stream, ...), stream.loss, tally)

The engine validates chunks against :class:`upgd.streams.Chunk`, so backends need not check them again.

Every backend must satisfy the following:

- **Results do not depend on chunking.** ``advance`` over steps 0…99 gives bitwise the same result as two calls over 0…49 and
  50…99. Sums are therefore added to the tally step by step, in order, and nothing depends on where a block starts.
- **A learner's steps are counted from 1.** The sample at stream step ``s`` = ``chunk.start + offset`` is the learner's step
  ``t = s + 1``: in ``βᵗ``, in AdamW's bias correction, and in the noise, ``upgd.noise.learner_normals(seed, t, …)``. The
  index of the noise counts through the parameters flattened and concatenated in the order of ``network.parameters()``, even
  if a method applies no noise to some of them (feature-wise: the output layer).
- **Diverged learners are frozen.** At the first step whose loss is not finite, write that stream step to
  ``tally.diverged_at`` and skip this update and all later ones: the parameters stay as they were when they gave that loss. A
  learner with ``diverged_at ≥ 0`` is already frozen (possibly by the engine). What a frozen learner adds to the sums is
  ignored. Other learners must not be affected, not even in the last bit.
- **No host synchronization inside a block.** All results of a step stay on the device, in the tally.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from upgd.methods import Method
from upgd.streams.contract import Chunk, Loss

__all__ = ["Backend", "Group", "Kind", "Loss", "Tally", "finite_learners"]


class Kind(NamedTuple):
    """Everything that determines the shape of a learner's computation; learners of one kind run in one batch.

    Fields that do not apply to the rule have their default, so that equal computations have equal kinds.
    """

    rule: str  #: :attr:`upgd.methods.Method.rule`: ``plain`` (SGD, PGD …), ``utility`` (UPGD, UPS …), ``adamw``, or another
    granularity: Literal["weight", "feature"] = "weight"
    scaling: Literal["global", "local"] = "global"
    order: Literal[1, 2] = 1
    noise: Literal["none", "white", "anticorrelated"] = "none"  #: none if σ = 0
    normalize: bool = False  #: whether inputs are normalized online
    gated: str = "all"  #: the layers with gates
    others: tuple[tuple[str, Any], ...] = ()  #: the method's other non-numeric settings


@dataclass(frozen=True)
class Group:
    """Learners of one kind, with settings as vectors of one entry per learner, float64 on the CPU (seeds and rows: int64)."""

    kind: Kind
    method: Method  #: the rule, in the variant given by the kind
    seeds: Tensor
    rows: Tensor  #: learner ``i`` uses row ``rows[i]`` of every chunk (learners with the same seed share a row)
    values: Mapping[str, Tensor]  #: numeric settings and constants by name; passed to the rule as ``h``

    def __len__(self) -> int:
        return len(self.seeds)

    def value(self, name: str, otherwise: float = 0.0) -> Tensor:
        """Return a setting of all learners, or ``otherwise`` if the method does not have it."""
        return self.values[name] if name in self.values else torch.full((len(self),), otherwise, dtype=torch.float64)


@dataclass
class Tally:
    """Metrics of a group's learners since the start of the current window; created by the engine, updated by the backend.

    Predictions are evaluated before the update. The tensors are on the backend's device and are modified in place.
    """

    loss: Tensor  #: (learners,) float64: sum of the losses, added step by step
    correct: (
        Tensor  #: (learners,) int64: number of steps whose (first) largest output is the target class; unused for mse
    )
    diverged_at: Tensor  #: (learners,) int64: the stream step (from 0) whose loss was not finite; −1 if none

    @classmethod
    def empty(cls, learners: int, device: torch.device | str = "cpu") -> "Tally":
        return cls(
            torch.zeros(learners, dtype=torch.float64, device=device),
            torch.zeros(learners, dtype=torch.int64, device=device),
            torch.full((learners,), -1, dtype=torch.int64, device=device),
        )

    def split(self, sizes: Sequence[int]) -> "list[Tally]":
        """Return the tallies of consecutive groups, which share their memory with this one."""
        fields = (self.loss, self.correct, self.diverged_at)
        return [Tally(*parts) for parts in zip(*(torch.split(field, list(sizes)) for field in fields), strict=True)]


def finite_learners(*parameters: Tensor) -> Tensor:
    """Return whether each learner's row of every tensor is finite."""
    # Few operations, as this follows every window. NaN is both the smallest and the largest of its row, and compares false.
    extremes = [p.flatten(1).aminmax(dim=1) for p in parameters if p.numel()]
    finite = [(low > -math.inf) & (high < math.inf) for low, high in extremes]
    return finite[0] if len(finite) == 1 else torch.stack(finite).all(0)


class Backend(Protocol):
    """Advances one group. :mod:`upgd.population.kernel` and :mod:`upgd.population.cuda` each provide a class of this form and
    a function::

        def unsupported(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> str | None

    that returns ``None`` if the class can run the group, or else the reason, worded to follow "because".
    """

    #: Whether ``advance`` fills the device, so that no other group can run at the same time.
    fills_device: bool

    def __init__(
        self,
        network: torch.nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Initialize with the learners' parameters, ``{name: (learners, *shape)}`` in the order of
        ``network.named_parameters()``; they are copied."""

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""

    def parameters(self) -> dict[str, Tensor]:
        """Return the learners' current parameters, ``{name: (learners, *shape)}``, valid until the next call. They are copied
        only if the backend stores them in another form."""
        ...

    def finite(self) -> Tensor:
        """Return whether all parameters of each learner are finite, ``(learners,)`` bool."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume, as copies, each ``(learners, …)`` in the backend's dtype.

        All backends use the same names, so that one can resume from the state of another: ``parameters.NAME`` for every
        parameter; and for every tensor of the method's state, such as ``utility``, ``utility.NAME`` for the parameter
        ``NAME`` or, for units, for those with the incoming weights ``NAME``, ``(learners, units)``. With input
        normalization, also ``normalizer.mean`` and ``normalizer.variance``.
        """

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
