"""Division of a GPU among groups, on a simulated device."""

import heapq
import itertools
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upgd.population.cuda.schedule import TELLS, WAITS, schedule
from upgd.population.shares import Need, Share, laid, shared, whole

needs = st.lists(
    st.builds(Need, st.integers(1, 200), st.floats(0.1, 10), st.sampled_from([7, 15, 30])), min_size=1, max_size=7
)
alike = st.lists(st.builds(Need, st.integers(1, 30), st.floats(0.1, 2), st.just(15)), min_size=1, max_size=25)
of_two_sizes = st.lists(
    st.builds(Need, st.integers(1, 30), st.floats(0.1, 2), st.sampled_from([15, 7])), min_size=1, max_size=12
)

#: The parts of an H200 that hold clusters of multiprocessors: 15 clusters of 8 fit, or 7 of 16.
PARTS = (16, 16, 16, 16, 16, 18, 18, 15)
SIZES = {15: 8, 7: 16}


class Run(NamedTuple):
    """Some steps of a learner on a simulated cluster."""

    begin: float
    end: float
    group: int
    learner: int
    first: int
    stop: int


class Cluster:
    """A cluster that is running, with the segments it has not finished."""

    def __init__(self, part: int, size: int, group: int, cost: float, segments: Sequence[Sequence[int]]) -> None:
        self.part, self.size, self.group, self.cost, self.left = part, size, group, cost, list(segments)


def simulated(needs: Sequence[Need], shares: Sequence[Share], steps: int, random: Random | None) -> list[Run]:
    """Return what a device computes, which starts launches in order or, at random, in any order whenever there is room."""
    launches = []
    for prompt in (True, False):
        order = sorted(range(len(needs)), key=lambda n: needs[n].room if prompt else shares[n].late or 0.0)
        for n in order:
            segments, begins = schedule(needs[n].learners, steps, shares[n].pieces)
            clusters = [segments[a:b].tolist() for a, b in itertools.pairwise(begins)]
            launches.append((n, clusters[: shares[n].prompt] if prompt else clusters[shares[n].prompt :]))
    free, now, runs = list(PARTS), 0.0, []
    told = set[tuple[int, int]]()
    waiting: list[Cluster] = []
    busy: list[tuple[float, int, Cluster]] = []
    number = itertools.count()

    def go_on(cluster: Cluster) -> None:
        if not cluster.left:
            free[cluster.part] += cluster.size
            return
        learner, first, stop, flags = cluster.left[0]
        if flags & WAITS and (cluster.group, learner) not in told:
            waiting.append(cluster)
            return
        end = now + (stop - first) * cluster.cost
        runs.append(Run(now, end, cluster.group, learner, first, stop))
        heapq.heappush(busy, (end, next(number), cluster))

    while True:
        if random:
            random.shuffle(launches)
        for n, clusters in launches:
            size = SIZES[needs[n].room]
            while clusters and (parts := [part for part, room in enumerate(free) if room >= size]):
                part = random.choice(parts) if random else min(parts, key=lambda part: free[part])
                free[part] -= size
                go_on(Cluster(part, size, n, needs[n].cost, clusters.pop(0)))
                if random:
                    break
        if random and any(clusters and max(free) >= SIZES[needs[n].room] for n, clusters in launches):
            continue
        if not busy:
            break
        now, _, cluster = heapq.heappop(busy)
        learner, _, _, flags = cluster.left.pop(0)
        if flags & TELLS:
            told.add((cluster.group, learner))
            again = [own for own in waiting if (own.group, own.left[0][0]) in told]
            waiting[:] = [own for own in waiting if own not in again]
            for own in again:
                go_on(own)
        go_on(cluster)
    assert not waiting, "deadlock"
    assert not any(clusters for _, clusters in launches)
    return runs


def assert_complete(runs: Sequence[Run], needs: Sequence[Need], steps: int) -> None:
    """Every step of every learner ran once, after the step before it."""
    taken: dict[tuple[int, int], tuple[int, float]] = {}
    for run in sorted(runs):
        before, until = taken.get((run.group, run.learner), (0, 0.0))
        assert (run.first, run.begin >= until) == (before, True)
        taken[run.group, run.learner] = run.stop, run.end
    assert taken.keys() == {(n, learner) for n, need in enumerate(needs) for learner in range(need.learners)}
    assert {stop for stop, _ in taken.values()} == {steps}


@settings(max_examples=60)
@given(alike, st.integers(1, 400))
def test_groups_laid_end_to_end_end_together(groups: list[Need], steps: int) -> None:
    shares = laid(groups, 15, steps)
    assert sum(share.prompt for share in shares) <= 15
    # Fewer kernels may wait for others than there are clusters.
    assert sum(share.late is not None and share.prompt > 0 for share in shares) < 15
    for need, share in zip(groups, shares, strict=True):
        assert sum(share.pieces) == need.learners * steps
        assert min(share.pieces[1:-1], default=steps) >= steps  # so each learner is cut only once
    runs = simulated(groups, shares, steps, None)
    assert_complete(runs, groups, steps)
    work = sum(need.learners * need.cost for need in groups)
    ideal = steps * max(work / 15, max(need.cost for need in groups))
    # Clusters are filled with whole steps, up to one too many; a cut learner waits for its first steps as long.
    assert max(run.end for run in runs) <= ideal + 3 * max(need.cost for need in groups)


@settings(max_examples=60)
@given(of_two_sizes, st.integers(1, 400), st.booleans(), st.randoms(use_true_random=False))
def test_no_order_of_launches_leads_to_deadlock(
    groups: list[Need], steps: int, fractions: bool, random: Random
) -> None:
    shares = shared(tuple(groups), steps, fractions)
    assert_complete(simulated(groups, shares, steps, random), groups, steps)
    assert_complete(simulated(groups, shares, steps, None), groups, steps)


def makespan(groups: Sequence[Need], steps: int, fractions: bool) -> float:
    runs = simulated(groups, shared(tuple(groups), steps, fractions), steps, None)
    return max(run.end for run in runs)


def test_fractions_save_the_time_of_idle_clusters() -> None:
    groups = [Need(8, 0.0112, 15), Need(8, 0.0126, 15), Need(8, 0.0126, 15)]
    assert makespan(groups, 1000, False) == pytest.approx(1600 * 0.0126)
    assert makespan(groups, 1000, True) == pytest.approx(8000 * (0.0112 + 2 * 0.0126) / 15, rel=2e-3)


@pytest.mark.parametrize(
    ("groups", "steps"),
    [
        ([Need(8, 0.0112, 15), Need(8, 0.0126, 15), Need(8, 0.0126, 15)], 50),  # short
        ([Need(8, 0.0126, 15)] * 3, 10_000),  # nothing to save
        ([Need(1, 0.01 + n / 1000, 15) for n in range(15)], 10_000),  # a learner is on one cluster at a time
        ([Need(2, 0.0112, 15), Need(2, 0.0126, 15)], 10_000),  # few learners
    ],
)
def test_clusters_remain_whole_if_fractions_save_no_time(groups: list[Need], steps: int) -> None:
    assert shared(tuple(groups), steps, True) == shared(tuple(groups), steps, False)
    assert all(share.late is None for share in shared(tuple(groups), steps, True))


@given(needs)
def test_every_group_gets_a_cluster_within_the_limit(groups: list[Need]) -> None:
    given = whole(groups)
    assert all(1 <= count <= max(1, need.learners) for count, need in zip(given, groups, strict=True))
    taken = [Fraction(count, need.room) for count, need in zip(given, groups, strict=True)]
    assert sum(taken) <= 1 or set(given) == {1}
    # No room is left for groups with waiting learners.
    waits = [need for count, need in zip(given, groups, strict=True) if count < need.learners]
    assert all(sum(taken) + Fraction(1, need.room) > 1 for need in waits)


@pytest.mark.parametrize(
    ("groups", "clusters"),
    [
        ([Need(150, 1.0, 15)], [15]),
        ([Need(8, 1.0, 15)] * 3, [5, 5, 5]),
        ([Need(8, 1.0, 15), Need(8, 4.0, 15)], [7, 8]),
        ([Need(30, 1.0, 15), Need(30, 4.0, 15)], [3, 12]),
        ([Need(30, 1.0, 15), Need(30, 1.0, 7)], [6, 4]),
        ([Need(1, 1.0, 15)] * 20, [1] * 20),
    ],
)
def test_the_slowest_group_gets_most_clusters(groups: list[Need], clusters: list[int]) -> None:
    assert whole(groups) == clusters
