"""Windows, results, errors and interruptions: behaviour of the engine with any backend."""

import os
import signal
import threading

import numpy as np
import pytest
import torch
from plain_loop import Counters, Residual
from torch import nn

from upgd.networks import MLP, initial_parameters
from upgd.population import Learner, Population
from upgd.population.blocks import Supply
from upgd.population.interrupt import interrupts_wait
from upgd.population.torch_backend import TorchBackend
from upgd.streams import make

NETWORK = MLP((6, 5, 3))
STREAM = Counters((6,), 3, task_length=20)
SGD = Learner(method="sgd", lr=0.1)


def population(*learners: Learner, network: nn.Module = NETWORK, **options) -> Population:
    return Population(network, learners or [SGD], **{"backend": "torch", **options})


def test_windows_are_means_of_what_every_step_showed():
    learners = [SGD, Learner(method="upgd", lr=0.1, seed=1)]
    each = population(*learners).run(STREAM, 50, window=1)
    by_task = population(*learners).run(STREAM, 50)
    assert by_task.ends.tolist() == [20, 40, 50]
    assert by_task.lengths.tolist() == [20, 20, 10]
    assert by_task.last_is_short
    assert not each.last_is_short
    for name in ("loss", "accuracy"):
        steps = getattr(each, name)
        expected = [steps[:20].mean(0), steps[20:40].mean(0), steps[40:].mean(0)]
        np.testing.assert_allclose(getattr(by_task, name), expected, rtol=1e-12)
    np.testing.assert_allclose(by_task.mean_loss, each.loss.mean(0), rtol=1e-12)
    np.testing.assert_allclose(by_task.mean_accuracy, each.accuracy.mean(0), rtol=1e-12)


def test_columns_are_in_the_callers_order():
    learners = [
        Learner(method="adamw", lr=0.01, seed=3),
        SGD,
        Learner(method="upgd", lr=0.1, seed=1),
        Learner(method="sgd", lr=0.2, seed=3),
    ]
    together = population(*learners).run(STREAM, 30)
    assert together.learners == tuple(learners)
    for i, learner in enumerate(learners):
        np.testing.assert_array_equal(together.loss[:, [i]], population(learner).run(STREAM, 30).loss)


def test_regression_has_no_accuracy():
    result = population(network=MLP((16, 4, 1))).run(make("toy-changing-inputs"), 10)
    assert np.isnan(result.accuracy).all()
    assert np.isfinite(result.loss).all()


def test_a_window_may_be_longer_than_the_run():
    result = population().run(STREAM, 7, window=1_000_000)
    assert (result.ends.tolist(), result.lengths.tolist(), result.last_is_short) == ([7], [7], True)


def test_zero_steps_are_a_valid_run():
    result = population().run(STREAM, 0)
    assert result.loss.shape == (0, 1)
    assert np.isnan(result.mean_loss).all()


def test_progress_counts_learner_steps():
    seen = []
    population(SGD, SGD).run(STREAM, 50, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (100, 100)
    assert seen == sorted(seen)
    assert len(seen) >= 3  # a block ends where a window does


def test_the_template_is_unchanged_and_learners_start_from_their_seed():
    network = MLP((6, 5, 3), seed=99)
    before = [p.clone() for p in network.parameters()]
    crowd = population(SGD, Learner(method="sgd", lr=0.1, seed=7), network=network)
    start = initial_parameters(network, [0, 7])
    for name, own in crowd.parameters(1).items():
        assert torch.equal(own, start[name][1])
    crowd.run(STREAM, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_a_learner_can_be_extracted_as_a_module():
    for network in (NETWORK, Residual(6, 3)):
        crowd = population(SGD, Learner(method="sgd", lr=0.1, seed=7), network=network)
        crowd.run(STREAM, 30)
        chunk = STREAM.chunk([7], 30, 1)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(crowd.network(1)(chunk.inputs()[0]), chunk.targets[0])
        crowd.run(STREAM, 1)
        second = population(SGD, Learner(method="sgd", lr=0.1, seed=7), network=network).run(STREAM, 31, window=1)
        assert second.loss[30, 1] == pytest.approx(expected.item(), rel=1e-5)


def test_parameters_can_be_given():
    norm = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    given = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in norm.named_parameters()}
    crowd = population(SGD, SGD, network=norm, parameters=given)
    assert torch.equal(crowd.parameters(1)["1.weight"], given["1.weight"][1])
    result = crowd.run(STREAM, 20)
    assert result.loss[0, 0] != result.loss[0, 1]
    with pytest.raises(ValueError, match=r"parameters\['1.bias'\] must be a tensor of shape \(2, 4\)"):
        population(SGD, SGD, network=norm, parameters={**given, "1.bias": torch.zeros(4)})


# ----------------------------------------------------------------------------------------------------------- divergence


def test_divergence_is_seen_at_the_step_whose_loss_is_not_finite():
    wild = Learner(method="sgd", lr=30.0)
    stream = Counters((6,), 3, loss="mse", task_length=20)
    each = population(wild).run(stream, 100, window=1)
    at = each.diverged_at[0]
    assert 0 < at < 100
    assert np.isfinite(each.loss[:at]).all()
    assert np.isnan(each.loss[at:]).all()
    # Frozen: the parameters stay those that gave the infinite loss while the others continue.
    short, long = population(wild), population(wild)
    short.run(stream, int(at))
    long.run(stream, 300)
    for name, own in short.parameters(0).items():
        assert torch.equal(own, long.parameters(0)[name])
    windows = long.result()
    first_bad = at // 20
    assert np.isfinite(windows.loss[:first_bad]).all()
    assert np.isnan(windows.loss[first_bad:]).all()
    assert np.isnan(windows.mean_loss).all()


def test_accuracy_is_nan_after_divergence_too():
    result = population(Learner(method="sgd", lr=1e30)).run(STREAM, 60)
    assert result.diverged_at[0] >= 0
    assert np.isnan(result.accuracy[-1]).all()


def test_an_infinite_weight_behind_a_dead_unit_is_seen_when_the_window_ends():
    crowd = population()
    assert np.isfinite(crowd.run(STREAM, 19).loss).all()
    state = crowd.state()
    state["group.0.parameters.layers.0.bias"][0, 0] = -torch.inf
    crowd.restore(state)
    assert crowd.diverged_at.tolist() == [-1]
    result = crowd.run(STREAM, 30)
    assert result.diverged_at.tolist() == [19]
    assert np.isnan(result.loss).all()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learners": []}, "learners must be one or more"),
        ({"learners": ["sgd"]}, "learners must be one or more"),
        ({"backend": "numpy"}, "backend must be 'auto', 'torch', 'kernel' or a class, not 'numpy'"),
        ({"dtype": torch.int64}, "dtype must be torch.float32 or torch.float64, not torch.int64"),
        ({"dtype": torch.bfloat16}, "dtype must be torch.float32 or torch.float64, not torch.bfloat16"),
        (
            {"network": Residual(6, 3), "learners": [Learner(method="upgd", lr=0.1, order=2)]},
            "upgd .* needs curvature and so the network",
        ),
        (
            {"network": nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 3)),
             "learners": [Learner(method="ups", lr=0.1, wise="feature")]},
            "ups .* needs the hidden units .*'1' is a GELU",
        ),
    ],
)  # fmt: skip
def test_a_wrong_population_gets_one_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        Population(**{"network": NETWORK, "learners": [SGD], "backend": "torch", **options})


def test_a_network_must_be_a_module_that_learns():
    with pytest.raises(TypeError, match=r"network must be an nn\.Module"):
        Population((6, 5, 3), [SGD])
    frozen = MLP((6, 5, 3))
    frozen.layers[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.0\.weight has requires_grad=False"):
        Population(frozen, [SGD])


@pytest.mark.parametrize(
    ("stream", "options", "words"),
    [
        (Counters((7,), 3), {}, "network does not accept the inputs of counters"),
        (Counters((6,), 4), {}, "network must have 4 outputs"),
        (STREAM, {"steps": -1}, "steps must be an integer of at least 0, not -1"),
        (STREAM, {"steps": 1.5}, "steps must be an integer of at least 0, not 1.5"),
        (STREAM, {"window": 0}, "window must be an integer of at least 1, not 0"),
    ],
)
def test_a_wrong_run_gets_one_sentence_and_changes_nothing(stream, options, words):
    crowd = population()
    with pytest.raises(ValueError, match=words):
        crowd.run(stream, **{"steps": 10, **options})
    np.testing.assert_array_equal(crowd.run(STREAM, 10).loss, population().run(STREAM, 10).loss)


def test_window_and_loss_cannot_change():
    crowd = population()
    crowd.run(STREAM, 10)
    with pytest.raises(ValueError, match="the window was 20 until step 10 and cannot be changed to 5"):
        crowd.run(STREAM, 10, window=5)
    with pytest.raises(ValueError, match="the loss was 'cross_entropy' until step 10"):
        crowd.run(Counters((6,), 3, loss="mse", task_length=20), 10)


def test_a_state_of_others_is_refused():
    crowd = population()
    with pytest.raises(ValueError, match="state belongs to other learners"):
        crowd.restore(population(Learner(method="sgd", lr=0.2)).state())
    with pytest.raises(ValueError, match="it belongs to another network"):
        crowd.restore(population(network=MLP((6, 4, 3))).state())
    with pytest.raises(IndexError, match="learner must be from 0 to 0, not 1"):
        crowd.parameters(1)


# -------------------------------------------------------------------------------------------------------- interruptions


class Interrupting(Counters):
    """Presses Ctrl-C while the block that holds a step is computed."""

    at = 130

    def chunk(self, seeds, start, length, device="cpu"):
        if start <= self.at < start + length:
            os.kill(os.getpid(), signal.SIGINT)
        return super().chunk(seeds, start, length, device)


def test_ctrl_c_leaves_a_population_that_can_run_on():
    learners = [SGD, Learner(method="upgd", lr=0.1, seed=1)]
    crowd = population(*learners)
    with pytest.raises(KeyboardInterrupt):
        crowd.run(Interrupting((6,), 3, task_length=20), 1000)
    assert 0 < crowd.step < 1000
    kept = population(*learners)
    kept.restore(crowd.state())
    expected = population(*learners).run(STREAM, 300)
    for one in (crowd, kept):
        result = one.run(STREAM, 300 - one.step)
        np.testing.assert_array_equal(result.loss, expected.loss)


def test_interrupts_are_acknowledged_and_deferred(capsys):
    done = []

    def interrupted():
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(capsys.readouterr().err)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["stopping after the current block of steps …\n"]
    with interrupts_wait():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_interrupts_that_others_handle_are_not_answered(capsys):
    heard = []
    usual = signal.signal(signal.SIGINT, lambda *_: heard.append("by others"))
    try:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            assert heard == []
    finally:
        signal.signal(signal.SIGINT, usual)
    assert heard == ["by others"]
    assert capsys.readouterr().err == ""


def test_runs_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(population().run(STREAM, 20)))
    thread.start()
    thread.join()
    assert results[0].loss.shape == (1, 1)


class Failing(Counters):
    def chunk(self, seeds, start, length, device="cpu"):
        if start >= 40:
            raise OSError("the data set is gone")
        return super().chunk(seeds, start, length, device)


def test_an_error_of_the_stream_keeps_the_population_consistent():
    crowd = population()
    with pytest.raises(OSError, match="gone"):
        crowd.run(Failing((6,), 3, task_length=20), 100)
    assert crowd.step >= 40
    np.testing.assert_array_equal(crowd.run(STREAM, 20).loss, population().run(STREAM, crowd.step).loss)


def test_an_error_in_the_middle_of_a_step_is_not_forgotten(monkeypatch):
    crowd = population()
    crowd.run(STREAM, 20)
    state = crowd.state()
    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, "_step", out_of_memory)
        with pytest.raises(MemoryError):
            crowd.run(STREAM, 100)
    for broken in (crowd.state, crowd.result, lambda: crowd.run(STREAM, 1), lambda: crowd.parameters(0)):
        with pytest.raises(RuntimeError, match=r"call restore\(\) with"):
            broken()
    crowd.restore(state)
    np.testing.assert_array_equal(crowd.run(STREAM, 20).loss, population().run(STREAM, 40).loss)


def out_of_memory(*_):
    raise MemoryError


# --------------------------------------------------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_steps():
    """The length of requested chunks is bounded, in steps and in bytes."""
    asked = []

    class Watching(Counters):
        def chunk(self, seeds, start, length, device="cpu"):
            asked.append(length)
            return super().chunk(seeds, start, length, device)

    crowd = population(network=MLP((3000, 3)))
    crowd._supply.BYTES = 100 * (4 * 3000 + 8)
    crowd.run(Watching((3000,), 3, task_length=10_000), 2_000)
    assert max(asked) == 100
    assert sum(asked) == 2_000


def test_one_learner_without_a_list_and_no_stream_get_a_sentence():
    with pytest.raises(ValueError, match=r"learners must be one or more Learner\(…\), not Learner"):
        Population(MLP((64, 10)), Learner(method="sgd", lr=0.1))
    population = Population(MLP((64, 10)), [Learner(method="sgd", lr=0.1)], backend="torch")
    with pytest.raises(
        TypeError,
        match=r"stream must be a Stream, such as the result of upgd.streams.make\(name\), not 'stationary-digits'",
    ):
        population.run("stationary-digits", steps=1)


def test_dropout_is_refused_unless_it_is_off():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 10))
    learners = [Learner(method="sgd", lr=0.1)]
    with pytest.raises(ValueError, match=r"network has the Dropout '2' in training mode.*call network.eval\(\) first"):
        Population(network, learners)
    result = Population(network.eval(), learners).run(make("stationary-digits"), steps=3)
    assert np.isfinite(result.loss).all()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_parameters_may_be_those_of_a_module(backend):
    network = MLP((8, 4, 3))
    given = {name: parameter.unsqueeze(0) for name, parameter in network.named_parameters()}
    population = Population(network, [Learner(method="sgd", lr=0.1)], backend=backend, parameters=given)
    for name, parameter in network.named_parameters():
        assert torch.equal(population.parameters(0)[name], parameter)


def test_permutations_count_when_chunks_are_cut():
    stream, supply = make("input-permuted-digits", task_length=2), Supply(range(50), torch.device("cpu"))
    step, held = 0, []
    for _ in range(6):
        chunk = supply.take(stream, step, 1_000_000, 1_000_000)
        assert chunk.permutation is not None
        held.append(chunk.permutation.nbytes)
        step += chunk.length
    assert Supply.BYTES / 4 < max(held) <= Supply.BYTES


def test_numbers_may_be_numpys():
    stream = make("output-permuted-digits", task_length=np.int64(7))
    learner = Learner(method="pgd", lr=np.float32(0.5), sigma=np.float64(0.1), seed=np.int32(2))
    result = Population(MLP((64, 8, 10)), [learner]).run(stream, np.int64(14))
    assert result.loss.shape == (2, 1)
    assert learner == Learner(method="pgd", lr=0.5, sigma=0.1, seed=2)


@pytest.mark.parametrize(
    ("network", "run", "says"),
    [
        (nn.Flatten(), {}, "network must have parameters, but this Flatten has none"),
        (MLP((64, 8, 10)), {"diagnostics": True}, r"diagnostics must be Diagnostics\(...\), not True"),
        (MLP((64, 8, 10)), {"steps": 2.5}, "steps must be an integer of at least 0, not 2.5"),
    ],
)
def test_misuse_gets_a_sentence(network, run, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Population(network, [Learner(method="sgd", lr=0.1)]).run(
            **{"stream": make("stationary-digits"), "steps": 3, **run}
        )


def test_statistics_of_batches_are_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    parameters = {name: p.detach().unsqueeze(0) for name, p in network.named_parameters()}
    with pytest.raises(ValueError, match="BatchNorm1d '2' in training mode, which computes statistics over batches"):
        Population(network, [Learner(method="sgd", lr=0.1)], parameters=parameters)
    Population(network.eval(), [Learner(method="sgd", lr=0.1)], parameters=parameters).run(make("stationary-digits"), 2)


def test_a_population_stays_with_its_stream():
    population = Population(MLP((64, 8, 10)), [Learner(method="sgd", lr=0.1)])
    population.run(make("stationary-digits"), 5, window=5)
    with pytest.raises(ValueError, match="the stream was 'stationary-digits' until step 5"):
        population.run(make("output-permuted-digits"), 5, window=5)


def test_blocks_grow_again_after_one_that_took_long():
    crowd = population()
    crowd.run(STREAM, 4)
    crowd._pace.steps = 1  # memory of a block in which something was compiled
    crowd.run(STREAM, 40)
    assert crowd._pace.steps > 1


def test_whether_a_network_fits_is_checked_once_per_stream():
    network, calls = MLP((64, 8, 10)), []
    network.register_forward_hook(lambda *_: calls.append(1))
    population = Population(network, [Learner(method="sgd", lr=0.01, seed=0)], backend="torch")
    stream = make("input-permuted-digits", task_length=20)
    for _ in range(2):
        population.run(stream, 5)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="does not accept the inputs"):
        population.run(make("toy-changing-inputs"), 5)
