"""Diagnostics of the learners of a population."""

import copy

import numpy as np
import pytest
import torch
from plain_loop import Counters, SmallConvNet
from torch.nn.functional import cross_entropy

from upgd.networks import MLP, initial_parameters
from upgd.normalization import OnlineNorm
from upgd.population import Diagnostics, Learner, Population, diagnostics
from upgd.streams import iterate, make

NETWORK = MLP((6, 8, 5, 3))
STREAM = Counters((6,), 3, task_length=20)
LEARNERS = [
    Learner(method="upgd", lr=0.05, sigma=0.1, beta_utility=0.9, seed=4),
    Learner(method="sgd", lr=0.1, seed=1),
    Learner(method="ups", lr=0.05, sigma=0.1, wise="feature", scaling="local", seed=2),
]


def population(learners=LEARNERS, network=NETWORK) -> Population:
    return Population(network, learners, backend="torch")


def test_a_disabled_setting_has_no_effect():
    result = population().run(STREAM, 30)
    assert result.diagnostics == {}
    assert result.diagnosed_at.tolist() == []


def test_diagnostics_change_nothing():
    plain, looked = population(), population()
    expected = plain.run(STREAM, 50)
    result = looked.run(STREAM, 50, diagnostics=Diagnostics(every=7))
    np.testing.assert_array_equal(result.loss, expected.loss)
    assert all(torch.equal(p, looked.parameters(0)[name]) for name, p in plain.parameters(0).items())


def test_looks_come_at_window_ends_or_every_so_many_steps():
    assert population().run(STREAM, 50, diagnostics=Diagnostics()).diagnosed_at.tolist() == [20, 40]
    every = population()
    every.run(STREAM, 11, diagnostics=Diagnostics(every=6))
    assert every.run(STREAM, 10, diagnostics=Diagnostics(every=6)).diagnosed_at.tolist() == [6, 12, 18]
    assert population().run(STREAM, 3, diagnostics=Diagnostics(every=1)).diagnosed_at.tolist() == [1, 2, 3]


def test_diagnostics_match_their_definitions():
    crowd, before = population(), population()
    found = crowd.run(STREAM, 40, diagnostics=Diagnostics(every=40, samples=10, tau=0.5)).diagnostics
    before.run(STREAM, 39)
    for i, learner in enumerate(LEARNERS):
        chunk = STREAM.chunk([learner.seed], 30, 10)
        inputs, target = chunk.inputs()[0], chunk.targets[0, -1:]
        old, new = before.network(i), crowd.network(i)
        cross_entropy(old(inputs[-1:]), target).backward()
        gradient = torch.cat([p.grad.flatten() for p in old.parameters()])
        assert found["gradient_l2"][0, i] == pytest.approx(gradient.norm().item(), rel=1e-5)
        assert found["gradient_l0_share"][0, i] == pytest.approx((gradient != 0).float().mean().item(), rel=1e-5)
        assert found["weight_l1"][0, i] == pytest.approx(sum(p.abs().sum().item() for p in new.parameters()), rel=1e-5)
        with torch.no_grad():
            hidden = new.layers[:2](inputs)
        magnitude = hidden.abs().mean(0)
        dormant = (magnitude <= 0.5 * magnitude.mean()).float().mean()
        assert found["dormant_share/layers.1"][0, i] == pytest.approx(dormant.item())
        assert found["zero_share/layers.1"][0, i] == pytest.approx((hidden == 0).float().mean().item())
        singular = torch.linalg.svdvals(new.layers[2].weight.detach())
        assert found["stable_rank/layers.2.weight"][0, i] == pytest.approx(
            ((singular / singular[0]) ** 2).sum().item(), rel=1e-4
        )


def plasticities(stream, updates, criterion, learners=LEARNERS, network=NETWORK):
    """Return for each learner the fraction of a sample's loss that each update removed, computed from its networks."""
    crowd = population(learners, network)
    crowd.run(stream, updates.start)
    found = []
    for step in updates:
        old = [crowd.network(i) for i in range(len(learners))]
        crowd.run(stream, 1)
        found.append([])
        for i, learner in enumerate(learners):
            chunk = stream.chunk([learner.seed], step, 1)
            before, after = (
                criterion(model(chunk.inputs()[0]), chunk.targets[0]).item() for model in (old[i], crowd.network(i))
            )
            found[-1].append(max(0.0, 1 - after / before))
    return np.array(found)


def test_sample_plasticity_is_the_mean_over_the_last_updates():
    looks = {"every": 40, "updates": 10}
    found = population().run(STREAM, 80, diagnostics=Diagnostics(**looks)).diagnostics["sample_plasticity"]
    for look, updates in enumerate((range(30, 40), range(70, 80))):
        expected = plasticities(STREAM, updates, cross_entropy)
        assert np.abs(expected[-1] - expected.mean(0)).min() > 1e-4  # the last update alone gives a different value
        np.testing.assert_allclose(found[look], expected.mean(0), atol=1e-6)


def test_sample_plasticity_is_that_of_updates_since_the_last_look():
    found = population().run(STREAM, 12, diagnostics=Diagnostics(every=6)).diagnostics["sample_plasticity"]
    np.testing.assert_allclose(found[1], plasticities(STREAM, range(6, 12), cross_entropy).mean(0), atol=1e-6)


def test_sample_plasticity_of_a_regression():
    stream, network = make("toy-changing-outputs"), MLP((16, 8, 1))
    learners = [Learner(method="sgd", lr=0.01, seed=1), LEARNERS[0]]
    found = population(learners, network).run(stream, 30, diagnostics=Diagnostics(every=30, updates=5)).diagnostics
    expected = plasticities(stream, range(25, 30), torch.nn.functional.mse_loss, learners, network)
    np.testing.assert_allclose(found["sample_plasticity"][0], expected.mean(0), atol=1e-5)


@pytest.mark.parametrize("stop", [33, 39, 40])
def test_sample_plasticity_does_not_depend_on_where_a_run_is_cut(stop):
    looks = Diagnostics(every=40, updates=10)
    expected = population().run(STREAM, 80, diagnostics=looks).diagnostics["sample_plasticity"]
    first, second = population(), population()
    first.run(STREAM, stop, diagnostics=looks)
    second.restore(first.state())
    result = second.run(STREAM, 80 - stop, diagnostics=looks)
    np.testing.assert_array_equal(result.diagnostics["sample_plasticity"], expected)


def test_a_state_from_before_plasticities_were_kept_can_be_restored():
    first, second = population(), population()
    first.run(STREAM, 10)
    old = {name: tensor for name, tensor in first.state().items() if not name.startswith("plasticity")}
    second.restore(old)
    second.run(STREAM, 10, diagnostics=Diagnostics(every=10))


def test_gates_are_seen_where_there_are_gates():
    crowd = population()
    found = crowd.run(STREAM, 40, diagnostics=Diagnostics(every=40)).diagnostics
    state = crowd.state()
    name = "gate_histogram/layers.2.weight"
    assert found[name].shape == (1, 3, 10)
    assert np.isnan(found[name][0, 1]).all()
    traces = {key: t[0] / (1 - 0.9**40) for key, t in state.items() if key.startswith("group.0.utility")}
    largest = max(t.max() for t in traces.values())
    gates = torch.sigmoid(traces["group.0.utility.layers.2.weight"] / largest)
    np.testing.assert_allclose(found[name][0, 0] * 40, torch.histc(gates, 10, 0, 1).numpy(), atol=1e-4)
    features = state["group.2.utility.layers.2.weight"][0]
    gates = torch.sigmoid(features / features.norm())
    np.testing.assert_allclose(found[name][0, 2] * 5, torch.histc(gates, 10, 0, 1).numpy(), atol=1e-4)


def test_looks_are_saved_with_everything_else():
    first, second = population(), population()
    first.run(STREAM, 25, diagnostics=Diagnostics(every=10))
    second.restore(first.state())
    first.run(STREAM, 20, diagnostics=Diagnostics(every=10))
    result = second.run(STREAM, 20, diagnostics=Diagnostics(every=10))
    expected = first.result()
    assert result.diagnosed_at.tolist() == expected.diagnosed_at.tolist() == [10, 20, 30, 40]
    assert result.diagnostics.keys() == expected.diagnostics.keys()
    for name, figures in result.diagnostics.items():
        np.testing.assert_array_equal(figures, expected.diagnostics[name])


def test_a_diverged_learner_has_no_diagnostics():
    wild = Learner(method="sgd", lr=1e30)
    result = population([LEARNERS[0], wild]).run(STREAM, 40, diagnostics=Diagnostics())
    assert result.diverged_at[1] >= 0
    assert np.isnan(result.diagnostics["weight_l2"][:, 1]).all()
    assert np.isfinite(result.diagnostics["weight_l2"][:, 0]).all()


def scaled(network, *factors):
    """Initial parameters of learners, the same ones times a factor for each."""
    return {name: torch.stack([p.detach() * factor for factor in factors]) for name, p in network.named_parameters()}


@pytest.mark.parametrize("activation", ["relu", "identity"])
def test_a_frozen_learner_with_finite_parameters_has_no_diagnostics(activation, capfd):
    """Finite parameters that give an infinite loss."""
    network = MLP((6, 8, 5, 3), activation)
    learners = [LEARNERS[0], Learner(method="sgd", lr=0.1), LEARNERS[2]]
    crowd = Population(network, learners, backend="torch", parameters=scaled(network, 1, 1e30, 1))
    result = crowd.run(STREAM, 4, diagnostics=Diagnostics(every=2))
    assert result.diverged_at.tolist() == [-1, 0, -1]
    assert all(p.isfinite().all() for p in crowd.parameters(1).values())
    for name in ("weight_l2", "sample_plasticity", "effective_rank/layers.0.weight"):
        assert np.isfinite(result.diagnostics[name][:, [0, 2]]).all()
        assert np.isnan(result.diagnostics[name][:, 1]).all()
    assert capfd.readouterr() == ("", "")


def test_diagnostics_of_a_learner_that_is_about_to_diverge():
    """The update makes the loss infinite, which only the next step detects."""
    result = population([Learner(method="sgd", lr=1e30)]).run(STREAM, 1, diagnostics=Diagnostics(every=1))
    assert result.diverged_at.tolist() == [-1]
    assert np.isfinite(result.diagnostics["stable_rank/layers.2.weight"]).all()
    assert np.isnan(result.diagnostics["effective_rank/layers.3"]).all()


def test_convolutions_have_channels():
    network = SmallConvNet((2, 10, 10), 3)
    result = population([LEARNERS[0], LEARNERS[2]], network).run(
        Counters((2, 10, 10), 3), 10, diagnostics=Diagnostics(every=10, samples=4)
    )
    assert 0 <= result.diagnostics["dormant_share/layers.1"][0, 0] <= 1
    assert result.diagnostics["gate_histogram/layers.0.weight"][0, 1].sum() == pytest.approx(1)


@pytest.mark.parametrize("options", [{"every": 0}, {"samples": 0}, {"updates": 0}, {"every": 1.5}])
def test_a_mistake_gets_one_sentence(options):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        Diagnostics(**options)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(diagnostics, "_REGISTERED", {})


def test_registered_figures_are_beside_the_others_and_survive_a_pause(registry):
    @diagnostics.register("first_weight")
    def first_weight(network, learner, batch):
        assert batch.inputs.shape == (min(step[0], 100), 6)
        assert batch.targets.shape == (min(step[0], 100),)
        return next(network.parameters())[0, 0]

    @diagnostics.register("several")
    def several(network, learner, batch):
        return {"rate": learner.lr, "pair": [learner.seed, 2.0], "drawn": torch.rand(())}

    step = [20]
    whole = population()
    result = whole.run(STREAM, 20, diagnostics=Diagnostics())
    assert result.diagnostics["rate"].tolist() == [[0.05, 0.1, 0.05]]
    assert result.diagnostics["pair"].tolist() == [[[4, 2], [1, 2], [2, 2]]]
    weights = [whole.parameters(i)["layers.0.weight"][0, 0].item() for i in range(3)]
    assert result.diagnostics["first_weight"][0].tolist() == weights
    again = population()
    again.restore(whole.state())
    step[0] = 40
    torch.rand(7)
    more = again.run(STREAM, 20, diagnostics=Diagnostics()).diagnostics
    assert more["first_weight"].shape == (2, 3)
    assert more["drawn"][0].tolist() == more["drawn"][1].tolist()  # a function of the seed only


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda network, learner, batch: 1 / 0,
            r"the diagnostic 'mine' failed for Learner\(.*ZeroDivisionError: division",
        ),
        (
            lambda network, learner, batch: torch.zeros(2, 2),
            "a diagnostic must be a number or a list of numbers, not an",
        ),
        (
            lambda network, learner, batch: {"weight_l2": 1.0},
            "the diagnostic 'mine' returns 'weight_l2', which already exists",
        ),
    ],
)
def test_a_registered_figure_that_fails_is_named(registry, function, words):
    diagnostics.register("mine")(function)
    with pytest.raises(ValueError, match=words):
        population().run(STREAM, 20, diagnostics=Diagnostics())


def test_diagnostics_use_normalized_inputs():
    """Sample plasticity by a plain loop: the same sample, as it was normalized for the update, before and after it."""
    network, stream = MLP((64, 8, 10)).double(), make("output-permuted-digits", task_length=50)
    learner = Learner(method="sgd", lr=0.05, normalize=0.9, seed=3)
    population = Population(network, [learner], backend="torch", dtype=torch.float64)
    looked = population.run(stream, 12, diagnostics=Diagnostics(every=4)).diagnostics["sample_plasticity"][:, 0]

    model = copy.deepcopy(network)
    model.load_state_dict({name: p[0] for name, p in initial_parameters(network, [3]).items()})
    norm, optimizer, seen = OnlineNorm(64, 0.9).double(), torch.optim.SGD(model.parameters(), lr=0.05), []
    for x, y in iterate(stream, seed=3, steps=12):
        x = norm(x.double().flatten(1))
        optimizer.zero_grad()
        before = torch.nn.functional.cross_entropy(model(x), y)
        before.backward()
        optimizer.step()
        after = torch.nn.functional.cross_entropy(model(x), y)
        seen.append((1 - after / before.clamp(min=1e-8)).clamp(0, 1).item())
    assert looked == pytest.approx(np.mean(np.reshape(seen, (3, 4)), 1), rel=1e-9)
