"""What a population has shown."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from upgd.population.spec import Learner

__all__ = ["Result"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Online metrics, each the mean over a window of the prediction made *before* the update: windows × learners.

    A learner that has diverged has NaN in the window in which it happened and in all later ones.

    Attributes:
        learners: the columns, in the caller's order.
        window: how many steps a window has; only the last may have fewer.
        ends: ``(windows,)``: how many steps had been taken when the window ended.
        lengths: ``(windows,)``: how many steps it has.
        loss: ``(windows, learners)``.
        accuracy: ``(windows, learners)``, the share of right predictions; NaN in regression.
        diverged_at: ``(learners,)``: the step, from 0, at which the learner stopped to be finite; −1 if it never did.
        diagnostics: by name ``(moments, learners)``, histograms ``(moments, learners, bins)``; empty if nobody asked.
        diagnosed_at: ``(moments,)``: how many steps had been taken then.
    """

    learners: tuple[Learner, ...]
    window: int
    ends: Integers
    lengths: Integers
    loss: Floats
    accuracy: Floats
    diverged_at: Integers
    diagnostics: dict[str, Floats] = field(default_factory=dict)
    diagnosed_at: Integers = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def last_is_short(self) -> bool:
        """Whether the last window has fewer steps than the others."""
        return bool(len(self.lengths) and self.lengths[-1] < self.window)

    @property
    def mean_loss(self) -> Floats:
        """``(learners,)``: the mean over all steps; NaN for a learner that diverged."""
        return self._mean(self.loss)

    @property
    def mean_accuracy(self) -> Floats:
        """``(learners,)``: the average online accuracy over all steps; NaN for a learner that diverged."""
        return self._mean(self.accuracy)

    def _mean(self, curve: Floats) -> Floats:
        if not len(self.lengths):
            return np.full(len(self.learners), np.nan)
        mean: Floats = np.average(curve, axis=0, weights=self.lengths)
        return mean
