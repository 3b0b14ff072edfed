"""The graphed backend takes the torch backend's steps; on the CPU, without a graph, bitwise."""

import gc
import math
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from plain_loop import Counters, Residual, SmallConvNet

from upgd.methods import Method, Setting, registry
from upgd.methods.units import Reset
from upgd.networks import MLP
from upgd.noise import _radius, _sine, learner_keys, learner_normals, learner_normals_at
from upgd.population import Learner, Population
from upgd.population.graphed import GraphedBackend, _captured, _repeated
from upgd.streams import make

UTILITY = {"lr": 0.02, "sigma": 0.05, "beta_utility": 0.9}
LEARNERS = {
    "plain": [{"method": "sgd", "lr": 0.05}, {"method": "pgd", "lr": 0.05, "sigma": 0.1}],
    "anticorrelated": [{"method": "anti-pgd", "lr": 0.05, "sigma": 0.1}],
    "adamw": [{"method": "adamw", "lr": 0.01}, {"method": "adamw", "lr": 0.001, "betas": (0.0, 0.9)}],
    "global": [{"method": "upgd", **UTILITY}, {"method": "ups", **UTILITY}],
    "local": [{"method": "upgd", "scaling": "local", "order": 2, **UTILITY}],
    "feature": [{"method": "upgd-nonprotecting", "wise": "feature", "noise": "anticorrelated", **UTILITY}],
    "adaupgd": [{"method": "adaupgd", **UTILITY}],
    "normalized": [{"method": "upgd", "normalize": 0.9, **UTILITY}],
    "gated": [{"method": "upgd", "gated": "output", **UTILITY}],
    "resets": [{"method": "resetting", "lr": 0.05, "momentum": 0.5}],
}


class Resetting(Method):
    """Momentum, and every seventh step fresh weights for some units."""

    name = "resetting"
    momentum = Setting(0.9, least=0, below=1)
    state = {"velocity": "zeros"}  # noqa: RUF012
    unit_state = {"age": "zeros"}  # noqa: RUF012

    def update(self, w, g, s, h):
        velocity = h.momentum * s.velocity + g
        return w - h.lr * velocity, {"velocity": velocity}

    def reset_units(self, units, s, t, draw):
        chosen = (draw() < 0.3) & torch.where(t % 7 == 0, s.age > 5, False)
        return Reset(chosen), {"age": s.age + 1}


@pytest.fixture(autouse=True)
def known(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", registry._REGISTERED | {"resetting": Resetting})


PROBLEMS = {
    "dense": (MLP((6, 7, 5, 3), "tanh"), Counters((6,), 3)),
    "regression": (MLP((6, 7, 2)), Counters((6,), 2, loss="mse")),
    "images": (MLP((64, 12, 10)), make("input-permuted-digits", task_length=9)),
    "convolution": (SmallConvNet((2, 10, 10), 3), Counters((2, 10, 10), 3)),
}


def both(monkeypatch, network, learners, stream, lengths) -> tuple[Population, Population]:
    populations = []
    for backend in (None, GraphedBackend):
        with monkeypatch.context() as patch:
            if backend is not None:
                patch.setattr("upgd.population.choose._torch", lambda device: GraphedBackend)
            populations.append(Population(network, learners, backend="torch"))
        for length in lengths:
            populations[-1].run(stream, length, window=100)
    assert isinstance(populations[1]._backends[0], GraphedBackend)
    return populations[0], populations[1]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("rule", LEARNERS)
def test_the_same_steps(monkeypatch, rule: str, problem: str) -> None:
    network, stream = PROBLEMS[problem]
    learners = [Learner(seed=seed, **settings) for seed in (3, 1) for settings in LEARNERS[rule]]
    plain, graphed = both(monkeypatch, network, learners, stream, (5, 22))
    for (name, right), found in zip(plain.state().items(), graphed.state().values(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_any_module(monkeypatch) -> None:
    learners = [Learner(method="upgd", seed=seed, **UTILITY) for seed in range(3)]
    plain, graphed = both(monkeypatch, Residual(6, 3), learners, Counters((6,), 3), (20,))
    torch.testing.assert_close(graphed.parameters(1), plain.parameters(1))


def test_a_diverged_learner_is_frozen_and_states_are_taken_over(monkeypatch) -> None:
    learners = [Learner(method="sgd", lr=lr, seed=1) for lr in (0.01, 1e4, 0.02)]
    stream = Counters((6,), 2, loss="mse")
    plain, graphed = both(monkeypatch, MLP((6, 7, 2), "identity"), learners, stream, (30,))
    assert plain.result().diverged_at[1] > 0
    assert plain.result().diverged_at.tolist() == graphed.result().diverged_at.tolist()
    graphed.restore(plain.state())
    for population in (plain, graphed):
        population.run(stream, 10, window=100)
    torch.testing.assert_close(graphed.parameters(2), plain.parameters(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_the_noise_one_by_one(dtype: torch.dtype) -> None:
    seeds, index = torch.tensor([0, 7, 2**40]), torch.arange(5, 35, dtype=torch.int32).view(5, 6)
    found = learner_normals_at(learner_keys(seeds, torch.tensor(12)), index, dtype=dtype)
    right = learner_normals(seeds, torch.tensor(12), 35, dtype=dtype)[:, 5:].view(3, 5, 6)
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_short_cuts_of_float32_are_nearly_as_exact_as_torch() -> None:
    seeds, index = torch.arange(20), torch.arange(100_000, dtype=torch.int32)
    exact = learner_normals(seeds, torch.tensor(3), len(index), dtype=torch.float64)
    error = (learner_normals_at(learner_keys(seeds, torch.tensor(3)), index) - exact).abs()
    without = (learner_normals(seeds, torch.tensor(3), len(index)) - exact).abs()
    assert error.mean() < 1.5 * without.mean()
    assert error.max() < 3 * without.max()
    # The smallest and the largest radius, and all angles in between.
    assert _radius(torch.tensor([1.0])).tolist() == [0]
    assert _radius(torch.tensor([2.0**-31])).item() == pytest.approx(math.sqrt(62 * math.log(2)), rel=1e-6)
    half_turns = torch.linspace(-0.5, 0.5, 100_001)
    torch.testing.assert_close(_sine(half_turns), torch.sin(torch.pi * half_turns.double()).float(), rtol=0, atol=3e-7)


def test_a_failing_compiler_is_reported(monkeypatch, caplog):
    """Without it, the steps are the same but slower, so the user is told."""

    def fail(*arguments, **more):
        raise RuntimeError("no Triton\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    population = Population(MLP((4, 3, 2)), [Learner(method="sgd", lr=0.1)], backend="torch")
    group, parameters = population._groups[0][0], population._backends[0].parameters()
    backend = GraphedBackend(MLP((4, 3, 2)), group, parameters, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(backend, "_take", lambda *tensors: None)
    assert backend._compiled([]) == backend._take
    assert "torch.compile failed (RuntimeError: no Triton)" in caplog.text


class CompiledOnTheCPU(GraphedBackend):
    """The steps of a GPU, without the graph."""

    def _recorded(self):
        tensors = [*self._fixed.values(), *(t for named in self._state.values() for t in named.values())]
        before = [tensor.clone() for tensor in tensors]
        step = self._compiled(tensors)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

        return {count: _repeated(step, tensors, count) for count in (1, 8)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("settings", [LEARNERS["global"][0], LEARNERS["adamw"][0]], ids=["upgd", "adamw"])
def test_compiled_steps_are_the_same(monkeypatch, caplog, settings):
    """Tables that a convolution computes once must not be traced; blocks of other lengths give bitwise the same results."""
    network, stream = PROBLEMS["convolution"]
    learners = [Learner(seed=seed, **settings) for seed in range(3)]
    found = []
    for backend, lengths in ((GraphedBackend, (20,)), (CompiledOnTheCPU, (20,)), (CompiledOnTheCPU, (7, 1, 12))):
        monkeypatch.setattr("upgd.population.choose._torch", lambda device, backend=backend: backend)
        population = Population(network, learners, backend="torch")
        for length in lengths:
            population.run(stream, length, window=100)
        found.append(torch.cat([p.flatten() for p in population._backends[0].parameters().values()]))
    assert "torch.compile failed" not in caplog.text
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(monkeypatch, enabled):
    """Else a graph of an earlier population, freed during the capture, would invalidate it."""
    collecting = []
    monkeypatch.setattr("torch.cuda.Stream", lambda: SimpleNamespace(wait_stream=lambda stream: None))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(wait_stream=lambda stream: None))
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", object)
    monkeypatch.setattr("torch.cuda.graph", lambda graph, stream: nullcontext())
    (gc.enable if enabled else gc.disable)()
    try:
        _captured(lambda: collecting.append(gc.isenabled()), lambda: None)
        assert collecting[-1] is False
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
