"""Assign learners and steps to clusters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["TELLS", "WAITS", "schedule"]

WAITS, TELLS = 1, 2


def schedule(learners: int, steps: int, pieces: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Share ``learners × steps`` among clusters.

    All learners' steps, laid end to end, are cut into pieces, one per cluster (McNaughton's rule). A learner that is cut
    takes its first steps at the beginning of one cluster's piece and the others at the end of the next one's, which waits for
    a signal that the first steps are done. It waits for a cluster with a smaller number, which the device starts no later, so
    there is no deadlock.

    Args:
        learners: number of learners.
        steps: number of steps of each.
        pieces: number of steps that each cluster computes; at least ``steps``, except for the first and the last cluster, so
            that each learner is cut only once.

    Returns:
        Segments ``(n, 4)``: learner, first step, step after the last, ``WAITS`` or ``TELLS`` or both; and the start of each
        cluster's segments, with one entry more than there are clusters.
    """
    every: list[list[tuple[int, int, int, int]]] = []
    begin = 0
    for piece in reversed(pieces):
        end = begin + piece
        own = []
        for learner in range(begin // steps, -(-end // steps)):
            # The line of a learner holds its steps from the last to the first, so later positions are computed earlier.
            low, high = max(begin, learner * steps), min(end, (learner + 1) * steps)
            first, stop = (learner + 1) * steps - high, (learner + 1) * steps - low
            flags = (WAITS if first > 0 else 0) | (TELLS if stop < steps else 0)
            own.append((learner, first, stop, flags))
        every.append(own)
        begin = end
    assert begin == learners * steps
    every.reverse()
    begins = np.cumsum([0, *(len(own) for own in every)]).astype(np.int32)
    return np.array([segment for own in every for segment in own], np.int32).reshape(-1, 4), begins
