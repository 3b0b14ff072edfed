"""Any torch optimizer as a method: bitwise equal to a plain loop."""

import copy
import io
import logging

import numpy as np
import pytest
import torch
from plain_loop import Counters, Residual
from torch import nn
from torch.nn.utils import parameters_to_vector

import upgd
from upgd.methods import Setting, from_torch, registry
from upgd.networks import MLP, reset
from upgd.population import Learner, Population

STEPS = 60
STREAM = Counters((6,), 3)
REGRESSION = Counters((6,), 2, loss="mse", scale=0.5)
NETWORK = MLP((6, 7, 3), "tanh")
LINEAR = MLP((6, 7, 3), "identity")  #: large steps make it diverge


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers, and changes its own options: lr/√t, where t is counted in the group."""

    def __init__(self, params, lr=0.1, power=0.5):
        super().__init__(params, {"lr": lr, "power": power, "taken": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                state["largest"] = max(state.get("largest", 0.0), param.grad.abs().max().item())
                param -= (
                    group["lr"]
                    / group["taken"] ** group["power"]
                    * param.grad
                    / (1 + state["largest"] / state["steps"])
                )


CASES = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "centered": True}),
    "adam": (torch.optim.Adam, {"betas": (0.5, 0.9), "amsgrad": True, "eps": 1e-6}),
    "nadam": (torch.optim.NAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {"etas": (0.6, 1.1)}),
    "counting": (Counting, {"power": 0.25}),
    "upgd": (upgd.UPGD, {"sigma": 0.1, "scaling": "local"}),
}


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    """Those above, registered for one test."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    for name, (cls, settings) in CASES.items():
        from_torch(cls, f"{name}-torch", settings=settings)


def plain(network, learner, stream, steps=STEPS):
    """Return losses and parameters of a learner in a plain loop."""
    model = reset(copy.deepcopy(network).double(), learner.seed)
    cls, settings = CASES[learner.method.removesuffix("-torch")]
    optimizer = cls(model.parameters(), lr=learner.lr, **{name: getattr(learner, name) for name in settings})
    criterion = nn.CrossEntropyLoss() if stream.loss == "cross_entropy" else nn.MSELoss()
    chunk = stream.chunk([learner.seed], 0, steps)
    losses = []
    for x, y in zip(chunk.inputs()[0].double(), chunk.targets[0], strict=True):
        optimizer.zero_grad()
        loss = criterion(model(x[None]), y[None].double() if stream.loss == "mse" else y[None])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("network", "stream"), [(NETWORK, STREAM), (MLP((6, 5, 2)), REGRESSION), (Residual(6, 3), STREAM)]
)
def test_equals_a_plain_loop_bit_for_bit(network, stream):
    learners = [
        Learner(method=f"{name}-torch", lr=lr, seed=seed)
        for seed, (name, lr) in enumerate((name, lr) for name in CASES if name != "upgd" for lr in (0.01, 0.03))
    ]
    population = Population(network, learners, dtype=torch.float64)
    assert set(population.backends) == {"optimizer"}
    result = population.run(stream, STEPS, window=1)
    for i, learner in enumerate(learners):
        losses, parameters = plain(network, learner, stream)
        assert result.loss[:, i].tolist() == losses, learner
        assert torch.equal(parameters_to_vector(population.parameters(i).values()), parameters), learner


def test_settings_reach_the_optimizer():
    learner = Learner(method="adam-torch", lr=0.01, betas=(0.0, 0.5), amsgrad=False, eps=1e-3)
    population = Population(NETWORK, [learner], dtype=torch.float64)
    population.run(STREAM, STEPS)
    assert torch.equal(parameters_to_vector(population.parameters(0).values()), plain(NETWORK, learner, STREAM)[1])


def everything(population):
    return {name: tensor for name, tensor in population.state().items() if name != "learners"}


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_chunks_neighbours_or_pauses(name):
    """Also if the optimizer draws random numbers, and if another learner diverges."""
    learners = [Learner(method=f"{name}-torch", lr=lr, seed=seed) for lr, seed in ((0.01, 3), (1e200, 4), (0.02, 5))]
    whole = Population(LINEAR, learners, dtype=torch.float64)
    torch.manual_seed(1)
    whole.run(STREAM, 40)

    alone = Population(LINEAR, [learners[2]], dtype=torch.float64)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    alone.run(STREAM, 40)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in alone.parameters(0).items():
        assert torch.equal(value, whole.parameters(2)[key]), key

    first = Population(LINEAR, learners, dtype=torch.float64)
    first._pace.STEPS = first._pace.steps = 7
    first.run(STREAM, 23)
    file = io.BytesIO()
    np.savez(file, **first.state())
    file.seek(0)
    second = Population(LINEAR, learners, dtype=torch.float64)
    second.restore(np.load(file, allow_pickle=False))
    second.run(STREAM, 17)
    mine, its = everything(second), everything(whole)
    assert mine.keys() == its.keys()
    for key, value in its.items():
        assert torch.equal(mine[key].nan_to_num(), value.nan_to_num()), key
    if name != "rprop":  # it chooses its own step size
        assert whole.diverged_at[1] >= 0
    assert whole.diverged_at[[0, 2]].tolist() == [-1, -1]


def test_a_diverged_learner_is_frozen():
    population = Population(LINEAR, [Learner(method="sgd-torch", lr=1e200)], dtype=torch.float64)
    population.run(STREAM, 30)
    frozen = population.parameters(0)
    assert 0 < population.diverged_at[0] < 30
    population.run(STREAM, 10)
    for name, value in population.parameters(0).items():
        assert torch.equal(value.nan_to_num(), frozen[name].nan_to_num())


def test_inputs_are_normalized():
    """As in the torch backend, for plain SGD."""
    from_torch(torch.optim.SGD, "plain-sgd-torch")
    ours, truth = (
        Population(
            NETWORK, [Learner(method=method, lr=0.05, normalize=0.9, seed=s) for s in (1, 2)], dtype=torch.float64
        )
        for method in ("plain-sgd-torch", "sgd")
    )
    np.testing.assert_allclose(ours.run(STREAM, 50).loss, truth.run(STREAM, 50).loss, rtol=1e-12)
    restored = Population(NETWORK, ours.learners, dtype=torch.float64)
    restored.restore(ours.state())
    np.testing.assert_array_equal(restored.run(STREAM, 10).loss, ours.run(STREAM, 10).loss)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_every_backend_but_the_kernel(backend):
    assert Population(NETWORK, [Learner(method="sgd-torch", lr=0.1)], backend=backend).backends == ("optimizer",)


def test_the_kernel_is_refused():
    with pytest.raises(ValueError, match=r"^backend='kernel' cannot be used, because sgd-torch runs torch's"):
        Population(NETWORK, [Learner(method="sgd-torch", lr=0.1)], backend="kernel")


def test_it_gives_the_same_results_as_an_optimizer():
    params = list(NETWORK.parameters())
    optimizer = upgd.methods.optimizer("adam-torch", params, lr=0.1, eps=1e-3, maximize=True)
    assert type(optimizer) is torch.optim.Adam
    wanted = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "amsgrad": True, "maximize": True}
    assert {name: optimizer.defaults[name] for name in wanted} == wanted
    with pytest.raises(ValueError, match="method='adam-torch' needs lr"):
        upgd.methods.optimizer("adam-torch", params)


def test_settings_may_say_more_than_a_default():
    method = from_torch(
        torch.optim.Adagrad,
        "more-torch",
        "More",
        settings={"eps": Setting(1e-8, symbol="ε", least=0)},
        colour="#123456",
    )
    assert (method.label, method.colour, method.settings["eps"].symbol) == ("More", "#123456", "ε")
    assert method.__module__ == __name__
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0"):
        Learner(method="more-torch", lr=0.1, eps=-1)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((nn.Linear, "x-torch"), TypeError, "optimizer must be a subclass of torch.optim.Optimizer, not <class"),
        ((torch.optim.LBFGS, "x-torch"), ValueError, "LBFGS needs a closure for every step"),
        ((torch.optim.SGD, "x-torch", "X", {"beta": 0.5}), ValueError, "SGD has no option 'beta'; it has lr, momentum"),
        ((torch.optim.SGD, "x-torch", "X", {"momentum": None}), TypeError, r"settings\['momentum'\] must be a number"),
        ((torch.optim.SGD, "x torch"), ValueError, "needs a name such as"),
        ((torch.optim.SGD, "upgd"), ValueError, "a method named 'upgd' already exists"),
    ],
)
def test_mistakes(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        from_torch(*arguments)


def test_networks_that_depend_on_more_than_the_sample_are_refused():
    network = nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"Dropout '1' in training mode.*network\.eval\(\)"):
        Population(network, [Learner(method="sgd-torch", lr=0.1)])


def test_a_state_that_cannot_be_saved_is_named():
    class Hoarder(Counting):
        def step(self, closure=None):
            super().step()
            for state in self.state.values():
                state["history"] = []

    from_torch(Hoarder, "hoarder-torch")
    population = Population(NETWORK, [Learner(method="hoarder-torch", lr=0.1)])
    population.run(STREAM, 2)
    with pytest.raises(TypeError, match="Hoarder keeps a list as 'history', which cannot be saved"):
        population.state()


def test_no_log_line_names_a_missing_kernel(caplog):
    with caplog.at_level(logging.INFO, "upgd.population"):
        Population(NETWORK, [Learner(method="sgd-torch", lr=0.1)])
    assert not caplog.records
