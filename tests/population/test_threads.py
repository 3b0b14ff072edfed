"""Small steps get one thread, unless the user has chosen a number."""

import pytest
import torch

from upgd.networks import MLP
from upgd.population import Learner, Population, threads
from upgd.streams import make
from upgd.streams.contract import Chunk

NUMBER = 2  #: number of threads, as if it were torch's default


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    for name in threads._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_usual", {NUMBER})
    torch.set_num_threads(NUMBER)
    yield
    torch.set_num_threads(before)


def threads_of_a_step(monkeypatch):
    """Return the numbers of threads during steps of a small population."""
    seen = set()
    inputs_at = Chunk.inputs_at
    monkeypatch.setattr(Chunk, "inputs_at", lambda *a: seen.add(torch.get_num_threads()) or inputs_at(*a))
    population = Population(MLP((64, 8, 10)), [Learner(method="upgd", lr=0.01)], backend="torch")
    population.run(make("output-permuted-digits", task_length=20), 2)
    return seen


def test_a_small_step_uses_one_thread_temporarily(monkeypatch):
    assert threads_of_a_step(monkeypatch) == {1}
    assert torch.get_num_threads() == NUMBER


def test_a_large_step_gets_all(monkeypatch):
    monkeypatch.setattr(threads, "SMALL", 610)  # parameters
    assert threads_of_a_step(monkeypatch) == {NUMBER}


@pytest.mark.parametrize("name", threads._VARIABLES)
def test_a_variable_is_respected(monkeypatch, name):
    monkeypatch.setenv(name, str(NUMBER))
    assert threads_of_a_step(monkeypatch) == {NUMBER}


def test_a_number_of_threads_chosen_by_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(threads, "_usual_numbers", lambda: {NUMBER + 1})
    assert threads_of_a_step(monkeypatch) == {NUMBER}


def test_a_share_of_the_cores_does_not_count_as_a_choice(monkeypatch):
    threads.share(3)
    assert threads_of_a_step(monkeypatch) == {1}
    assert torch.get_num_threads() == 3


def test_threads_are_restored_after_an_error(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Chunk, "inputs_at", fail)
    population = Population(MLP((64, 8, 10)), [Learner(method="sgd", lr=0.01)], backend="torch")
    with pytest.raises(ZeroDivisionError):
        population.run(make("output-permuted-digits", task_length=20), 2)
    assert torch.get_num_threads() == NUMBER
