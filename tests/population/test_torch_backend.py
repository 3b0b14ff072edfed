"""The torch backend equals the optimizers driven by autograd: float64, 300 steps, noise from the same counters."""

import itertools

import pytest
import torch
from plain_loop import PLAIN, Counters, Residual, SmallConvNet, plain_loop
from torch import nn
from torch.nn.utils import parameters_to_vector

from upgd.methods import Method, registry
from upgd.networks import MLP, Linear
from upgd.population import Learner, Population
from upgd.population.chain import Chain
from upgd.streams import make

STEPS = 300
UTILITY = [
    {"method": method, "wise": wise, "scaling": scaling, "order": order, "noise": noise}
    for method, wise, scaling, order, noise in itertools.product(
        ("upgd", "upgd-nonprotecting", "ups"),
        ("weight", "feature"),
        ("global", "local"),
        (1, 2),
        ("white", "anticorrelated"),
    )
]
#: Every pair of choices occurs.
COVERING = [
    {"method": method, "wise": wise, "scaling": scaling, "order": order, "noise": noise}
    for method, wise, scaling, order, noise in [
        ("upgd", "weight", "global", 1, "white"),
        ("upgd", "weight", "local", 2, "anticorrelated"),
        ("upgd", "feature", "global", 2, "white"),
        ("upgd", "feature", "local", 1, "anticorrelated"),
        ("upgd-nonprotecting", "weight", "local", 1, "white"),
        ("upgd-nonprotecting", "feature", "global", 2, "anticorrelated"),
        ("ups", "weight", "global", 2, "anticorrelated"),
        ("ups", "feature", "local", 1, "white"),
    ]
]
MLPS = {activation: MLP((6, 7, 5, 3), activation) for activation in ("relu", "leaky_relu", "tanh", "identity")}
IMAGES = Counters((2, 10, 10), 3)
NETWORKS = {
    **{name: (network, Counters((6,), 3)) for name, network in MLPS.items()},
    "regression": (MLP((6, 7, 5, 2), "tanh"), Counters((6,), 2, loss="mse", scale=0.5)),
    "convolution": (SmallConvNet((2, 10, 10), 3), IMAGES),
    "two outputs for each channel": (SmallConvNet((2, 10, 10), 3, "crelu"), IMAGES),
    "convolution without activation": (SmallConvNet((2, 10, 10), 3, "leaky_relu", conv_activation=False), IMAGES),
    "pool before activation": (
        nn.Sequential(
            *(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(48, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3)),
        ),
        IMAGES,
    ),
    "sequence": (
        nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.Tanh()),
            nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
            nn.Flatten(),
            nn.LazyLinear(4, bias=False),
            nn.Tanh(),
            nn.Linear(4, 3),
        ),
        IMAGES,
    ),
}
NETWORKS["sequence"][0](torch.zeros(1, 2, 10, 10))


def learners_of(settings: list[dict]) -> list[Learner]:
    """Return learners with different settings, so that no two in one batch are equal."""
    learners = []
    for seed, setting in enumerate(settings):
        numbers = {}
        if setting["method"] in ("upgd", "upgd-nonprotecting", "ups"):
            numbers = {
                "lr": 0.02 + 0.01 * (seed % 3),
                "sigma": 0.05 + 0.01 * (seed % 4),
                "beta_utility": (0.9, 0.5, 0.99)[seed % 3],
            }
            if setting["method"] != "ups":
                numbers["weight_decay"] = (0.0, 0.1)[seed % 2]
        learners.append(Learner(seed=seed, **{**numbers, **setting}))
    return learners


def assert_equals_plain_loop(monkeypatch, network, stream, learners, steps=STEPS) -> None:
    population = Population(network, learners, backend="torch", dtype=torch.float64)
    result = population.run(stream, steps, window=1)
    for i, learner in enumerate(learners):
        loss, right, final = plain_loop(monkeypatch, network, learner, stream, steps)
        assert final.isfinite().all(), learner
        found = parameters_to_vector(population.parameters(i).values())
        assert (found - final).norm() <= 1e-9 * final.norm(), learner
        torch.testing.assert_close(torch.from_numpy(result.loss[:, i]), loss, rtol=1e-9, atol=1e-12)
        if stream.loss == "cross_entropy":
            assert torch.equal(torch.from_numpy(result.accuracy[:, i]), right.double()), learner


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_optimizers(monkeypatch, name):
    network, stream = NETWORKS[name]
    settings = PLAIN + COVERING if name in ("relu", "convolution") else [*PLAIN[2:3], *COVERING[1:8:2]]
    assert_equals_plain_loop(monkeypatch, network, stream, learners_of(settings), steps=60 if name == "relu" else 25)


def test_equals_the_optimizers_over_many_steps(monkeypatch):
    network, stream = NETWORKS["relu"]
    assert_equals_plain_loop(monkeypatch, network, stream, learners_of([PLAIN[2], COVERING[0], COVERING[3]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_optimizers_in_every_variant(monkeypatch, name):
    network, stream = NETWORKS[name]
    assert_equals_plain_loop(monkeypatch, network, stream, learners_of(PLAIN + UTILITY))


def test_a_single_layer_has_no_features_to_look_at(monkeypatch):
    weight_wise = [setting for setting in COVERING if setting["wise"] == "weight"]
    assert_equals_plain_loop(monkeypatch, Linear(6, 3), Counters((6,), 3), learners_of(PLAIN + weight_wise), steps=25)


def test_any_module_runs(monkeypatch):
    first_order = [s for s in UTILITY if s["wise"] == "weight" and s["order"] == 1]
    learners = learners_of(PLAIN + first_order)
    assert_equals_plain_loop(monkeypatch, Residual(6, 3), Counters((6,), 3), learners, steps=25)
    assert_equals_plain_loop(monkeypatch, Residual(6, 3), Counters((6,), 3, "mse"), learners[:3], steps=20)


@pytest.mark.parametrize("units", [1, 3])
def test_a_linear_layer_may_see_several_vectors_of_a_sample(monkeypatch, units):
    """A chain would treat them as one."""
    network = nn.Sequential(nn.Linear(4, units), nn.Tanh(), nn.Flatten(), nn.Linear(5 * units, 2))
    assert "Flatten '2' comes after a Linear layer" in str(Chain.unsupported(network))
    assert_equals_plain_loop(monkeypatch, network, Counters((5, 4), 2), learners_of(PLAIN), steps=20)


@pytest.mark.parametrize("parent", [nn.LeakyReLU, nn.Flatten])
def test_a_custom_layer_does_not_use_the_rule_of_its_parent(parent):
    """A subclass may compute something else."""

    class Own(parent):
        def forward(self, x):
            return -super().forward(x)

    network = nn.Sequential(nn.Linear(3, 4), Own(), nn.Linear(4, 2))
    assert "layer '1' is a Own" in str(Chain.unsupported(network))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_rule_that_loses_its_state_is_refused(monkeypatch, backend):
    def update(self, w, g, s, h):
        s.v = s.v + g
        return w - h.lr * s.v

    losing = type("Losing", (Method,), {"name": "losing", "state": {"v": "zeros"}, "update": update})
    monkeypatch.setattr(registry, "_REGISTERED", {**registry._REGISTERED, "losing": losing})
    stream = make("toy-changing-inputs")
    population = Population(nn.Linear(16, 1), [Learner(method="losing", lr=0.1)], backend=backend)
    with pytest.raises(
        ValueError, match=r"a rule cannot assign to s.v; return the changed state instead, as \{'v': value\}"
    ):
        population.run(stream, 1)
