"""The launches of the kernel on chip, without a GPU."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from upgd.population.backend import Tally
from upgd.population.cuda import backend as on_chip
from upgd.population.cuda.schedule import schedule
from upgd.population.shares import Need, laid
from upgd.streams.contract import Chunk

CPU = torch.device("cpu")
LEARNERS, STEPS, CLUSTERS = 7, 5, 3
CHUNK = Chunk(start=0, targets=torch.zeros(1, STEPS, 1), dense=torch.zeros(1, STEPS, 4), white=255)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The segments of every launch, read from the addresses that the kernel gets."""
    seen = []

    def launch(clusters: int, arguments: ctypes.Structure, stream: int) -> None:
        begins = np.ctypeslib.as_array(ctypes.cast(arguments.begins, ctypes.POINTER(ctypes.c_int32)), (clusters + 1,))
        address = ctypes.cast(arguments.segments, ctypes.POINTER(ctypes.c_int32))
        seen.append(np.ctypeslib.as_array(address, (begins[-1], 4))[begins[0] :].copy())

    monkeypatch.setattr(on_chip, "_kernel", lambda *of: SimpleNamespace(active=CLUSTERS, launch=launch))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return seen


def _backend() -> on_chip.CudaBackend:
    backend = object.__new__(on_chip.CudaBackend)
    backend._device, backend._ahead, backend._telling = CPU, None, 0
    backend._plan = SimpleNamespace(cluster=1, far_floats=0, program=None)
    for name in ("_far", "_words", "_scales", "_units", "_inputs", "_settings", "_told"):
        setattr(backend, name, torch.zeros(LEARNERS))
    return backend


def _pieces(learners: int) -> tuple[int, ...]:
    return laid([Need(learners, 1.0, CLUSTERS)], CLUSTERS, STEPS)[0].pieces


def _advanced(diverged: list[int]) -> None:
    tally = Tally.empty(LEARNERS)
    tally.diverged_at[diverged] = 2
    _backend().advance(CHUNK, "mse", tally)


def test_the_kernel_gets_the_schedule_of_all_learners(launches: list[np.ndarray]) -> None:
    _advanced([])
    (segments,) = launches
    assert np.array_equal(segments, schedule(LEARNERS, STEPS, _pieces(LEARNERS))[0])


def test_diverged_learners_are_left_out_of_the_schedule(launches: list[np.ndarray]) -> None:
    _advanced([0, 3, 6])
    (segments,) = launches
    wanted = schedule(4, STEPS, _pieces(4))[0]
    assert segments[:, 0].tolist() == [[1, 2, 4, 5][learner] for learner in wanted[:, 0]]
    assert np.array_equal(segments[:, 1:], wanted[:, 1:])


def test_learners_that_are_known_to_have_diverged_are_not_looked_up(launches: list[np.ndarray]) -> None:
    backend, tally = _backend(), Tally.empty(LEARNERS)
    backend.alive = torch.tensor([False, True, True, False, True, True, False])
    tally.diverged_at = None  # on a GPU, reading it would wait
    backend.advance(CHUNK, "mse", tally)
    (segments,) = launches
    assert set(segments[:, 0].tolist()) == {1, 2, 4, 5}


def test_nothing_is_launched_if_all_have_diverged(launches: list[np.ndarray]) -> None:
    _advanced(list(range(LEARNERS)))
    assert launches == []


def test_clusters_can_start_at_different_times(launches: list[np.ndarray]) -> None:
    pieces = (10, 15, 6, 4)
    block = _backend().ready(CHUNK, "mse", Tally.empty(LEARNERS), pieces)
    assert (block.clusters, launches) == (4, [])
    block.start(0, 3)
    block.start(3, 4)
    segments, begins = schedule(LEARNERS, STEPS, pieces)
    prompt, late = launches
    assert np.array_equal(prompt, segments[: begins[3]])
    assert np.array_equal(late, segments[begins[3] :])
