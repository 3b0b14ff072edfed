"""Which cluster takes which learner through which steps."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["TELLS", "WAITS", "schedule"]

WAITS, TELLS = 1, 2


def schedule(learners: int, steps: int, clusters: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Share ``learners × steps`` fairly among clusters that work at the same time.

    All learners' steps, laid end to end, are cut into equal pieces, one for each cluster (McNaughton's rule): so no cluster
    idles while another one has a learner to go. A learner that is cut takes its first steps at the beginning of one
    cluster's piece and the others at the end of the next one's, which waits until it is told that the first are done. It
    waits for a cluster with a smaller number, which the device started no later; so it never waits in vain.

    Args:
        learners: how many.
        steps: of each.
        clusters: how many the device runs at once.

    Returns:
        Segments ``(n, 4)``: learner, first step, step after the last, ``WAITS`` or ``TELLS`` or both; and where each
        cluster's segments begin, one entry more than there are clusters at work.
    """
    clusters = min(clusters, learners)
    piece = max(steps, -(-learners * steps // clusters))
    pieces: list[list[tuple[int, int, int, int]]] = []
    for begin in range(0, learners * steps, piece):
        end = min(begin + piece, learners * steps)
        own = []
        for learner in range(begin // steps, -(-end // steps)):
            # What comes later on the line is done earlier: a learner's line is its steps from the last to the first.
            low, high = max(begin, learner * steps), min(end, (learner + 1) * steps)
            first, stop = (learner + 1) * steps - high, (learner + 1) * steps - low
            flags = (WAITS if first > 0 else 0) | (TELLS if stop < steps else 0)
            own.append((learner, first, stop, flags))
        pieces.append(own)
    pieces.reverse()
    begins = np.cumsum([0, *(len(own) for own in pieces)]).astype(np.int32)
    return np.array([segment for own in pieces for segment in own], np.int32).reshape(-1, 4), begins
