"""The scalars of a generated rule, evaluated for many steps at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from upgd.methods._scalars import Scalar, evaluate

__all__ = ["Ahead"]


class Ahead:
    """Evaluates the scalars of a rule for all learners, ahead of the steps that need them.

    Each scalar takes several small kernels, which in short blocks take longer than the steps. Results do not depend on how
    far ahead they are computed.

    Args:
        scalars: the expressions.
        values: ``(learners, 1)`` hyperparameters by name, on the device.
        learners: number of learners.
        device: where the results are needed.
    """

    STEPS = 4096
    BYTES = 32 << 20

    def __init__(
        self, scalars: Sequence[Scalar], values: Mapping[str, Tensor], learners: int, device: torch.device
    ) -> None:
        self._scalars, self._values, self._learners, self._device = scalars, values, learners, device
        self._start = 0
        self._table = torch.empty(learners, 0, len(scalars), device=device)

    def table(self, start: int, length: int) -> Tensor:
        """Return the scalars of ``length`` steps from ``start``, counted from 0: ``(learners, steps, scalars)``."""
        offset = start - self._start
        if offset < 0 or offset + length > self._table.shape[1]:
            room = self.BYTES // max(1, 4 * self._learners * len(self._scalars))
            self._start, offset = start, 0
            self._table = self._evaluated(start, max(length, min(room, self.STEPS)))
        return self._table.narrow(1, offset, length)

    def _evaluated(self, start: int, length: int) -> Tensor:
        steps = torch.arange(start + 1, start + length + 1, dtype=torch.float64, device=self._device)
        like = torch.zeros(self._learners, length, dtype=torch.float64, device=self._device)
        known = {**self._values, "t": steps}
        return torch.stack([evaluate(scalar, known, like).to(torch.float32) for scalar in self._scalars], -1)
