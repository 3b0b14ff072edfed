"""Division of a GPU's clusters of multiprocessors among groups of learners that run concurrently."""

import functools
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Need", "Share", "laid", "shared", "whole"]

#: Clusters are divided among groups only if this saves more time per block: so many milliseconds plus this fraction.
_SAVED, _FRACTION = 0.1, 0.02


class Need(NamedTuple):
    """The requirements of a group."""

    learners: int  #: number of learners that have not diverged
    cost: float  #: of a learner's step in one cluster, in milliseconds
    room: int  #: number of clusters available to the group alone; fewer if they are larger


class Share(NamedTuple):
    """The clusters of a group during a block."""

    #: Number of steps of all its learners that each of its clusters computes, in the order in which the clusters start.
    pieces: tuple[int, ...]
    #: When the last piece starts, on a cluster that other groups use before; None if it starts with the others.
    late: float | None = None

    @property
    def prompt(self) -> int:
        """The number of clusters that start at once."""
        return len(self.pieces) - (self.late is not None)


@functools.lru_cache(maxsize=256)
def shared(needs: tuple[Need, ...], steps: int, fractions: bool) -> tuple[Share, ...]:
    """Return each group's clusters for a block, such that all groups end at about the same time.

    Groups get whole numbers of clusters, unless fractions save time. Only groups with clusters of the same size can use a
    cluster one after another.

    Args:
        needs: the groups.
        steps: number of steps of the block.
        fractions: whether fractions are allowed; costs must have been measured.
    """
    apart = tuple(laid([need], count, steps)[0] for need, count in zip(needs, whole(needs), strict=True))
    if not fractions:
        return apart
    sizes = [[at for at, need in enumerate(needs) if need.room == room] for room in {need.room: None for need in needs}]
    classes = [[needs[at] for at in size] for size in sizes]
    counts = whole([_together(own) for own in classes])
    longest = max(need.cost * max(share.pieces) for need, share in zip(needs, apart, strict=True))
    together = max(_length(own, count, steps) for own, count in zip(classes, counts, strict=True))
    if longest < (1 + _FRACTION) * together + _SAVED:
        return apart
    made = dict[int, Share]()
    for size, own, count in zip(sizes, classes, counts, strict=True):
        made |= zip(size, laid(own, count, steps), strict=True)
    return tuple(made[at] for at in range(len(needs)))


def whole(needs: Sequence[Need]) -> list[int]:
    """Return the number of clusters for each group that minimizes the total time: one each, then one more for the group that
    would take longest, as long as there is room.

    >>> whole([Need(8, 1.0, 15), Need(8, 1.0, 15), Need(8, 3.0, 15)])
    [4, 3, 8]
    """
    # In units of which one cluster of every size takes a whole number.
    every = math.lcm(*(need.room for need in needs))
    given, taken = [1] * len(needs), sum(every // need.room for need in needs)
    slowest = [(-need.cost * need.learners, at) for at, need in enumerate(needs)]
    heapq.heapify(slowest)
    while slowest:
        _, at = slowest[0]
        need = needs[at]
        if given[at] >= need.learners or taken + every // need.room > every:
            heapq.heappop(slowest)  # for good: there is never more room
            continue
        given[at] += 1
        taken += every // need.room
        heapq.heapreplace(slowest, (-need.cost * need.learners / given[at], at))
    return given


def laid(needs: Sequence[Need], clusters: int, steps: int) -> list[Share]:
    """Lay the learners of all groups end to end on clusters of one size, each filled until the same time (McNaughton's rule).

    A group that begins in the middle of a cluster gets the rest of it, as its last piece, and continues at the beginning of
    the next cluster. At most one group per cluster continues, and none on the last, so these are fewer than the clusters.

    >>> laid([Need(2, 1.0, 3), Need(2, 1.2, 3)], 3, 60)
    [Share(pieces=(32, 88), late=None), Share(pieces=(73, 47), late=32.0)]
    """
    length = _length(needs, clusters, steps)
    shares = []
    filled = 0.0
    for need in needs:
        late = filled or None
        line = []
        left = need.learners * steps
        while left:
            # A cluster that a group has for itself has room for a whole learner, so that each learner is cut only once.
            room = math.ceil((length - filled) / need.cost)
            line.append(min(left, room))
            filled = 0.0 if left >= room else filled + left * need.cost
            left -= line[-1]
        shares.append(Share(tuple(reversed(line)), late))
    return shares


def _together(needs: Sequence[Need]) -> Need:
    learners = sum(need.learners for need in needs)
    return Need(learners, sum(need.learners * need.cost for need in needs) / learners, needs[0].room)


def _length(needs: Sequence[Need], clusters: int, steps: int) -> float:
    """Return the shortest possible time for the steps of all groups; a learner is on one cluster at a time."""
    work = sum(need.learners * need.cost for need in needs)
    # Divide last, so that whole numbers are exact: a rounding error would give every cluster one more step.
    return max(steps * work / clusters, steps * max(need.cost for need in needs))
