"""Sharing of a GPU among groups, without a GPU."""

import contextlib
from fractions import Fraction
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upgd.population.backend import Tally, finite_learners
from upgd.population.cuda import CudaBackend
from upgd.population.lanes import Lanes, Need, Sharing, shared
from upgd.streams.contract import Chunk

needs = st.lists(
    st.builds(Need, st.integers(1, 200), st.floats(0.1, 10), st.sampled_from([7, 15, 30])), min_size=1, max_size=7
)


@given(needs)
def test_every_group_gets_a_cluster_within_the_limit(groups: list[Need]) -> None:
    given = shared(groups)
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
    assert shared(groups) == clusters


def test_the_kernel_on_chip_can_share() -> None:
    assert all(hasattr(CudaBackend, name) for name in ("clusters", "prepare", "advance"))
    backend = object.__new__(CudaBackend)
    assert not isinstance(backend, Sharing)
    backend.cost, backend.size, backend.room = 1.0, 8, 15
    assert isinstance(backend, Sharing)


def test_kernels_of_several_groups_compile_at_once_and_once_only() -> None:
    all_compile = Barrier(3, timeout=10)

    class Compiling:
        times = 0

        def prepare(self, chunk: object, loss: object) -> None:
            all_compile.wait()
            self.times += 1

    lanes, groups = Lanes([], [], torch.device("cpu")), [Compiling() for _ in range(3)]
    lanes._prepare(groups, None, "cross_entropy")
    lanes._prepare(groups, None, "cross_entropy")
    assert [group.times for group in groups] == [1, 1, 1]


def test_groups_on_a_gpu_get_their_share_and_know_who_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Time:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, end: "Time") -> float:
            return 6.0

    class Group:
        fills_device, clusters, alive, size, room, cost = True, None, None, 8, 15, 1.0

        def prepare(self, chunk: Chunk, loss: str) -> None: ...

        def advance(self, chunk: Chunk, loss: str, tally: Tally) -> None:
            assert chunk.targets.is_contiguous()
            self.seen = self.clusters, self.alive.tolist(), chunk.targets.tolist()

    monkeypatch.setattr(torch.cuda, "Event", Time)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    groups, tallies = [Group(), Group(), Group()], Tally.empty(9).split([4, 3, 2])
    tallies[0].diverged_at[2] = 5
    tallies[2].diverged_at[:] = 5
    whole = Chunk(start=0, targets=torch.arange(12.0).view(2, 6, 1), dense=torch.zeros(2, 6, 4))
    Lanes(groups, tallies, torch.device("cuda")).advance(whole.narrow(2, 3), "mse")
    steps = whole.targets[:, 2:5].tolist()
    assert groups[0].seen == (3, [True, True, False, True], steps)
    assert groups[1].seen == (3, [True, True, True], steps)
    assert not hasattr(groups[2], "seen")  # all of its learners have diverged
    assert groups[0].cost == 6 / 3  # per step of a learner in one cluster


def test_groups_share_the_memory_of_one_tally() -> None:
    whole = Tally.empty(5)
    first, second = whole.split([2, 3])
    first.loss += 1
    second.correct[0] = 7
    second.diverged_at[2] = 9
    assert whole.loss.tolist() == [1, 1, 0, 0, 0]
    assert whole.correct.tolist() == [0, 0, 7, 0, 0]
    assert whole.diverged_at.tolist() == [-1, -1, -1, -1, 9]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(1, 0), (1, 11), (3, 5)])
def test_learners_with_a_number_that_is_not_finite_are_found(value: float, where: tuple[int, int]) -> None:
    flat = torch.arange(60.0).view(4, 15)
    weight, bias = flat.split([12, 3], 1)  # views with gaps, as on a GPU
    weight[where] = value
    expected = [i != where[0] for i in range(4)]
    assert finite_learners(weight.view(4, 3, 4), bias).tolist() == finite_learners(flat).tolist() == expected
