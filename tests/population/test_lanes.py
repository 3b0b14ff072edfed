"""Sharing of a GPU among groups, without a GPU."""

import contextlib
from collections.abc import Iterator
from threading import Barrier

import pytest
import torch

from upgd.population.backend import Tally, finite_learners
from upgd.population.cuda import CudaBackend
from upgd.population.lanes import Lanes, Sharing
from upgd.population.shares import Need, Share, shared
from upgd.streams.contract import Chunk


def test_the_kernel_on_chip_can_share() -> None:
    assert all(hasattr(CudaBackend, name) for name in ("alive", "prepare", "ready"))
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


class Device:
    """Stands for a GPU: what was started, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, str, int, int]] = []
        device, self.current = self, ""

        class Time:
            def __init__(self, **_: object) -> None:
                self.recorded = False

            def record(self) -> None:
                self.recorded = True

            def elapsed_time(self, end: "Time") -> float:
                return 6.0

        class Stream:
            count = 0

            def __init__(self, _: torch.device) -> None:
                self.name = f"stream {Stream.count}"
                Stream.count += 1

            def wait_event(self, event: Time) -> None:
                assert event.recorded

        @contextlib.contextmanager
        def current(stream: Stream) -> Iterator[None]:
            device.current = stream.name
            yield
            device.current = ""

        monkeypatch.setattr(torch.cuda, "Event", Time)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", current)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


class OnChip:
    """Stands for the backend on chip."""

    fills_device, alive, size, room = True, None, 8, 15

    def __init__(self, device: Device, number: int, cost: float) -> None:
        self.device, self.number, self.cost = device, number, cost

    def prepare(self, chunk: Chunk, loss: str) -> None: ...

    def ready(self, chunk: Chunk, loss: str, tally: Tally, pieces: tuple[int, ...]) -> "OnChip":
        assert chunk.targets.is_contiguous()
        self.seen = pieces, self.alive.tolist(), chunk.targets.tolist()
        return self

    def start(self, first: int, stop: int) -> None:
        self.device.started.append((self.number, self.device.current, first, stop))


def test_groups_on_a_gpu_get_their_share_and_know_who_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    groups, tallies = [OnChip(device, number, 1.0) for number in range(3)], Tally.empty(9).split([4, 3, 2])
    tallies[0].diverged_at[2] = 5
    tallies[2].diverged_at[:] = 5
    whole = Chunk(start=0, targets=torch.arange(12.0).view(2, 6, 1), dense=torch.zeros(2, 6, 4))
    Lanes(groups, tallies, torch.device("cuda")).advance(whole.narrow(2, 3), "mse")
    steps = whole.targets[:, 2:5].tolist()
    assert groups[0].seen == ((3, 3, 3), [True, True, False, True], steps)
    assert groups[1].seen == ((3, 3, 3), [True, True, True], steps)
    assert device.started == [(0, "stream 0", 0, 3), (1, "stream 1", 0, 3)]
    assert not hasattr(groups[2], "seen")  # all of its learners have diverged
    assert groups[0].cost == 6 / 3  # per step of a learner in one cluster


def test_groups_follow_each_other_on_a_cluster_once_their_costs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    groups = [OnChip(device, number, 1.0) for number in range(3)]
    lanes = Lanes(groups, Tally.empty(24).split([8, 8, 8]), torch.device("cuda"))
    chunk = Chunk(start=0, targets=torch.zeros(1, 100, 1), dense=torch.zeros(1, 100, 4))
    lanes.advance(chunk, "mse")
    assert [first for *_, first, _ in device.started] == [0, 0, 0]  # whole clusters
    assert {group.cost for group in groups} == {6.0 / 160}
    groups[0].cost, groups[1].cost, groups[2].cost = 0.88, 1.0, 1.0
    device.started.clear()
    lanes.advance(chunk, "mse")
    shares = shared(tuple(Need(8, cost, 15) for cost in (0.88, 1.0, 1.0)), 100, True)
    assert [group.seen[0] for group in groups] == [share.pieces for share in shares]
    prompt, late = device.started[:3], device.started[3:]
    assert [(number, first, stop) for number, _, first, stop in prompt] == [(n, 0, shares[n].prompt) for n in range(3)]
    by_time = sorted((share.late, n) for n, share in enumerate(shares) if share.late is not None)
    assert len(by_time) == 2
    assert [(number, stop - first) for number, _, first, stop in late] == [(n, 1) for _, n in by_time]
    assert len({stream for _, stream, _, _ in device.started}) == 5  # all run concurrently


@pytest.mark.parametrize(
    ("pieces", "late", "milliseconds", "cost"),
    [
        ((150, 160, 30), 1.0, 320.0, 2.0),  # the longest piece that starts at once
        ((160, 160), None, 160.9, 1.0),  # a change of less than 1 %
        ((90, 160), 1.0, 320.0, 1.0),  # fewer steps than those of a learner
        ((160,), 1.0, 320.0, 1.0),  # it starts at an unknown time
    ],
)
def test_costs_are_measured(pieces: tuple[int, ...], late: float | None, milliseconds: float, cost: float) -> None:
    lanes, group = Lanes([], [], torch.device("cpu")), OnChip(None, 0, 1.0)
    lanes._measured.add(0)
    lanes._measure(0, group, Share(pieces, late), milliseconds, 100)
    assert group.cost == cost


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
