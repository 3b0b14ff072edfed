"""Kernels generated from a method's rule."""

import math
from types import MappingProxyType

import numpy as np
import pytest
import torch

from upgd.kernels import modules
from upgd.methods import METHODS, Method, Setting, registry
from upgd.methods._scalars import evaluate
from upgd.methods.tracing import CannotTrace, traced, traced_parts
from upgd.networks import MLP, ConvNet
from upgd.noise import Purpose, normals, words
from upgd.population import Learner, Population
from upgd.population.choose import choose
from upgd.population.kernel import GeneratedBackend, KernelBackend, generated
from upgd.population.spec import groups
from upgd.streams import Chunk, make

DIGITS = make("output-permuted-digits", task_length=50)
NETWORK = MLP((64, 20, 12, 10))


class TowardsStart(Method):
    """Decays towards the initial weights."""

    name = "towards-start"
    strength = Setting(0.1, least=0)
    state = {"start": "parameter"}  # noqa: RUF012

    def update(self, w, g, s, h):
        return w - h.lr * (g + h.strength * (w - s.start))


class Everything(Method):
    """Uses all reductions and functions that kernels support."""

    name = "everything"
    state = {"mean": "zeros", "size": "zeros"}  # noqa: RUF012
    reductions = {  # noqa: RUF012
        f"{operation}_{over}": (operation, over)
        for operation in ("max", "norm", "mean", "sum")
        for over in ("learner", "layer", "unit")
    }

    def observe(self, w, g, s, h, t):
        mean = 0.9 * s.mean + 0.1 * g
        value = mean / (1 - 0.9**t)
        return {"mean": mean}, dict.fromkeys(self.reductions, value)

    def update(self, w, g, s, h, t, o, r):
        value = next(iter(vars(o).values()))
        size = torch.maximum(s.size, torch.abs(g)) + (g**2).sqrt() * 0.01
        scale = r.norm_unit + r.norm_layer + r.norm_learner + r.max_learner.abs() + 1e-3
        shift = r.mean_learner + r.mean_layer - r.mean_unit + 0.01 * (r.max_unit - r.max_layer)
        shift = shift + 1e-3 * (r.sum_learner - r.sum_layer + r.sum_unit)
        direction = torch.tanh(value / scale) + torch.sign(g) * torch.exp(-size.clamp(min=0.1, max=2.0))
        direction = torch.where(g > 0, direction, 0.5 * direction) + shift * torch.sigmoid(w)
        return w - h.lr * direction, {"size": size}


class Masks(Method):
    """Uses comparisons, logical operations and truth values in sums; the gradients of pixels that are always black are 0."""

    name = "masks"
    limit = Setting(0.5, least=0)
    state = {"seen": "zeros"}  # noqa: RUF012

    def update(self, w, g, s, h, t):
        seen = s.seen + (g != 0)
        odd = t % 2 != 0
        pull = 0.1 * (g == 0) * w + 0.01 * ((seen == 2) | ~(seen > h.limit) & odd)
        step = torch.where((t > 30) & (seen > 3), 0.5 * g, torch.clamp(g, min=-h.limit, max=h.limit))
        return torch.add(w, step + pull, alpha=-h.lr) - h.lr * 1000 * torch.tanh(g / 1000), {"seen": seen}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    for cls in (TowardsStart, Everything, Masks):
        registry.register(cls)


def distance(one: Population, other: Population) -> float:
    """The largest relative distance between the parameters of any learner."""
    return max(
        float((one.parameters(i)[name].double() - p).norm() / p.norm())
        for i in range(len(other.learners))
        for name, p in other.parameters(i).items()
    )


def held(network, stream, learners: list[Learner], steps: int, backend=GeneratedBackend) -> None:
    """The kernel is as close to float64 as float32 tensors are."""
    kernel, truth = (Population(network, learners, backend=b, dtype=t) for b, t in CASES[backend])
    result, expected = (population.run(stream, steps) for population in (kernel, truth))
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    assert distance(kernel, truth) < 5e-6


CASES = {backend: ((backend, torch.float32), ("torch", torch.float64)) for backend in (GeneratedBackend, KernelBackend)}


def test_a_rule_of_one_line():
    learners = [Learner(method="towards-start", lr=lr, strength=0.3, seed=seed) for seed, lr in enumerate((0.1, 0.02))]
    held(NETWORK, DIGITS, learners, 120)


def test_every_reduction_and_function():
    held(NETWORK, DIGITS, [Learner(method="everything", lr=0.01, seed=seed) for seed in (0, 1)], 60)


def test_comparisons_and_logical_operations():
    held(
        NETWORK,
        DIGITS,
        [Learner(method="masks", lr=0.01, limit=limit, seed=seed) for seed, limit in enumerate((0.5, 5.0))],
        60,
    )


def test_what_symbols_lack_runs_on_tensors():
    class Remainder(Method):
        name = "remainder"

        def update(self, w, g, h):
            return w - h.lr * (g % 1.0)

    registry.register(Remainder)
    population = Population(NETWORK, [Learner(method="remainder", lr=0.1)], backend="auto")
    population.run(DIGITS, 2)
    with pytest.raises(ValueError, match="no kernel can be generated for remainder: its rule raises TypeError"):
        Population(NETWORK, [Learner(method="remainder", lr=0.1)], backend="kernel")


@pytest.mark.parametrize("noise", ["white", "anticorrelated"])
def test_noise_curvature_and_moments(noise):
    held(NETWORK, DIGITS, [Learner(method="adaupgd", lr=0.003, beta_utility=0.9, sigma=0.1, noise=noise)], 80)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "weight-clipping", "lr": 0.05, "clip": 0.9},
        {"method": "shrink-and-perturb-init", "lr": 0.02, "sigma": 1.0, "weight_decay": 0.1},
    ],
    ids=lambda settings: settings["method"],
)
def test_bounds_of_initial_distributions(settings):
    """Weights and biases of Linear layers and convolutions."""
    learners = [Learner(seed=seed, **settings) for seed in (0, 1)]
    held(NETWORK, DIGITS, learners, 80)
    held(ConvNet((1, 20, 20), 3), Images(), learners, 20)


class Images:
    name, input_shape, outputs, loss, task_length = "images", (1, 20, 20), 3, "cross_entropy", 25

    def chunk(self, seeds, start, length, device="cpu"):
        seeds, steps = torch.as_tensor(seeds)[:, None], torch.arange(start, start + length)
        dense = normals(seeds, Purpose.INPUTS, steps, 400).float().view(len(seeds), length, *self.input_shape)
        return Chunk(start=start, targets=words(seeds, Purpose.TASK, steps, 1)[..., 0] % 3, dense=dense)


def test_convolutions_and_regression():
    held(ConvNet((1, 20, 20), 3), Images(), [Learner(method="towards-start", lr=0.01)], 30)
    held(MLP((16, 9, 1), "tanh"), make("toy-changing-outputs"), [Learner(method="towards-start", lr=0.01)], 100)


def test_results_are_independent_of_chunks_and_resuming():
    learners = [Learner(method="towards-start", lr=0.05, seed=seed) for seed in range(3)]
    together, alone = Population(NETWORK, learners), Population(NETWORK, learners[1:2])
    assert set(together.backends) == {"kernel"}
    together.run(DIGITS, 90)
    alone.run(DIGITS, 40)
    resumed = Population(NETWORK, learners[1:2])
    resumed.restore(alone.state())
    resumed.run(DIGITS, 50)
    for name, parameter in together.parameters(1).items():
        assert torch.equal(parameter, resumed.parameters(0)[name])


def test_a_diverged_learner_stops():
    population = Population(
        NETWORK, [Learner(method="towards-start", lr=1e30), Learner(method="towards-start", lr=0.05)]
    )
    result = population.run(DIGITS, 60)
    assert result.diverged_at[0] >= 0
    assert result.diverged_at[1] == -1


LAYERS = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in NETWORK.named_parameters()))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "upgd", "gated": "hidden", "weight_decay": 0.01},
        {"method": "upgd", "gated": f"{LAYERS[0]}+{LAYERS[2]}", "scaling": "local", "order": 2, "normalize": 0.9},
        {"method": "adaupgd", "gated": "output", "noise": "anticorrelated", "betas": (0.9, 0.9)},
    ],
    ids=lambda settings: settings["gated"],
)
def test_gates_in_some_layers(settings):
    learners = [Learner(lr=0.003, beta_utility=0.9, sigma=0.1, seed=seed, **settings) for seed in (0, 1)]
    assert chosen(learners[0]) is GeneratedBackend
    held(NETWORK, DIGITS, learners, 80)


def chosen(learner: Learner) -> type:
    ((group, _),) = groups([learner], [0])
    name, backend = choose("auto", NETWORK, group, torch.device("cpu"), torch.float32)
    assert name == "kernel"
    return backend


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "upgd", "beta_utility": 0.9, "sigma": 0.01},
        {"method": "upgd", "scaling": "local", "order": 2, "sigma": 0.0},
        {"method": "upgd-nonprotecting", "noise": "anticorrelated", "weight_decay": 0.01},
        {"method": "shrink-and-perturb", "sigma": 0.1, "weight_decay": 0.01},
        {"method": "adamw"},
    ],
    ids=lambda settings: settings["method"],
)
def test_hand_written_kernels_equal_generated_ones(settings):
    for backend in (GeneratedBackend, KernelBackend):
        held(NETWORK, DIGITS, [Learner(lr=0.01, **settings)], 100, backend)


def test_unsupported_rules_give_a_reason():
    class Branching(Method):
        name = "branching"

        def update(self, w, g, h):
            return w - h.lr * g if w > 0 else w

    class Unknown(Method):
        name = "unknown-function"

        def update(self, w, g, h):
            return w - h.lr * torch.erf(g)

    class Power(Method):
        name = "power"

        def update(self, w, g, h):
            return w - h.lr * g**2.5

    for cls, reason in ((Branching, "torch.where"), (Unknown, "torch.erf"), (Power, "the power 2.5")):
        with pytest.raises(CannotTrace, match=reason):
            traced(cls())
    with pytest.raises(CannotTrace, match="hidden units"):
        traced(METHODS["upgd"](granularity="feature"))
    registry.register(Unknown)
    ((group, _),) = groups([Learner(method="unknown-function", lr=0.1)], [0])
    name, _ = choose("auto", NETWORK, group, torch.device("cpu"), torch.float32)
    assert name == "torch"
    with pytest.raises(ValueError, match=r"no kernel can be generated for unknown-function: its rule calls torch\.erf"):
        choose("kernel", NETWORK, group, torch.device("cpu"), torch.float32)


def test_products_become_part_of_sums_and_nothing_is_computed_twice():
    text = generated.source(TowardsStart(), generated.rules_of(TowardsStart(), "all"))
    assert text.count("fused(") >= 2
    body = text[text.index("def update(") : text.index("@entry_point")]
    assigned = [line.split(" = ")[0].strip() for line in body.splitlines() if line.strip().startswith("v")]
    assert len(assigned) == len(set(assigned)) > 0


def test_files_of_other_users_are_not_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = generated.source(TowardsStart(), generated.rules_of(TowardsStart(), "all"))
    path = modules._written("rule_test.py", text)
    path.write_text("raise SystemExit('not ours')")
    assert modules._written("rule_test.py", text).read_text() == text


def test_a_rule_without_gates_keeps_its_utilities_and_reduces_nothing():
    gated, other = traced_parts(METHODS["upgd"](order=2))
    assert (gated.reductions, other.reductions) == ((("max", "learner"),), ())
    assert (gated.stored_state != (None,), gated.new_state) == (
        True,
        (None,),
    )  # the first phase stores all that changes
    assert other.stored_state == other.new_state == (None,)
    assert traced(METHODS["upgd"](order=2)).stored_state == (None,)  # on the CPU it only reads
    assert gated.scalars == other.scalars
    same = traced_parts(METHODS["obgd"]())
    assert same[0] is same[1]


def test_a_rule_of_hidden_units_is_traced_with_them_and_in_the_output_layer_without():
    hidden, output = traced_parts(METHODS["upgd"](granularity="feature", order=2))
    assert hidden.unit_state == ("utility",)
    assert hidden.unit_reductions == (("max", "learner"),)
    assert hidden.new_unit_state != (None,)
    assert len(hidden.unit_observed) == 1
    assert {"gate_gradient", "gate_curvature", "unit_observed", "unit_reduced"} <= {node[0] for node in hidden.nodes}
    assert output.new_weight != hidden.new_weight
    with pytest.raises(CannotTrace, match="uses hidden units"):
        traced(METHODS["redo"]())


def test_a_power_of_a_setting_is_traced():
    class Fading(Method):
        name = "fading"
        beta = Setting(0.9, least=0, below=1)
        state = MappingProxyType({"count": "zeros"})

        def update(self, w, g, s, h):
            return w * (1 - h.beta**s.count) + 2.0**s.count * g

    rule = traced(Fading())
    values = {"beta": torch.tensor([0.9, 0.0], dtype=torch.float64)}
    logarithms = [evaluate(scalar, values, values["beta"]) for scalar in rule.scalars]
    for count in (0, 1, 3):
        found = [torch.exp(logarithm * count) for logarithm in logarithms]
        torch.testing.assert_close(found, [values["beta"] ** count])
    assert ("constant", math.log(2)) in rule.nodes


def test_missing_attributes_of_symbols_are_named():
    with pytest.raises(CannotTrace, match=r"its rule uses \.sum of a tensor"):
        traced(METHODS["upgd"](scaling="local", profile="authors"))
