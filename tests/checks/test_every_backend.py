"""Requirements of every backend of the population."""

import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from upgd.networks import MLP, ConvNet, reset
from upgd.noise import Purpose, normals, words
from upgd.population import Learner, Population
from upgd.population.choose import choose
from upgd.population.spec import groups
from upgd.streams import Chunk, make

CPU = torch.device("cpu")
BACKENDS = ("torch", "kernel")
DIGITS = make("input-permuted-digits", task_length=25)
TOY = make("toy-changing-outputs", task_length=25)
MLP_OF_DIGITS = MLP((64, 9, 7, 10))
EVERY_KIND = [
    Learner(method="sgd", lr=0.01, seed=1),
    Learner(method="adamw", lr=0.001, seed=2),
    Learner(method="anti-pgd", lr=0.01, sigma=0.1, seed=1),
    Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, weight_decay=0.01, seed=3),
    Learner(method="upgd", lr=0.02, sigma=0.1, scaling="local", noise="anticorrelated", seed=3),
    Learner(method="upgd-nonprotecting", lr=0.01, sigma=0.1, order=2, seed=4),
    Learner(method="ups", lr=0.01, sigma=0.1, wise="feature", seed=4),
    Learner(method="upgd", lr=0.01, sigma=0.1, wise="feature", scaling="local", order=2, seed=5),
    Learner(method="shrink-and-perturb", lr=0.01, sigma=0.1, weight_decay=0.01, seed=2**40 + 1),
    Learner(method="upgd", lr=0.01, sigma=0.1, normalize=0.9, seed=6),
    Learner(method="upgd", lr=0.01, sigma=0.1, normalize=0.99, gated="output", seed=6),
]


class SmallConvNet(ConvNet):
    CHANNELS = (2, 3)
    KERNEL = 3
    HIDDEN = (5, 4)


@dataclass
class Images:
    """Random images with random classes."""

    name: str = "images"
    input_shape: tuple[int, ...] = (2, 10, 10)
    outputs: int = 3
    loss: str = "cross_entropy"
    task_length: int = 25

    def chunk(self, seeds, start, length, device="cpu"):
        seeds, steps = torch.as_tensor(seeds)[:, None], torch.arange(start, start + length)
        dense = normals(seeds, Purpose.INPUTS, steps, 200).float().view(len(seeds), length, *self.input_shape)
        return Chunk(start=start, targets=words(seeds, Purpose.TASK, steps, 1)[..., 0] % 3, dense=dense)


PROBLEMS = {
    "digits": (MLP_OF_DIGITS, DIGITS),
    "tanh": (MLP((64, 33, 10), "tanh"), DIGITS),
    "toy": (MLP((16, 8, 7, 1), "identity"), TOY),
    "images": (SmallConvNet((2, 10, 10), 3), Images()),
}


def runnable(backend: str, network, learners=EVERY_KIND) -> list[Learner]:
    """The learners that the backend can run."""
    able = []
    for learner in learners:
        try:
            choose(backend, network, groups([learner], [0])[0][0], CPU, torch.float32)
        except ValueError:
            continue
        able.append(learner)
    assert able, f"backend {backend!r} does not run this network"
    return able


def outcome(population: Population, learner: int) -> dict[str, np.ndarray]:
    """Return the results of one learner: its curves and its parameters."""
    result = population.result()
    known = {name: p.numpy() for name, p in population.parameters(learner).items()}
    return {**known, "loss": result.loss[:, learner], "accuracy": result.accuracy[:, learner]}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], what: object) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=f"{name} of {what}")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.mark.parametrize("problem", PROBLEMS)
def test_results_are_independent_of_other_learners_and_order(backend, problem):
    network, stream = PROBLEMS[problem]
    learners = runnable(backend, network)
    # Other learners of the same kind enlarge the groups; they must not affect the results.
    companions = [Learner(**{**vars(own), "seed": own.seed + 10 + i}) for i in range(2) for own in learners]
    crowd = Population(network, [*companions, *learners[::-1]], backend=backend)
    crowd.run(stream, 30)
    for place, learner in enumerate(learners[::-1], start=len(companions)):
        alone = Population(network, [learner], backend=backend)
        alone.run(stream, 30)
        assert_same(outcome(alone, 0), outcome(crowd, place), learner)


def test_results_do_not_depend_on_chunks(backend):
    learners = runnable(backend, MLP_OF_DIGITS)
    whole = Population(MLP_OF_DIGITS, learners, backend=backend)
    whole.run(DIGITS, 30)
    for pieces, longest_block in (((1, 29), 40), ((9, 0, 21), 1), ((13, 7, 10), 7)):
        parts = Population(MLP_OF_DIGITS, learners, backend=backend)
        parts._pace.STEPS = parts._pace.steps = longest_block
        for steps in pieces:
            parts.run(DIGITS, steps)
        for i, learner in enumerate(learners):
            assert_same(outcome(whole, i), outcome(parts, i), (pieces, learner))


def test_a_saved_state_can_be_resumed(backend):
    learners = [*runnable(backend, MLP_OF_DIGITS), *runnable(backend, MLP_OF_DIGITS, [Learner(method="sgd", lr=1e30)])]
    first = Population(MLP_OF_DIGITS, learners, backend=backend)
    first.run(DIGITS, 17)
    by_torch, by_numpy = io.BytesIO(), io.BytesIO()
    torch.save(first.state(), by_torch)
    np.savez(by_numpy, **first.state())
    by_torch.seek(0)
    by_numpy.seek(0)
    resumed = [Population(MLP_OF_DIGITS, learners, backend=backend) for _ in range(2)]
    resumed[0].restore(torch.load(by_torch, weights_only=True))
    resumed[1].restore(np.load(by_numpy, allow_pickle=False))
    for second in resumed:
        assert second.step == 17
        for i, learner in enumerate(learners):
            assert_same(outcome(first, i), outcome(second, i), learner)
    first.run(DIGITS, 20)
    for second in resumed:
        second.run(DIGITS, 20)
        for i, learner in enumerate(learners):
            assert_same(outcome(first, i), outcome(second, i), learner)
        assert second.result().diverged_at[-1] >= 0


def test_a_saved_state_is_not_changed_by_running_on(backend):
    population = Population(MLP_OF_DIGITS, runnable(backend, MLP_OF_DIGITS), backend=backend)
    population.run(DIGITS, 10)
    state = population.state()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    population.run(DIGITS, 10)
    restored = Population(MLP_OF_DIGITS, population.learners, backend=backend)
    restored.restore(state)
    restored.run(DIGITS, 10)
    for name, tensor in state.items():
        assert torch.equal(tensor, copies[name]), name


@pytest.mark.parametrize("problem", ["digits", "toy"])
def test_a_diverged_learner_is_reported_without_affecting_others(backend, problem):
    network, stream = PROBLEMS[problem]
    calm = runnable(backend, network)
    wild = [Learner(**{**vars(own), "lr": 1e20 if own.method != "ups" else 1e38, "seed": 77}) for own in calm]
    crowd = Population(network, [learner for pair in zip(wild, calm, strict=True) for learner in pair], backend=backend)
    crowd.run(stream, 30)
    alone = Population(network, calm, backend=backend)
    alone.run(stream, 30)
    diverged_at = crowd.result().diverged_at
    assert (diverged_at[1::2] == -1).all()
    assert (diverged_at[0::2] > 0).all()
    for i, learner in enumerate(calm):
        assert_same(outcome(alone, i), outcome(crowd, 2 * i + 1), learner)
    frozen = [outcome(crowd, 2 * i) for i in range(len(wild))]
    crowd.run(stream, 10)
    for i, learner in enumerate(wild):
        after = outcome(crowd, 2 * i)
        assert np.isnan(after["loss"][-1])
        for name in crowd.parameters(0):
            np.testing.assert_array_equal(frozen[i][name], after[name], err_msg=f"{name} of {learner}")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_equals_the_torch_backend(backend, problem):
    """In float32, up to rounding, over 300 steps (60 for methods without a kernel); the torch backend in float64."""
    network, stream = PROBLEMS[problem]
    learners = runnable(backend, network)
    if backend == "torch":
        learners = learners[3:5]
    own = Population(network, learners, backend=backend)
    truth = Population(network, learners, backend="torch", dtype=torch.float64 if backend == "torch" else torch.float32)
    steps = 60 if backend == "torch" else 300
    own.run(stream, steps)
    truth.run(stream, steps)
    for i, learner in enumerate(learners):
        mine, true = outcome(own, i), outcome(truth, i)
        np.testing.assert_allclose(mine["loss"], true["loss"], rtol=2e-3, err_msg=f"loss of {learner}")
        for name in own.parameters(i):
            error = np.linalg.norm(mine[name] - true[name]) / np.linalg.norm(true[name])
            assert error < 1e-3, f"{name} of {learner}: {error}"


def test_a_small_weight_decay_is_not_rounded_away(backend):
    """lr·weight_decay = 1e-8, in 32 bits: 1 − 1e-8 is 1."""
    shared = {"lr": 1e-4, "seed": 3}
    utility = {**shared, "sigma": 0.1}
    settings = [
        {"method": "adamw", **shared},
        {"method": "shrink-and-perturb", **shared, "sigma": 0.0},
        {"method": "shrink-and-perturb", **shared, "sigma": 0.1},
        *({"method": m, "wise": w, **utility} for m in ("upgd", "upgd-nonprotecting") for w in ("weight", "feature")),
        {"method": "upgd", "scaling": "local", **utility},
    ]
    network = MLP((64, 33, 10), "tanh")  # all weights change at every step, so that the decay is never the only update
    learners = [Learner(**own, weight_decay=decay) for own in settings for decay in (1e-4, 0.0)]
    population = Population(network, learners, backend=backend)
    truth = Population(network, learners, backend="torch", dtype=torch.float64)
    start = torch.cat([p.flatten() for p in truth.parameters(0).values()])
    population.run(DIGITS, 100)
    truth.run(DIGITS, 100)
    for i, own in enumerate(settings):
        lost = []
        for run in (population, truth):
            decayed, free = (torch.cat([p.flatten() for p in run.parameters(2 * i + k).values()]) for k in (0, 1))
            lost.append(float((free.double() - decayed.double()) @ start / start.square().sum()))
        assert lost[0] == pytest.approx(lost[1], rel=0.2), own
        assert lost[1] == pytest.approx(100 * 1e-8, rel=0.2), own


def test_a_sequence_that_flattens_its_inputs_is_an_mlp(backend):
    """… by parameter, so its learners compute the same as those of the MLP."""
    sequence = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 10))
    runs = [Population(network, EVERY_KIND, backend=backend).run(DIGITS, 30) for network in (sequence, MLP_OF_DIGITS)]
    np.testing.assert_array_equal(runs[0].loss, runs[1].loss)


def test_without_hidden_layers_feature_wise_learners_descend_the_gradient(backend):
    network = MLP((64, 10))
    feature_wise = [Learner(method="upgd", lr=0.01, wise="feature", scaling=scaling) for scaling in ("global", "local")]
    result = Population(network, [*feature_wise, Learner(method="sgd", lr=0.01)], backend=backend).run(DIGITS, 30)
    np.testing.assert_allclose(result.loss[:, :2], result.loss[:, 2:].repeat(2, 1), rtol=1e-5)


def test_another_backend_can_resume(backend):
    learners = runnable(backend, MLP_OF_DIGITS)
    first = Population(MLP_OF_DIGITS, learners, backend="torch")
    first.run(DIGITS, 30)
    second = Population(MLP_OF_DIGITS, learners, backend=backend)
    second.restore(first.state())
    loss = second.run(DIGITS, 30).loss
    np.testing.assert_allclose(loss, first.run(DIGITS, 30).loss, rtol=1e-3)


def test_of_outputs_that_tie_the_first_is_the_prediction(backend):
    network, learner = MLP((64, 3, 10)), Learner(method="sgd", lr=0.0)
    parameters = {name: torch.zeros(1, *param.shape) for name, param in network.named_parameters()}
    parameters["layers.2.bias"][0, [2, 5, 8]] = 1.0
    result = Population(network, [learner], parameters=parameters, backend=backend).run(DIGITS, 200)
    targets = DIGITS.chunk([0], 0, 200).targets[0]
    shares = [(targets == tied).double().mean().item() for tied in (2, 5, 8)]
    assert len(set(shares)) == 3  # otherwise, another choice could give the same result
    assert result.mean_accuracy.item() == pytest.approx(shares[0])


def test_of_values_that_tie_in_a_pool_the_first_gets_the_gradient_as_in_torch(backend):
    """Filters of zeros tie everywhere; their gradient is the sum of the patches under the values that were chosen."""
    network, stream, name = SmallConvNet((2, 10, 10), 3), Images(), "layers.0.weight"
    reset(network, 0)
    parameters = {name: param[None].detach().clone() for name, param in network.named_parameters()}
    parameters |= {name: torch.zeros_like(parameters[name]), "layers.0.bias": torch.ones(1, 2)}
    population = Population(network, [Learner(method="sgd", lr=1.0)], parameters=parameters, backend=backend)
    population.run(stream, 1)
    network.load_state_dict({name: param[0] for name, param in parameters.items()})
    chunk = stream.chunk([0], 0, 1)
    nn.functional.cross_entropy(network(chunk.dense[0]), chunk.targets[0]).backward()
    gradient = network.get_parameter(name).grad
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(population.parameters(0)[name], -gradient, rtol=1e-4, atol=1e-6)
