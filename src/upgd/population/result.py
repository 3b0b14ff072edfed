"""The results of a population."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from upgd.population.spec import Learner

__all__ = ["Result"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Online metrics, averaged over windows of predictions made *before* each update: windows × learners.

    A diverged learner has NaN in the window in which it diverged and in all later ones.

    Attributes:
        learners: The columns, in the caller's order.
        window: Number of steps per window; only the last window may have fewer.
        ends: ``(windows,)``: number of steps at the end of each window.
        lengths: ``(windows,)``: number of steps in each window.
        loss: ``(windows, learners)``.
        accuracy: ``(windows, learners)``, the fraction of correct predictions; NaN for regression.
        diverged_at: ``(learners,)``: the step, from 0, at which the learner diverged; −1 if it did not.
        diagnostics: By name, ``(moments, learners)``, histograms ``(moments, learners, bins)``; empty if not requested.
        diagnosed_at: ``(moments,)``: number of steps at each snapshot.
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
        """``(learners,)``: the mean loss over all steps; NaN for diverged learners."""
        return self._mean(self.loss)

    @property
    def mean_accuracy(self) -> Floats:
        """``(learners,)``: the mean online accuracy over all steps; NaN for diverged learners."""
        return self._mean(self.accuracy)

    def _mean(self, curve: Floats) -> Floats:
        if not len(self.lengths):
            return np.full(len(self.learners), np.nan)
        mean: Floats = np.average(curve, axis=0, weights=self.lengths)
        return mean
