"""The kernel for GPUs, run on the CPU by fibers: every rule, reduction and exchange, compared with float64."""

from types import MappingProxyType

import emulated_chip
import pytest
import torch
from emulated_chip import EmulatedBackend, assert_right, run, state
from gpu_cases import Problem, Samples
from own_resets import OwnResets, recorded
from population_on_gpu import clusters_of
from torch import nn

from upgd.methods import Method, registry
from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.population.cuda import backend as on_chip
from upgd.population.cuda import planner
from upgd.population.cuda.generated import program

pytestmark = pytest.mark.skipif(emulated_chip.COMPILER is None, reason="needs a C++ compiler")

#: By the size of the clusters.
PROBLEMS: dict[int, Problem] = {
    1: (MLP((6, 18, 10, 2), "tanh"), Samples((6,), 2, "mse")),
    2: (MLP((9, 14, 11, 7, 3), "tanh"), Samples((9,), 3)),
    4: (MLP((12, 10, 5), "relu"), Samples((12,), 5)),
    8: (MLP((33, 21, 18, 7), "leaky_relu"), Samples((33,), 7, images=True, task_length=5)),
}
UPGD = {"method": "upgd", "lr": 0.02, "sigma": 0.1, "beta_utility": 0.9, "weight_decay": 0.01}
CBP = {"method": "continual-backprop", "lr": 0.05, "maturity": 3, "decay_contribution": 0.9, "replacement_rate": 0.05}
STEPS = 12


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    with emulated_chip.threads(96):
        yield


def held(cluster: int, steps: int = STEPS, **settings: object) -> None:
    assert_right(PROBLEMS[cluster], cluster, steps, **settings)


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        (8, {**UPGD, "scaling": "local", "noise": "anticorrelated", "gated": "hidden"}),
        pytest.param(2, {"method": "l2-init", "lr": 0.01, "optimizer": "adam", "eps": 1e-2}, marks=pytest.mark.slow),
        (4, {"method": "adaupgd", "lr": 0.01, "sigma": 0.1, "eps": 1e-2, "scaling": "local"}),
        (8, {**UPGD, "order": 2, "normalize": 0.9, "gated": "output"}),
        (2, {**UPGD, "granularity": "feature", "order": 2, "scaling": "local"}),
    ],
    ids=lambda case: case if isinstance(case, int) else case["method"],
)
def test_rules_are_right(cluster, settings):
    held(cluster, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        (1, UPGD),
        (2, {**UPGD, "normalize": 0.9}),
        (1, {**UPGD, "gated": "hidden", "scaling": "local"}),
        (8, {**UPGD, "order": 2}),
        (2, {**UPGD, "order": 2, "scaling": "local"}),
        (1, {**UPGD, "granularity": "feature"}),
        (4, {**UPGD, "granularity": "feature", "scaling": "local"}),
        (4, {**UPGD, "profile": "authors"}),
        (8, {"method": "adamw", "lr": 0.01, "eps": 1e-2}),
        (1, {"method": "rmsprop", "lr": 0.01, "eps": 1e-2}),
        (4, {"method": "momentum", "lr": 0.02}),
        (1, {"method": "obgd", "lr": 0.5}),
        (2, {"method": "s-ewc", "lr": 0.02, "kappa": 1.0}),
        (4, {"method": "s-mas", "lr": 0.02, "kappa": 1.0}),
        (2, {"method": "s-si", "lr": 0.02, "kappa": 0.1}),
        (1, {"method": "s-rwalk", "lr": 0.02, "kappa": 0.1}),
        (8, {"method": "shrink-and-perturb", "lr": 0.02, "sigma": 0.1, "weight_decay": 0.1}),
        (2, {"method": "weight-clipping", "lr": 0.05, "clip": 0.8}),
        (4, {"method": "weight-clipping", "lr": 0.02, "clip": 0.9, "optimizer": "adam", "eps": 1e-2}),
        (1, {"method": "shrink-and-perturb-init", "lr": 0.02, "sigma": 0.5, "weight_decay": 0.1}),
    ],
    ids=lambda case: case if isinstance(case, int) else case["method"],
)
def test_more_rules_are_right(cluster, settings):
    held(cluster, **settings)


def own_rule(operation: str, over: str) -> type[Method]:
    """A custom method with a reduction."""

    class Own(Method):
        name = f"own-{operation}-{over}"
        state = MappingProxyType({"velocity": "zeros", "start": "parameter"})
        reductions = MappingProxyType({"size": (operation, over)})

        def observe(self, w, g, s):
            velocity = 0.9 * s.velocity + g
            size = abs(velocity - w * w)
            return {"velocity": velocity}, {"size": -size - 0.1 if operation == "max" else size + 0.1}

        def update(self, w, g, s, h, o, r):
            step = s.velocity / (1 + r.size * r.size) + 0.1 * (w - s.start) + 0.01 * torch.tanh(o.size) * torch.sign(g)
            return w - h.lr * step

    registry.register(Own)
    return Own


REDUCTIONS = [
    (operation, over) for operation in ("max", "norm", "mean", "sum") for over in ("learner", "layer", "unit")
]


@pytest.mark.parametrize(
    ("number", "operation", "over"),
    [
        pytest.param(n, *case, marks=() if case in (("mean", "unit"), ("max", "layer")) else pytest.mark.slow)
        for n, case in enumerate(REDUCTIONS)
    ],
)
def test_custom_reductions_are_correct(number, operation, over):
    held((8, 2, 1, 4)[(number + number // 4) % 4], method=own_rule(operation, over).name, lr=0.02)


# ------------------------------------------------------------------------------------------------------ resets of units


def resets_are_right(monkeypatch, cluster: int, steps: int, **settings: object) -> None:
    """As above; and units of every hidden layer are reset, at several steps."""
    seen = recorded(monkeypatch)
    held(cluster, steps, **settings)
    hidden = sum(isinstance(module, nn.Linear) for module in PROBLEMS[cluster][0].modules()) - 1
    assert {number for number, _ in seen} == set(range(hidden))
    assert len({step for _, step in seen}) >= 3


@pytest.mark.parametrize(
    ("cluster", "steps", "settings"),
    [
        (2, 24, CBP),
        pytest.param(8, 24, {**CBP, "optimizer": "adam", "lr": 0.01, "eps": 1e-2}, marks=pytest.mark.slow),
        (4, 24, {**CBP, "optimizer": "adam", "lr": 0.01, "eps": 1e-2, "betas": (0.0, 0.9)}),
        pytest.param(1, 24, {**CBP, "replacement_rate": 0.2}, marks=pytest.mark.slow),  # several units at a step
        (8, 24, {"method": "redo", "lr": 0.05, "tau": 0.6, "period": 6, "normalize": 0.9}),
        pytest.param(
            1,
            24,
            {"method": "redo", "optimizer": "adam", "lr": 0.01, "eps": 1e-2, "tau": 0.6, "period": 5},
            marks=pytest.mark.slow,
        ),
        (2, 20, {"method": "self-normalized-resets", "lr": 0.05, "patience": 2, "rejection": 0.2}),
        pytest.param(
            8,
            24,
            {"method": "self-normalized-resets", "lr": 0.05, "patience": 1.5, "rejection": 0.1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: case["method"] if isinstance(case, dict) else case,
)
def test_methods_that_reset_units_are_right(monkeypatch, cluster, steps, settings):
    resets_are_right(monkeypatch, cluster, steps, **settings)


@pytest.mark.parametrize("cluster", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_custom_resets_are_correct(monkeypatch, cluster):
    registry.register(OwnResets)
    resets_are_right(monkeypatch, cluster, 16, method="own-resets", lr=0.02)


@pytest.mark.parametrize("scaling", ["global", pytest.param("local", marks=pytest.mark.slow)])
def test_rules_written_by_hand_are_those_that_are_generated(monkeypatch, scaling):
    problem, learners = PROBLEMS[2], [Learner(**UPGD, scaling=scaling, seed=seed) for seed in (0, 1)]
    with clusters_of(2):
        by_hand = run(problem, learners, EmulatedBackend, STEPS)
        monkeypatch.setattr(on_chip, "_program", lambda group, *_: program(group.method))
        generated = run(problem, learners, EmulatedBackend, STEPS)
    assert [p._backends[0]._plan.program is None for p in (by_hand, generated)] == [True, False]
    for name, tensor in state(by_hand).items():
        torch.testing.assert_close(tensor, state(generated)[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("held", "settings"),
    [
        (1, {**UPGD, "scaling": "local", "normalize": 0.9}),
        (0, {"method": "s-rwalk", "lr": 0.02, "kappa": 0.1}),
        pytest.param(1, {**UPGD, "noise": "anticorrelated"}, marks=pytest.mark.slow),
        pytest.param(1, {"method": "adaupgd", "lr": 0.01, "sigma": 0.1}, marks=pytest.mark.slow),
    ],
    ids=lambda case: case if isinstance(case, int) else case["method"],
)
def test_what_has_no_room_on_chip_is_the_same_in_global_memory(monkeypatch, held, settings):
    problem, learners = (MLP((64, 40, 6, 3)), Samples((64,), 3)), [Learner(**settings, seed=seed) for seed in (0, 1, 2)]
    with clusters_of(2):
        near = run(problem, learners, EmulatedBackend, STEPS)
        plan = near._backends[0]._plan
        monkeypatch.setattr(planner, "_HELD", dict.fromkeys(range(6), held))
        first = sum(4 * plan.words * block.shared_floats for block in plan.layers[0].blocks)
        with emulated_chip.shared_bytes(plan.shared_bytes - first * 4 // 5):
            far = run(problem, learners, EmulatedBackend, STEPS)
    assert first > 4 * (far._backends[0]._plan.far_floats - plan.far_floats) > first // 8
    assert sum(block.held for layer in far._backends[0]._plan.layers for block in layer.blocks) == held
    for name, tensor in state(near).items():
        assert torch.equal(tensor, state(far)[name]), name


@pytest.mark.parametrize(
    ("cluster", "settings", "part"),
    [
        (8, {**UPGD, "order": 2, "normalize": 0.9, "gated": "output"}, "normalizer"),
        (2, CBP, "due"),
    ],
    ids=["upgd", "continual-backprop"],
)
def test_a_saved_state_resumes_bitwise(cluster, settings, part):
    problem = PROBLEMS[cluster]
    learners = [Learner(**settings, seed=seed) for seed in (0, 1)]
    with clusters_of(cluster):
        whole, begun = run(problem, learners, EmulatedBackend, STEPS), run(problem, learners, EmulatedBackend, 5)
        other = Population(problem[0], learners, backend=EmulatedBackend)
        other.restore(begun.state())
        other.run(problem[1], STEPS - 5, window=1000)
    assert any(part in name for name in state(whole))
    for name, tensor in state(whole).items():
        assert torch.equal(tensor, other.state()[name]), name


@pytest.mark.parametrize("settings", [{"method": "momentum"}, CBP], ids=["momentum", "continual-backprop"])
def test_a_diverged_learner_stops_without_affecting_the_other(settings):
    problem = PROBLEMS[1]
    wild, calm = (Learner(**{**settings, "lr": lr}, seed=4) for lr in (1e30, 0.01))
    with clusters_of(1):
        both, alone = (run(problem, own, EmulatedBackend, 6, 6) for own in ([wild, calm], [calm]))
    truth = run(problem, [wild], "torch", STEPS)
    assert both.diverged_at.tolist() == [truth.diverged_at[0], -1]
    assert both.diverged_at[0] >= 0
    for name, tensor in both.parameters(1).items():
        assert torch.equal(tensor, alone.parameters(0)[name])
