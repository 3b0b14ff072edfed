"""The compiled loops: noise, gates and idle rows number by number, and networks of any shape against the torch backend."""

import ctypes
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import PLAIN, Counters, Residual, SmallConvNet
from torch import nn

from upgd.kernels.machine import entry_point, floats_at
from upgd.kernels.normals import fill_normals, step_keys
from upgd.networks import MLP, ConvNet, Linear
from upgd.noise import learner_normals
from upgd.population import Learner, Population
from upgd.population.kernel import unsupported
from upgd.population.kernel.convolution import pool, unpool
from upgd.population.spec import groups
from upgd.streams import make

CPU = torch.device("cpu")
UPGD = Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, weight_decay=0.01)
UTILITY = [
    {"method": method, "wise": wise, "scaling": scaling, "order": order, "noise": noise, "lr": 0.02, "sigma": 0.05}
    for method, wise, scaling, order, noise in itertools.product(
        ("upgd", "upgd-nonprotecting", "ups"),
        ("weight", "feature"),
        ("global", "local"),
        (1, 2),
        ("white", "anticorrelated"),
    )
]


def reason_against(network, learner, device=CPU, dtype=torch.float32):
    ((group, _),) = groups([learner], [0])
    return unsupported(network, group, device, dtype)


@numba.njit
def normals_at(address, first_pair, pairs, seed, step):
    fill_normals(floats_at(address), first_pair, pairs, step_keys(seed, step))


# ---------------------------------------------------------------------------------------------------------------- noise


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**40), st.integers(0, 1000), st.integers(1, 300))
def test_noise_is_the_one_of_the_definition(seed, step, first, pairs):
    made = np.full(2 * pairs, np.nan, np.float32)
    normals_at(made.ctypes.data, first, pairs, seed, step)
    expected = learner_normals(seed, step, 2 * (first + pairs), dtype=torch.float64)[2 * first :]
    np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-6)


def test_noise_is_exact_in_the_tails_and_near_zero():
    made = np.empty(4_000_000, np.float32)
    normals_at(made.ctypes.data, 0, 2_000_000, 3, 5)
    expected = learner_normals(3, 5, 4_000_000, dtype=torch.float64).numpy()
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(made, expected, rtol=0, atol=1.5e-6)


# ---------------------------------------------------------------------------------------------------------- any network


@st.composite
def problems(draw):
    """A network and a stream with the awkward sizes that vectors and blocks do not divide."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    loss = draw(st.sampled_from(["cross_entropy", "mse"]))
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers.append(nn.Linear(inputs, outputs, bias=draw(st.booleans())))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.3), nn.Tanh(), nn.Identity(), None])))
    network = nn.Sequential(*[layer for layer in layers[:-1] if layer is not None])
    return network, Counters((sizes[0],), sizes[-1], loss=loss, scale=0.7, task_length=7)


def assert_equal_backends(network, learners, stream, steps, tolerance=2e-4):
    kernel = Population(network, learners, backend="kernel")
    truth = Population(network, learners, backend="torch")
    np.testing.assert_allclose(kernel.run(stream, steps).loss, truth.run(stream, steps).loss, rtol=2e-3, atol=1e-6)
    for (name, mine), (_, true) in zip(kernel.state().items(), truth.state().items(), strict=True):
        if name.startswith("group"):
            scale = true.flatten(1).norm(dim=1).clamp(min=1e-12)
            assert ((mine - true).flatten(1).norm(dim=1) / scale).max() < tolerance, name


@settings(max_examples=15)
@given(problems(), st.sampled_from([*UTILITY, *PLAIN]), st.sampled_from([0.0, 0.9, 0.999]))
def test_equals_the_torch_backend_on_any_network(problem, choice, beta):
    network, stream = problem
    beta = {"beta_utility": beta} if choice["method"] in ("upgd", "upgd-nonprotecting", "ups") else {}
    assert_equal_backends(network, [Learner(**choice, **beta, seed=seed) for seed in (0, 1)], stream, 12)


@pytest.mark.parametrize("choice", [*UTILITY, *PLAIN], ids=lambda c: "-".join(str(v) for v in c.values()))
@pytest.mark.slow
def test_equals_the_torch_backend_over_300_steps(choice):
    for activation in ("tanh", "leaky_relu"):
        network = MLP((64, 33, 17, 10), activation)
        assert_equal_backends(network, [Learner(**choice, seed=3)], make("input-permuted-digits", task_length=100), 300)


@pytest.mark.parametrize(
    "network",
    [
        SmallConvNet((2, 10, 10), 3),
        SmallConvNet((2, 11, 14), 3, "tanh"),  # neither square nor divisible by the pooling
        SmallConvNet((10, 12), 3, "leaky_relu", conv_activation=False),
    ],
    ids=lambda network: network.describe(),
)
def test_equals_the_torch_backend_on_convolutions(network):
    learners = [Learner(**choice, beta_utility=0.9) for choice in UTILITY[:16]] + [
        Learner(**choice) for choice in PLAIN
    ]
    assert_equal_backends(network, learners, Counters(network.input_shape, 3), 15)


@pytest.mark.parametrize("network", [MLP((18, 5, 3)), SmallConvNet((2, 10, 10), 3)], ids=lambda n: n.describe())
def test_normalized_inputs(network):
    """The state that is compared contains the running means and variances."""
    learners = [
        Learner(method="upgd", lr=0.01, sigma=0.1, normalize=0.9, seed=1),
        Learner(method="upgd", lr=0.01, granularity="feature", gated="hidden", normalize=0.5, seed=2),
        Learner(method="adamw", lr=0.01, normalize=0.99, seed=3),
    ]
    for learner in learners:
        assert reason_against(network, learner) is None
    shape = network.input_shape if isinstance(network, ConvNet) else (2, 3, 3)
    assert_equal_backends(network, learners, Counters(shape, 3, scale=4.0), 30)


@numba.njit
def pooled_and_back(maps, count, height, width, size, pooled, gradient, back):
    pool(floats_at(maps), count, height, width, size, floats_at(pooled))
    unpool(floats_at(gradient), count, height, width, size, floats_at(maps), floats_at(back))


@pytest.mark.parametrize("size", [2, 3])
def test_pooling_chooses_the_first_of_equal_values(size):
    generator = torch.Generator().manual_seed(0)
    maps = torch.randint(3, (2, 7, 41), generator=generator).float().requires_grad_()
    expected = torch.nn.functional.max_pool2d(maps, size)
    gradient = torch.randn(expected.shape, generator=generator)
    expected.backward(gradient)
    found, back = torch.empty_like(expected), torch.empty_like(maps)
    pooled_and_back(maps.data_ptr(), 2, 7, 41, size, found.data_ptr(), gradient.data_ptr(), back.data_ptr())
    assert torch.equal(found, expected)
    assert torch.equal(back, maps.grad)


def test_rows_longer_than_a_block_of_noise():
    network, stream = MLP((2100, 3, 2)), Counters((2100,), 2)
    learners = [UPGD, Learner(method="anti-pgd", lr=0.01, sigma=0.1)]
    assert_equal_backends(network, learners, stream, 5)


# ---------------------------------------------------------------------------------------------------- extreme utilities


def test_gates_of_utilities_that_are_far_below_the_largest():
    """With β = 0 and a large error, many utilities are below minus the largest, which uses the other formula for the gate."""
    stream = Counters((6,), 2, loss="mse", scale=3.0)
    learners = [
        Learner(method="upgd", lr=1e-3, sigma=0.1, beta_utility=beta, seed=s) for beta in (0, 0.9) for s in range(4)
    ]
    assert_equal_backends(MLP((6, 30, 2)), learners, stream, 20)


def test_gates_while_nothing_is_useful():
    """A network of zeros: every utility is zero, every gate ½, and nothing is divided by zero."""
    network = Linear(5, 3)
    parameters = {name: torch.zeros(1, *p.shape) for name, p in network.named_parameters()}
    learner = Learner(method="upgd", lr=0.1, sigma=0.0)
    population = Population(network, [learner], backend="kernel", parameters=parameters)
    stream = Counters((5,), 3)
    population.run(stream, 1)
    chunk = stream.chunk([0], 0, 1)
    delta = torch.full((3,), 1 / 3)
    delta[chunk.targets[0, 0]] -= 1
    expected = -0.1 * 0.5 * delta[:, None] * chunk.dense[0, 0]
    torch.testing.assert_close(population.parameters(0)["layers.0.weight"], expected)


def test_inactive_units_lose_utility_as_if_they_had_been_updated():
    """Rows of zero delta are skipped and decay later; at every step they must equal those of the torch backend."""
    network = MLP((6, 8, 3))
    learners = [Learner(method="upgd", lr=0.05, sigma=0.01, beta_utility=0.5, order=order) for order in (1, 2)]
    kernel, truth = (Population(network, learners, backend=backend) for backend in ("kernel", "torch"))
    idle = 0
    for _ in range(10):
        before = truth.state()
        kernel.run(Counters((6,), 3), 1)
        truth.run(Counters((6,), 3), 1)
        mine, true = kernel.state(), truth.state()
        name = "group.0.utility.layers.0.weight"
        idle += int((true[name] == 0.5 * before[name]).all(-1).sum())
        torch.testing.assert_close(mine[name], true[name], rtol=1e-4, atol=1e-7)
    assert idle > 10  # there were such rows


def test_vanishing_utilities_become_zero():
    """Processors are slow with subnormal numbers, so these are flushed to zero."""
    network = MLP((4, 3, 2))
    population = Population(network, [Learner(method="upgd", lr=0.0, sigma=0.0, beta_utility=0.01)], backend="kernel")
    population.run(Counters((4,), 2, scale=0.0), 30)
    utility = population.state()["group.0.utility.layers.0.weight"]
    assert (utility == 0).all() or utility.abs()[utility != 0].min() >= 1e-37


# --------------------------------------------------------------------------------------------------- threads and choice


def test_results_do_not_depend_on_the_number_of_threads():
    learners = [Learner(method="upgd", lr=0.01, sigma=0.1, seed=seed) for seed in range(5)]
    stream, network, outcomes = make("input-permuted-digits", task_length=20), MLP((64, 9, 10)), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            population = Population(network, learners, backend="kernel")
            population.run(stream, 50)
            outcomes.append(population.state())
    finally:
        torch.set_num_threads(before)
    for name, value in outcomes[0].items():
        for other in outcomes[1:]:
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("network", "device", "dtype", "words"),
    [
        (MLP((4, 3)), "cuda", torch.float32, "on the CPU, not on cuda"),
        (MLP((4, 3)), "cpu", torch.float64, "torch.float32, not in torch.float64"),
        (Residual(4, 3), "cpu", torch.float32, "defines its own forward()"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), "cpu", torch.float32, "'0' is a Conv2d"),
        (nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), "cpu", torch.float32, "'1' is a GELU"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "cpu", torch.float32, "end with a Linear layer"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Tanh(), nn.Linear(3, 2)), "cpu", torch.float32, "'2' is a Tanh"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 2)),
            "cpu",
            torch.float32,
            "Flatten '1' comes after a Linear layer",
        ),
        (nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4)] * 2), "cpu", torch.float32, "one layer twice"),
    ],
)
def test_unsupported_cases_give_a_reason(network, device, dtype, words):
    reason = reason_against(network, Learner(method="sgd", lr=0.01), torch.device(device), dtype)
    assert reason is not None
    assert words in reason


def test_an_activation_module_may_serve_several_layers():
    relu = nn.ReLU()
    sizes = itertools.pairwise((64, 20, 16, 10))
    layers = [layer for inputs, outputs in sizes for layer in (nn.Linear(inputs, outputs), relu)][:-1]
    shared = nn.Sequential(nn.Flatten(), *layers)
    own = nn.Sequential(nn.Flatten(), *(nn.ReLU() if layer is relu else layer for layer in layers))
    losses = [
        Population(network, [UPGD], backend="kernel").run(make("input-permuted-digits"), 50).loss
        for network in (shared, own)
    ]
    np.testing.assert_array_equal(*losses)


def test_runs_every_method_of_an_mlp():
    for choice in (*UTILITY, *PLAIN):
        assert reason_against(MLP((4, 3, 2)), Learner(**choice)) is None


# --------------------------------------------------------------------------------------------------------- kept on disk


def test_compiles_without_a_folder_to_write_to(monkeypatch):
    def nowhere(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.cfunc(*arguments, **options)

    monkeypatch.setattr("upgd.kernels.machine._cfunc", nowhere)

    @entry_point(1)
    def plus_one(numbers):
        numbers[0] += 1

    assert called(plus_one, 1) == 2


def called(function, number):
    numbers = np.array([number])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)(numbers.ctypes.data)
    return numbers[0]


def test_caches_of_other_sources_are_not_used(tmp_path):
    file = tmp_path / "kept_there.py"
    file.write_text(
        "from upgd.kernels.machine import entry_point\n\n"
        "def kept(sources):\n"
        "    def plus_one(numbers):\n"
        "        numbers[0] += 1\n"
        "    return entry_point(sources)(plus_one)\n"
    )
    spec = importlib.util.spec_from_file_location("kept_there", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert called(module.kept(1), 1) == 2
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:40] + b"of a class that has been renamed")
    assert called(module.kept(2), 1) == 2
    with pytest.raises(pickle.UnpicklingError):
        module.kept(1)


@pytest.mark.slow
def test_a_second_process_uses_the_cache(tmp_path):
    code = (
        "from upgd.networks import MLP; from upgd.population import Learner, Population; from upgd.streams import make\n"
        "Population(MLP((64, 5, 10)), [Learner(method='sgd', lr=0.1)]).run(make('input-permuted-digits'), 3)\n"
        "from upgd.population.kernel.learner import entry, learn\n"
        "print(entry(learn).cache_hits)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [int(run) for run in runs] == [0, 1]


# ------------------------------------------------------------------------------------------------------------ long runs


@pytest.mark.slow
def test_long_runs_have_the_same_accuracy_as_the_torch_backend():
    """8 seeds, 50 000 steps of input-permuted digits: means within two standard errors of their difference."""
    learners = [Learner(method="upgd", lr=0.01, sigma=0.01, seed=seed) for seed in range(8)]
    means = {}
    for backend in ("kernel", "torch"):
        population = Population(MLP((64, 32, 10)), learners, backend=backend)
        means[backend] = population.run(make("input-permuted-digits"), 50_000).mean_accuracy
    difference = means["kernel"] - means["torch"]
    assert (means["kernel"] > 0.5).all()
    spread = np.sqrt((means["kernel"].var(ddof=1) + means["torch"].var(ddof=1)) / 8)
    assert abs(difference.mean()) < 2 * spread
    assert not np.array_equal(means["kernel"], means["torch"])  # two backends were used
