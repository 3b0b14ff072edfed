"""CPU kernels of methods that reset hidden units, compared with the float64 torch backend."""

import numba
import numpy as np
import pytest
import torch
from gpu_cases import Samples
from hypothesis import given, settings
from hypothesis import strategies as st
from own_resets import OwnResets, recorded
from torch import nn

from upgd.kernels import normals
from upgd.kernels.machine import floats_at
from upgd.methods import METHODS, Method, registry
from upgd.methods.units import Reset
from upgd.networks import MLP, ConvNet
from upgd.noise import Purpose, uniforms_at, words
from upgd.population import Learner, Population
from upgd.population.choose import choose
from upgd.population.kernel import resets
from upgd.population.spec import groups
from upgd.streams import make

#: Whole numbers of units are never due, which would depend on rounding.
CBP = {"method": "continual-backprop", "lr": 0.05, "maturity": 3, "decay_contribution": 0.9, "replacement_rate": 0.047}
ADAM = {"optimizer": "adam", "lr": 0.01, "eps": 1e-2}
DIGITS = make("output-permuted-digits", task_length=30)
PROBLEMS = {
    "digits": (MLP((64, 20, 12, 10)), DIGITS),
    "deep": (MLP((9, 14, 11, 7, 3), "tanh"), Samples((9,), 3)),
    "regression": (MLP((6, 18, 10, 2), "leaky_relu"), Samples((6,), 2, "mse")),
}
PROBLEMS["no biases"] = (
    nn.Sequential(nn.Flatten(), nn.Linear(64, 12, bias=False), nn.ReLU(), nn.Linear(12, 10, bias=False)),
    DIGITS,
)


class EveryJoin(Method):
    """Resets units that are small in relation to the sum, the mean and the largest of their layer."""

    name = "every-join"

    def update(self, w, g, h):
        return w - h.lr * g

    def reset_units(self, units):
        size = units.activation.mean(-1).abs() + units.outgoing.abs().sum((1, 3))
        of_layer = (
            0.01 * size.sum(-1, keepdim=True) + 0.55 * size.mean(-1, keepdim=True) + 0.1 * size.amax(-1, keepdim=True)
        )
        return Reset(size < of_layer), {}


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    for cls in (OwnResets, EveryJoin):
        registry.register(cls)


def learners(own: dict[str, object]) -> list[Learner]:
    return [Learner(**own, seed=seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("problem", "own"),
    [
        ("digits", CBP),
        ("digits", CBP | ADAM),
        ("digits", CBP | {"replacement_rate": 0.213, "normalize": 0.9}),  # several units at a step
        ("deep", CBP | ADAM | {"betas": (0.0, 0.9)}),
        ("regression", CBP),
        ("no biases", CBP | {"replacement_rate": 0.093}),
        ("digits", {"method": "redo", "lr": 0.05, "tau": 0.6, "period": 6}),
        ("regression", {"method": "redo", **ADAM, "tau": 0.6, "period": 5}),
        ("digits", {"method": "self-normalized-resets", "lr": 0.05, "patience": 2, "rejection": 0.2}),
        ("digits", {"method": "self-normalized-resets", **ADAM, "patience": 1.5, "rejection": 0.1}),
        ("digits", {"method": "own-resets", "lr": 0.02}),
        ("deep", {"method": "own-resets", "lr": 0.02}),
        ("digits", {"method": "every-join", "lr": 0.05}),
    ],
    ids=lambda case: case if isinstance(case, str) else case["method"],
)
def test_resets_are_those_of_the_reference(monkeypatch, problem, own):
    network, stream = PROBLEMS[problem]
    seen = recorded(monkeypatch)
    kernel = Population(network, learners(own), backend="kernel")
    reference = Population(network, learners(own), backend="torch", dtype=torch.float64)
    found, expected = (population.run(stream, 60, window=20) for population in (kernel, reference))
    hidden = sum(isinstance(module, nn.Linear) for module in network.modules()) - 1
    assert {number for number, _ in seen} == set(range(hidden))
    assert len({step for _, step in seen}) >= 3
    np.testing.assert_allclose(found.loss, expected.loss, rtol=2e-5)
    state, exact = (population._backends[0].state() for population in (kernel, reference))
    assert state.keys() == exact.keys()
    for name, tensor in exact.items():
        torch.testing.assert_close(state[name].double(), tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [CBP | ADAM, {"method": "own-resets", "lr": 0.02}], ids=lambda own: own["method"])
def test_results_are_independent_of_blocks_other_learners_and_resuming(own):
    network, stream = PROBLEMS["digits"]
    together, alone = Population(network, learners(own)), Population(network, learners(own)[1:2])
    assert set(together.backends) == {"kernel"}
    together.run(stream, 70)
    alone.run(stream, 33, window=11)
    resumed = Population(network, learners(own)[1:2])
    resumed.restore(alone.state())
    resumed.run(stream, 37, window=11)
    for name, parameter in together.parameters(1).items():
        assert torch.equal(parameter, resumed.parameters(0)[name]), name


def test_resets_of_channels_run_on_the_torch_backend():
    ((group, _),) = groups([Learner(**CBP)], [0])
    network = ConvNet((1, 20, 20), 3)
    assert choose("auto", network, group, torch.device("cpu"), torch.float32)[0] == "torch"
    with pytest.raises(
        ValueError, match="continual-backprop resets hidden units, which kernels support only without conv"
    ):
        choose("kernel", network, group, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("method", ["continual-backprop", "redo", "self-normalized-resets"])
def test_all_methods_that_reset_units_have_kernels(method):
    assert hasattr(METHODS[method], "reset_units")
    assert set(Population(MLP((64, 8, 10)), [Learner(method=method, lr=0.01)]).backends) == {"kernel"}


@numba.njit
def _select(values, limit, size, among):
    resets.select(floats_at(values), limit, size, floats_at(among))


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, -2.0, np.inf, -np.inf, np.nan]), min_size=1, max_size=12),
    st.floats(-1, 14, width=32),
)
def test_the_smallest_are_those_of_a_stable_sort(values, limit):
    values = np.array(values, np.float32)
    among = np.full(len(values), 7, np.float32)
    _select(values.ctypes.data, np.float32(limit), len(values), among.ctypes.data)
    rank = torch.from_numpy(values).argsort(stable=True).argsort()
    assert among.tolist() == (rank < limit).float().tolist()


@numba.njit
def _uniforms(out, seed, step, layer):
    keys = normals.fresh_keys(seed, step, layer)
    for i in range(len(out)):
        out[i] = normals.uniform(i, keys)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=25)
def test_new_weights_are_those_of_the_other_backends(seed, step, layer):
    found = np.empty(33, np.float32)
    _uniforms(found, seed, step, layer)
    keys = words(torch.tensor([seed]), Purpose.RESET, step, 4 * (layer + 1))[:, -4:].to(torch.int32)
    assert found.tolist() == uniforms_at(keys, torch.arange(33, dtype=torch.int32))[0].tolist()
