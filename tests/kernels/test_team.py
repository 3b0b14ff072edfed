"""Compiled functions on all threads at once."""

import functools
import multiprocessing
import queue

import numpy as np
import pytest
import torch
from torch import nn

import upgd
from upgd.kernels import team
from upgd.kernels.machine import entry_point, result_of, skip, taken


@functools.cache
def count_calls():
    @entry_point(0)
    def count(numbers):
        numbers[2 + taken(numbers)] = 1  # each call marks its own entry
        taken(skip(numbers, 1))

    return count


def calls(threads: int) -> list[int]:
    numbers = np.zeros(10, np.int64)
    team.run_on_all(threads, count_calls().address, numbers.ctypes.data)
    return numbers.tolist()


@pytest.fixture(params=["OpenMP", "a pool"])
def threads_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a pool":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    elif team._openmp() is None:
        pytest.skip("the OpenMP of this torch cannot be called")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_calls_once(threads: int, threads_of: None) -> None:
    assert calls(threads) == [threads, threads, *[1] * threads, *[0] * (8 - threads)]


@functools.cache
def mark_numbers():
    @entry_point(0)
    def mark(numbers):
        numbers[1 + result_of(numbers[0])] += 1

    return mark


@pytest.mark.skipif(not team.number_of_thread(), reason="the OpenMP of this torch cannot be called")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_have_different_numbers(threads: int) -> None:
    numbers = np.array([team.number_of_thread(), *[0] * 8], np.int64)
    team.run_on_all(threads, mark_numbers().address, numbers.ctypes.data)
    assert numbers[1:].tolist() == [1] * threads + [0] * (8 - threads)


def trained(threads: int, columns: int = 51, **options: object) -> torch.Tensor:
    """A parameter large enough for threads, of several blocks, the last of which is not full."""
    options = {"sigma": 0.1, "noise": "anticorrelated", "seed": 4, "fused": True} | options
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(3001, columns, generator=generator))
        optimizer = upgd.UPGD([weight], lr=0.1, **options)
        for _ in range(3):
            weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    return weight.detach()


@pytest.mark.parametrize("threads", [2, 3])
def test_steps_are_the_same_with_any_number_of_threads(threads: int, threads_of: None) -> None:
    assert torch.equal(trained(1), trained(threads))


@pytest.mark.parametrize("columns", [51, 501])  # large parameters have large blocks
@pytest.mark.parametrize("scaling", ["global", "local"])
def test_every_block_is_taken_once(scaling: str, columns: int) -> None:
    fused = trained(3, columns, sigma=0.0, scaling=scaling)
    plain = trained(1, columns, sigma=0.0, scaling=scaling, fused=None, foreach=False)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def _put(results: "multiprocessing.Queue[list[int]]") -> None:
    results.put(calls(2))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    here = calls(2)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_put, args=(results,), daemon=True)
    process.start()
    try:
        assert results.get(timeout=30) == here
    except queue.Empty:
        pytest.fail("the forked process hangs")
    finally:
        process.terminate()
