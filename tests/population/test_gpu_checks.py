"""The GPU checks, in a small form that needs no GPU, and their ability to detect errors."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import convolutions_on_gpu
import general_on_gpu
import gpu_cases
import long_runs
import numpy as np
import population_on_gpu
import pytest
import torch
from gpu_cases import CHECKS, NETWORKS, Problem, Run, Samples, both, compared
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_main
from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.population.cuda import backend as on_chip

MAIN = gpu_main.__file__
LONG = [name for name in CHECKS if name.startswith("long_runs")]


@pytest.fixture
def made_small(monkeypatch) -> None:
    """Use small networks instead of large ones, and some learners of every list."""
    monkeypatch.setitem(NETWORKS, "784-300-150-10", (MLP((50, 9, 7, 10)), Samples((50,), 10, images=True)))
    monkeypatch.setitem(NETWORKS, "784-300-150-47", (MLP((50, 9, 7, 47)), Samples((50,), 47, images=True)))
    monkeypatch.setitem(NETWORKS, "16-300-150-1", (MLP((16, 40, 30, 1), "identity"), Samples((16,), 1, "mse")))
    monkeypatch.setattr(general_on_gpu, "STEPS", 10)
    monkeypatch.setattr(population_on_gpu, "STEPS", 10)
    for name, learners in general_on_gpu.LEARNERS.items():
        monkeypatch.setitem(general_on_gpu.LEARNERS, name, learners[::9])
    few = [(problem, names[:1], size) for problem, names, size in convolutions_on_gpu.CONVOLUTIONAL]
    monkeypatch.setattr(convolutions_on_gpu, "CONVOLUTIONAL", few)
    monkeypatch.setattr(long_runs, "STEPS", 50)
    monkeypatch.setattr(long_runs, "SEEDS", 3)


@pytest.mark.usefixtures("made_small")
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in LONG])
def test_every_check_runs(name: str) -> None:
    assert CHECKS[name].run("cpu")


@pytest.mark.usefixtures("made_small")
@pytest.mark.parametrize("name", LONG)
def test_the_long_checks_run(monkeypatch, name: str) -> None:
    """Compare some steps with another backend."""
    right = long_runs.measured({**long_runs.ON_CHIP, **long_runs.GENERAL}, long_runs.STEPS, backend="torch")
    monkeypatch.setattr(long_runs, "reference", lambda: (right, {}))
    assert "means within 2 standard errors" in CHECKS[name].run("cpu")


SOME = ["kernels_compile", "a_diverged_convnet_stays_alone", "test_curvature_gpu"]


@pytest.mark.slow
def test_all_at_once() -> None:
    """Several checks at once, in processes of their own."""
    command = [sys.executable, MAIN, "--device", "cpu", "--jobs", "2", *SOME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in SOME)
    assert "3 passed, 0 failed" in done.stdout


def test_one_after_the_other(capsys) -> None:
    assert gpu_main.main(["--device", "cpu", "--jobs", "1", *SOME]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in SOME)
    assert "3 passed, 0 failed" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_failed_check_fails_the_run(capsys, monkeypatch) -> None:
    """Without a GPU, every check that needs one fails."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "none")
    assert gpu_main.main(["state_goes_on"]) == 1
    printed = capsys.readouterr().out
    assert "state_goes_on" in printed
    assert "0 passed, 1 failed" in printed


def test_the_kernels_to_come_can_be_planned(monkeypatch) -> None:
    """... on an H200, in clusters of each size that is asked for; the kernel supports all of them."""
    monkeypatch.setattr(on_chip, "missing", lambda device: None)
    monkeypatch.setattr(on_chip.driver, "shared_bytes", lambda device: 232_448)
    monkeypatch.setattr(on_chip.driver, "active_clusters", lambda device, cluster, *_: 120 // cluster)
    texts = population_on_gpu.texts(torch.device("cuda", 0))
    on_chip._plans.cache_clear()
    for size in (1, 2, 4, 8, 16):
        assert any(f"CLUSTER = {size}," in text for text in texts)


# -------------------------------------------------------------------------------------------------- equality and errors


PROBLEM: Problem = (MLP((12, 9, 7, 4), "tanh"), Samples((12,), 4))
METHODS = {
    "sgdw": Learner(method="sgdw", lr=0.01, weight_decay=0.1),
    "pgd": Learner(method="pgd", lr=0.01, sigma=0.1),
    "upgd": Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, weight_decay=0.1),
    "local": Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, scaling="local", noise="anticorrelated"),
    "second order": Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, order=2),
    "features": Learner(method="upgd", lr=0.01, sigma=0.1, beta_utility=0.9, wise="feature"),
    "adamw": Learner(method="adamw", lr=0.01, eps=1e-3, weight_decay=0.1),
}
MISTAKES = [
    *((name, {"lr": 0.01002}) for name in METHODS),
    *((name, {"sigma": 0.1002}) for name in ("pgd", "upgd", "local", "second order", "features")),
    *((name, {"beta_utility": 0.9002}) for name in ("upgd", "local", "second order", "features")),
    *((name, {"weight_decay": 0.101}) for name in ("sgdw", "upgd", "adamw")),
    *(("adamw", more) for more in ({"betas": (0.9002, 0.999)}, {"betas": (0.9, 0.99902)}, {"eps": 1.02e-3})),
]


EVERYBODY = [replace(learner, seed=seed) for learner in METHODS.values() for seed in (0, 1)]


def run_of(learners: Sequence[Learner], steps: int = 20) -> Run:
    return gpu_cases.on_the_device(PROBLEM, learners, steps, "cpu", "torch")


@pytest.fixture(scope="module")
def right() -> tuple[Run, Run]:
    return gpu_cases.on_the_cpu(PROBLEM, EVERYBODY, 20)


def test_equal_runs_are_equal(right: tuple[Run, Run]) -> None:
    assert "second_moment" in compared(*right, run_of(EVERYBODY))


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_small_mistake_in_one_method_is_detected(name: str, mistake: dict, right: tuple[Run, Run]) -> None:
    wrong = [replace(own, **mistake) if replace(own, seed=0) == METHODS[name] else own for own in EVERYBODY]
    assert wrong != EVERYBODY
    with pytest.raises(AssertionError):
        compared(*right, run_of(wrong))


def test_a_missing_part_is_detected(monkeypatch) -> None:
    truth, rounded, there = both(PROBLEM, [METHODS["adamw"]], 2, "cpu", "torch")
    state = there.population.state()
    lost = {name: tensor for name, tensor in state.items() if "second_moment" not in name}
    monkeypatch.setattr(there.population, "state", lambda: lost)
    with pytest.raises(AssertionError, match="no second_moment"):
        compared(truth, rounded, there)


def test_non_numeric_values_are_refused(monkeypatch) -> None:
    truth, rounded, there = both(PROBLEM, [METHODS["upgd"]], 2, "cpu", "torch")
    state = there.population.state()
    next(tensor for name, tensor in state.items() if ".utility." in name)[0, 0] = float("nan")
    monkeypatch.setattr(there.population, "state", lambda: state)
    with pytest.raises(AssertionError, match="utility"):
        compared(truth, rounded, there)


def test_a_compiler_that_fails_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(gpu_cases, "find_spec", lambda name: "it is there")
    log = logging.getLogger("upgd.population")
    with gpu_cases.compiling(True):
        log.info("something else")
    with pytest.raises(AssertionError, match="because"), gpu_cases.compiling(True):
        log.warning("torch.compile failed (%s)", "because")


@pytest.mark.parametrize(("activation", "passes"), [("tanh", False), ("relu", True)])
def test_one_learner_may_differ_at_a_kink(monkeypatch, activation: str, passes: bool) -> None:
    learners = [replace(METHODS["sgdw"], seed=seed) for seed in range(3)]
    problem = (MLP((12, 9, 4), activation), PROBLEM[1])
    truth, rounded, there = both(problem, learners, 2, "cpu", "torch")
    for stumbling, fine in ((1, passes), (2, False)):
        state = there.population.state()
        state["group.0.parameters.layers.2.weight"][:stumbling] *= 1.0001
        with monkeypatch.context() as patch:
            patch.setattr(there.population, "state", lambda state=state: state)
            if fine:
                assert compared(truth, rounded, there)
            else:
                with pytest.raises(AssertionError, match="parameters"):
                    compared(truth, rounded, there)


def test_one_bit_is_seen() -> None:
    one, other = (Population(PROBLEM[0], [METHODS["upgd"]], backend="torch") for _ in range(2))
    gpu_cases.assert_same_bits(gpu_cases.bits(one), gpu_cases.bits(other), "two")
    state = other.state()
    name = next(name for name in state if "parameters" in name)
    state[name].view(torch.int32)[0, 0, 0] ^= 1
    other.restore(state)
    with pytest.raises(AssertionError, match=name):
        gpu_cases.assert_same_bits(gpu_cases.bits(one), gpu_cases.bits(other), "two")
    with pytest.raises(AssertionError, match="weight"):
        gpu_cases.assert_same_learner(gpu_cases.of_learner(one, 0), gpu_cases.of_learner(other, 0), "it")


# ------------------------------------------------------------------------------------------------------------ long runs


def test_equal_learners_are_interchangeable() -> None:
    known, _ = long_runs.reference()
    for left_out in range(long_runs.TWINS):
        others = [twin for twin in range(long_runs.TWINS) if twin != left_out]
        right, found = (
            {name: {m: values[:, which] for m, values in of.items()} for name, of in known.items()}
            for which in (others, [left_out])
        )
        assert long_runs.compared(right, found)


@pytest.mark.parametrize("mistake", long_runs.MISTAKES)
def test_a_mistake_is_detected_in_a_long_run(mistake: str) -> None:
    known, mistakes = long_runs.reference()
    method, _ = long_runs.MISTAKES[mistake]
    assert long_runs.compared(known, known)
    with pytest.raises(AssertionError):
        long_runs.compared(known, {**known, method: mistakes[mistake]})


@pytest.mark.parametrize("method", ["upgd, local", "upgd, not protecting", "upgd, feature-wise", "upgd, second order"])
def test_methods_are_distinguished(method: str) -> None:
    known, _ = long_runs.reference()
    with pytest.raises(AssertionError):
        long_runs.compared(known, {**known, "upgd": known[method]})


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_score_is_students_t(seed: int) -> None:
    """Equal means that differ by chance are few standard errors apart, the more seldom the more."""
    random = np.random.default_rng(seed)
    of_seeds = random.normal(0.9, 0.1, (200, long_runs.SEEDS, 1))
    one, other = (of_seeds + random.normal(0, 0.01, (200, long_runs.SEEDS, long_runs.TWINS)) for _ in range(2))
    right, found = ({str(i): {"loss": values} for i, values in enumerate(all_of)} for all_of in (one, other))
    sizes = np.abs(list(long_runs.scores(right, found).values()))
    assert 0.85 < (sizes < 2).mean() < 0.995  # 0.937 is expected of 16 degrees of freedom
    assert 0.5 < (sizes**2).mean() < 2


def test_a_missing_number_is_not_a_success() -> None:
    known, _ = long_runs.reference()
    diverged = {m: np.where(np.arange(long_runs.TWINS) == 1, np.nan, values) for m, values in known["pgd"].items()}
    with pytest.raises(AssertionError):
        long_runs.compared(known, {**known, "pgd": diverged})
