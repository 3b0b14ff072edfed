"""What the engine and a backend say to each other.

The engine (:mod:`upgd.population.engine`) splits a population into groups of learners whose computation has the same
shape (:class:`Kind`), makes their initial parameters, fetches blocks of the stream, and keeps windows and results. A
backend advances one group through one block of steps. It knows nothing of windows, files, progress or other groups::

    backend = SomeBackend(network, group, parameters, device, dtype)
    for block in blocks:                          # in order, without gaps; any lengths
        backend.advance(checked_chunk(stream, ...), stream.loss, tally)

The tensors of a chunk are what :class:`upgd.streams.Chunk` says: the engine has seen to it, and no backend looks again.

What every backend owes:

- **Chunking must not show.** ``advance`` over steps 0…99 gives bit for bit what two calls over 0…49 and 50…99 give. So
  sums are added to the tally step by step, in order, and nothing depends on where a block begins.
- **The learner's own steps count from 1.** The sample at stream step ``s`` = ``chunk.start + offset`` is the learner's
  step ``t = s + 1``: in ``βᵗ``, in AdamW's bias correction, and in the noise, ``upgd.noise.learner_normals(seed, t, …)``.
  Its index counts through the parameters flattened and joined in the order of ``network.parameters()``, also where a
  method gives some of them no noise (feature-wise: the output layer).
- **A diverged learner is left alone.** At the first step whose loss is not finite, write that stream step into
  ``tally.diverged_at`` and skip this update and all later ones: the parameters stay what they were when they gave that
  loss. A learner that comes with ``diverged_at ≥ 0`` is frozen already (the engine may have frozen it). What a
  frozen learner adds to the sums is never looked at. Its neighbours must not notice: not one bit.
- **No host synchronisation inside a block.** Everything that a step leaves behind stays on the device, in the tally.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from upgd.methods import Method
from upgd.streams.contract import Chunk, Loss

__all__ = ["Backend", "Group", "Kind", "Loss", "Tally"]


class Kind(NamedTuple):
    """What decides the shape of a learner's computation; learners of one kind run side by side.

    Settings that the rule does not have are at the default written first, so that equal computations have equal kinds.
    """

    rule: str  #: :attr:`upgd.methods.Method.rule`: ``plain`` (SGD, PGD …), ``utility`` (UPGD, UPS …), ``adamw``, or another
    granularity: Literal["weight", "feature"] = "weight"
    scaling: Literal["global", "local"] = "global"
    order: Literal[1, 2] = 1
    noise: Literal["none", "white", "anticorrelated"] = "none"  #: none where σ = 0
    normalize: bool = False  #: whether inputs are normalized online
    gated: str = "all"  #: which layers have gates
    others: tuple[tuple[str, Any], ...] = ()  #: the method's other settings that are no numbers

    @property
    def is_common(self) -> bool:
        """Whether the methods' own settings are all there is: nothing is normalized, and all layers are gated."""
        return not self.normalize and self.gated == "all" and not self.others


@dataclass(frozen=True)
class Group:
    """Learners of one kind: settings as vectors with one entry per learner, float64 on the CPU (seeds and rows: int64)."""

    kind: Kind
    method: Method  #: the rule, in the variant that the kind says
    seeds: Tensor
    rows: Tensor  #: the learner sees row ``rows[i]`` of every chunk (learners with the same seed share a row)
    values: Mapping[str, Tensor]  #: what the rule sees as ``h``: numeric settings and constants by name

    def __len__(self) -> int:
        return len(self.seeds)

    def value(self, name: str, otherwise: float = 0.0) -> Tensor:
        """A setting of all learners; ``otherwise`` where the method does not have it."""
        return self.values[name] if name in self.values else torch.full((len(self),), otherwise, dtype=torch.float64)


@dataclass
class Tally:
    """What a group's learners have shown since the current window began; made by the engine, added to by the backend.

    The prediction is judged before the update. The tensors live on the backend's device and are changed in place.
    """

    loss: Tensor  #: (learners,) float64: sum of the losses, added step by step
    correct: Tensor  #: (learners,) int64: how often the (first) largest output was the target's; mse: unused
    diverged_at: Tensor  #: (learners,) int64: the stream step (from 0) whose loss was not finite; −1: none so far

    @classmethod
    def empty(cls, learners: int, device: torch.device | str = "cpu") -> "Tally":
        return cls(
            torch.zeros(learners, dtype=torch.float64, device=device),
            torch.zeros(learners, dtype=torch.int64, device=device),
            torch.full((learners,), -1, dtype=torch.int64, device=device),
        )


class Backend(Protocol):
    """Advances one group. :mod:`upgd.population.kernel` and :mod:`upgd.population.cuda` offer a class of this form each, and
    a function::

        def unsupported(network: nn.Module, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None

    that gives ``None`` if the class can run this, or else the reason, to be read by the user after "because". The one for
    GPUs takes the whole group in the place of its kind.
    """

    #: Whether ``advance`` leaves no room on the device for another group's.
    fills_device: bool

    def __init__(
        self,
        network: torch.nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take the learners' initial parameters, ``{name: (learners, *shape)}`` in the order of
        ``network.named_parameters()``; they are copied, not kept."""

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and add to the tally."""

    def parameters(self) -> dict[str, Tensor]:
        """The learners' parameters now, ``{name: (learners, *shape)}``, to look at before the next call: copied only if the
        backend keeps them in another form."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on, as copies, each ``(learners, …)`` in the backend's dtype.

        The names are the same for all backends, so that one may go on where another stopped:
        ``parameters.NAME`` for every parameter; and for every tensor of the method's state, such as ``utility``,
        ``utility.NAME``: of the parameter ``NAME``, or, if units have it, of the units whose incoming weights are ``NAME``,
        ``(learners, units)``. Where inputs are normalized: ``normalizer.mean`` and ``normalizer.variance``.
        """

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
