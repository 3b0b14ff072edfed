"""Features that torch users expect, for every optimizer and variant of the package."""

import copy
import io
import math
import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import DESCENDING, OPTIMIZERS, Build, backward, batch, network, parameters, train
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import TorchDispatchMode


def each(without: str | None = None) -> pytest.MarkDecorator:
    """Run a test with every optimizer, or with those whose names do not start like this."""
    chosen = [name for name in OPTIMIZERS if not (without and name.startswith(without))]
    return pytest.mark.parametrize("build", [OPTIMIZERS[name] for name in chosen], ids=chosen)


every_optimizer = each()
every_optimizer_with_foreach = each(without="MethodOptimizer")
every_optimizer_of_parameters = each(without="Feature")  # the others need a model


def assert_same(first: nn.Module, second: nn.Module, **tolerance: float) -> None:
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


def has_foreach(build: Build) -> bool:
    return "foreach" in build(network()).defaults


@pytest.mark.parametrize("name", DESCENDING)
@pytest.mark.parametrize("maximize", [False, True])
def test_step_decreases_or_increases_the_loss(name: str, maximize: bool) -> None:
    """On one repeated batch, the loss falls (or rises)."""
    model = network()
    optimizer = OPTIMIZERS[name](model, lr=0.1, sigma=0.0, maximize=maximize)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        losses.append(float(backward(model)))
        optimizer.step()
    assert losses[-1] > losses[0] + 0.3 if maximize else losses[-1] < 0.6 * losses[0]


@every_optimizer
def test_maximizing_the_negative_is_minimizing(build: Build) -> None:
    first, second = network(torch.float64), network(torch.float64)
    minimizing, maximizing = build(first), build(second, maximize=True)
    for step in range(10):
        for model, optimizer, sign in ((first, minimizing, 1.0), (second, maximizing, -1.0)):
            optimizer.zero_grad()
            x, y = batch(torch.float64, seed=step)
            (sign * nn.functional.cross_entropy(model(x), y)).backward()
            torch.manual_seed(step)
            optimizer.step()
    assert_same(first, second, rtol=1e-12, atol=1e-14)


@every_optimizer_with_foreach
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_foreach_equals_the_plain_loop_in_parameters_and_state(build: Build, dtype: torch.dtype) -> None:
    models = network(dtype), network(dtype)
    optimizers = build(models[0], foreach=False), build(models[1], foreach=True)
    for step in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, seed=step)
            torch.manual_seed(step)
            optimizer.step()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    assert_same(*models, rtol=tolerance, atol=tolerance / 10)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        ours, theirs = optimizers[0].state[a], optimizers[1].state[b]
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            torch.testing.assert_close(ours[key], theirs[key], rtol=tolerance, atol=tolerance / 10)


@every_optimizer_with_foreach
def test_foreach_in_many_small_blocks_is_foreach_in_one(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from upgd.optim import _foreach

    models = [network(torch.float64) for _ in range(3)]
    for model, entries in zip(models, (7, 1 << 20, None), strict=True):
        if entries is None:  # as on a GPU
            monkeypatch.delitem(_foreach._BLOCK_ENTRIES, "cpu")
            monkeypatch.setattr(_foreach, "_LEAST_BLOCK_ENTRIES", 1)
        else:
            monkeypatch.setitem(_foreach._BLOCK_ENTRIES, "cpu", entries)
        optimizer = build(model, foreach=True)
        torch.manual_seed(3)
        train(model, optimizer, 10)
    for model in models[1:]:
        assert_same(models[0], model, rtol=1e-12, atol=1e-14)


@every_optimizer
def test_a_generator_makes_the_noise_reproducible_and_else_torchs_seed_does(build: Build) -> None:
    def final(seed: int, **options: Any) -> nn.Module:
        model = network()
        optimizer = build(model, **options)
        torch.manual_seed(seed)
        for step in range(3):
            optimizer.zero_grad()
            with torch.random.fork_rng():
                backward(model, seed=step)
            optimizer.step()
        return model

    assert_same(final(0), final(0))
    with pytest.raises(AssertionError):
        assert_same(final(0), final(1))
    first, second = (final(seed, generator=torch.Generator().manual_seed(9)) for seed in (0, 1))
    assert_same(first, second)


@every_optimizer
def test_closure_is_called_with_gradients_enabled_and_its_loss_returned(build: Build) -> None:
    model = network()
    optimizer = build(model)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model)

    with torch.no_grad():
        assert optimizer.step(closure) == pytest.approx(float(backward_value(network())))
    assert optimizer.step() is None


def backward_value(model: nn.Module) -> Tensor:
    x, y = batch()
    return nn.functional.cross_entropy(model(x), y)


@every_optimizer
def test_without_gradients_a_step_does_nothing(build: Build) -> None:
    model, untouched = network(), network()
    optimizer = build(model)
    optimizer.step()
    assert_same(model, untouched)
    assert not optimizer.state_dict()["state"]


@every_optimizer
def test_a_parameter_without_gradient_is_skipped(build: Build) -> None:
    """… and the other parameters are the same as without it."""
    model = network(torch.float64)
    frozen = model[0].weight.detach().clone()
    model[0].weight.requires_grad_(False)
    optimizer = build(model)
    train(model, optimizer, 5)
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight not in optimizer.state or not optimizer.state[model[0].weight]


@every_optimizer
def test_lr_may_be_a_tensor(build: Build) -> None:
    models = network(torch.float64), network(torch.float64)
    for model, lr in zip(models, (0.02, torch.tensor(0.02, dtype=torch.float64)), strict=True):
        torch.manual_seed(7)
        train(model, build(model, lr=lr), 5)
    assert_same(*models, rtol=1e-12, atol=1e-14)


@every_optimizer_with_foreach
@pytest.mark.parametrize("foreach", [False, True])
def test_a_tensor_lr_may_have_a_dimension(build: Build, foreach: bool) -> None:
    models = network(), network()
    for model, lr in zip(models, (torch.tensor(0.02), torch.tensor([0.02])), strict=True):
        torch.manual_seed(7)
        train(model, build(model, lr=lr, foreach=foreach), 2)
    assert_same(*models)


@every_optimizer_with_foreach
@pytest.mark.parametrize("foreach", [False, True])
def test_a_tensor_lr_changed_in_place_takes_effect(build: Build, foreach: bool) -> None:
    model, untouched = network(), network()
    lr = torch.tensor(0.5)
    optimizer = build(model, lr=lr, foreach=foreach)
    lr.fill_(0.0)
    train(model, optimizer, 2)
    assert_same(model, untouched)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "name", ["UPGD-W", "AdaUPGD-W-local-anticorrelated", "ShrinkAndPerturb", "FeatureUPGD-W-local"]
)
def test_a_small_weight_decay_is_not_rounded_away(name: str, foreach: bool) -> None:
    """lr·weight_decay = 1e-8, in 32 bits: 1 − 1e-8 is 1."""
    ends = []
    for weight_decay in (1e-4, 0.0):
        model = network()
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.manual_seed(0)
        optimizer = OPTIMIZERS[name](model, lr=1e-4, sigma=1.0, weight_decay=weight_decay, foreach=foreach)
        for step in range(200):
            optimizer.zero_grad()
            model(torch.full((1, 1, 6, 6), step % 3 - 1.5)).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    lost = ((ends[1] - ends[0]).double() @ start.double()) / start.double().square().sum()
    assert float(lost) == pytest.approx(200 * 1e-8, rel=0.2)


@every_optimizer
@pytest.mark.parametrize(
    "schedule",
    [lambda o: StepLR(o, 1, 0.1), lambda o: CosineAnnealingLR(o, 5), lambda o: ReduceLROnPlateau(o, patience=0)],
    ids=["StepLR", "CosineAnnealingLR", "ReduceLROnPlateau"],
)
def test_learning_rate_schedulers(build: Build, schedule: Callable[..., Any]) -> None:
    model = network()
    optimizer = build(model)
    scheduler = schedule(optimizer)
    before = optimizer.param_groups[0]["lr"]
    for step in range(3):
        train(model, optimizer, 1, first=step)
        scheduler.step(*((1.0,) if isinstance(scheduler, ReduceLROnPlateau) else ()))
    assert optimizer.param_groups[0]["lr"] < before
    # With lr = 0 nothing changes any more.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    settled = parameters(model)
    train(model, optimizer, 2)
    for a, b in zip(settled, parameters(model), strict=True):
        assert torch.equal(a, b)


@every_optimizer
def test_training_resumes_exactly_from_a_state_dict(build: Build) -> None:
    model = network()
    optimizer = build(model)
    torch.manual_seed(0)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    resumed = network(seed=99)
    again = build(resumed, lr=0.7)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for m, o in ((model, optimizer), (resumed, again)):
        torch.manual_seed(1)
        train(m, o, 5, first=5)
    assert_same(model, resumed)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_dict_keeps_the_precision_of_utility(build: Build, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = build(model)
    train(model, optimizer, 3)
    again = build(model)
    again.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert again.state[param][key].dtype == value.dtype
            assert torch.equal(again.state[param][key], value)


@every_optimizer
def test_a_hook_may_put_a_state_dict_in_another_order(build: Build) -> None:
    """As in torch's documentation for loading by name: the hook returns a dict with other numbers."""
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    count = sum(len(group["params"]) for group in saved["param_groups"])
    turned = {
        "state": {count - 1 - number: state for number, state in saved["state"].items()},
        "param_groups": [
            {**group, "params": [count - 1 - number for number in group["params"]]} for group in saved["param_groups"]
        ],
    }
    shuffled = {**turned, "param_groups": [{**g, "params": sorted(g["params"])} for g in turned["param_groups"]]}
    fresh = build(model)
    fresh.register_load_state_dict_pre_hook(lambda _, given: turned)
    fresh.load_state_dict(shuffled)
    for param in model.parameters():
        assert optimizer.state[param].keys() == fresh.state[param].keys()
        for name, value in optimizer.state[param].items():
            torch.testing.assert_close(fresh.state[param][name], value, rtol=0, atol=0)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hook_may_change_the_loaded_state(build: Build, dtype: torch.dtype) -> None:
    """A hook after loading sees the state in its final precision, and its changes stay."""
    model = network(dtype)
    optimizer, again = build(model), build(model)
    train(model, optimizer, 2)
    precisions: list[set[torch.dtype]] = []

    def change(loaded: torch.optim.Optimizer) -> None:
        precisions.append({value.dtype for state in loaded.state.values() for value in state.values()})
        for state in loaded.state.values():
            for name, value in state.items():
                state[name] = torch.full_like(value, 7)
        loaded.state.pop(next(model.parameters()), None)

    again.register_load_state_dict_post_hook(change)
    again.load_state_dict(optimizer.state_dict())
    assert precisions == [{value.dtype for state in optimizer.state.values() for value in state.values()}]
    assert next(model.parameters()) not in again.state
    assert all((value == 7).all() for state in again.state.values() for value in state.values())


@every_optimizer
def test_a_checkpoint_from_before_an_option_existed_gets_its_default(build: Build) -> None:
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    old = copy.deepcopy(optimizer.state_dict())
    for option in ("maximize", "capturable", "foreach", "noise"):
        for group in old["param_groups"]:
            group.pop(option, None)
    optimizer.load_state_dict(old)
    train(model, optimizer, 2)
    for option in {"maximize", "capturable", "noise"} & optimizer.defaults.keys():
        assert optimizer.param_groups[0][option] == optimizer.defaults[option]


@every_optimizer
def test_state_dict_is_deterministic(build: Build) -> None:
    def final() -> dict[str, Any]:
        model = network()
        optimizer = build(model)
        torch.manual_seed(0)
        train(model, optimizer, 3)
        return optimizer.state_dict()

    first, second = final(), final()
    assert first["param_groups"] == second["param_groups"]
    for key, state in first["state"].items():
        for name, value in state.items():
            assert torch.equal(value, second["state"][key][name])


@every_optimizer
def test_hooks_run_around_the_step(build: Build) -> None:
    model = network()
    optimizer = build(model)
    calls: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    train(model, optimizer, 1)
    before.remove()
    after.remove()
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "saved", "loaded"]


@every_optimizer
def test_deepcopy_and_pickle_continue_identically(build: Build) -> None:
    model = network()
    generator = torch.Generator().manual_seed(5)
    optimizer = build(model, generator=generator)
    train(model, optimizer, 3)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, 3)
    for model_copy, optimizer_copy in copies:
        train(model_copy, optimizer_copy, 3)
        assert_same(model, model_copy)


@every_optimizer
def test_repr_names_class_and_options(build: Build) -> None:
    optimizer = build(network())
    assert repr(optimizer).startswith(type(optimizer).__name__)
    for option in ("lr: ", "sigma: 0.01"):
        assert option in repr(optimizer)


@every_optimizer
def test_gradients_are_left_as_they_are(build: Build) -> None:
    model = network()
    optimizer = build(model, maximize=True)
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for param, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, gradient)


@every_optimizer
def test_gradient_scaler(build: Build) -> None:
    """Scaling and unscaling does not change the step; a step with overflowing gradients is skipped."""
    models = network(torch.float64), network(torch.float64)
    plain, scaled = build(models[0]), build(models[1])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batch(torch.float64)
    nn.functional.cross_entropy(models[0](x), y).backward()
    scaler.scale(nn.functional.cross_entropy(models[1](x), y)).backward()
    torch.manual_seed(0)
    plain.step()
    torch.manual_seed(0)
    scaler.step(scaled)
    scaler.update()
    assert_same(*models, rtol=1e-12, atol=1e-14)

    scaled.zero_grad()
    scaler.scale(nn.functional.cross_entropy(models[1](x) * math.inf, y)).backward()
    scaler.step(scaled)
    scaler.update()
    assert_same(*models, rtol=1e-12, atol=1e-14)
    assert scaler.get_scale() == 512.0


class NoHostSynchronisation(TorchDispatchMode):
    """Fails at operations that synchronize with the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")), name
        return func(*args, **(kwargs or {}))


@every_optimizer
@pytest.mark.parametrize("foreach", [False, True])
def test_a_capturable_step_reads_nothing_back_and_equals_the_ordinary_one(build: Build, foreach: bool) -> None:
    options = {"foreach": foreach} if has_foreach(build) else {}
    models = network(torch.float64), network(torch.float64)
    ordinary, capturable = build(models[0], **options), build(models[1], capturable=True, **options)
    for step in range(5):
        for model, optimizer in zip(models, (ordinary, capturable), strict=True):
            optimizer.zero_grad()
            backward(model, seed=step)
            torch.manual_seed(step)
            if optimizer is capturable:
                with NoHostSynchronisation():
                    optimizer.step()
            else:
                optimizer.step()
    # A step count on the device has 32 bits, and so has its power.
    assert_same(*models, rtol=1e-5, atol=1e-6)


@every_optimizer_of_parameters
def test_parameters_of_any_layout(build: Build) -> None:
    """0-dim, empty, transposed, channels-last and sliced parameters are updated like contiguous ones."""

    class Odd(nn.Module):
        def __init__(self, contiguous: bool) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)

            def random(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=generator, dtype=torch.float64)

            raw = [random(()), random(4, 3).t(), random(6, 8)[::2, ::2], random(2, 3, 4, 4), random(0, 3)]
            raw[3] = raw[3].to(memory_format=torch.channels_last)
            self.params = nn.ParameterList([nn.Parameter(t.contiguous() if contiguous else t) for t in raw])
            self.readout = nn.Linear(1, 1).double()

    models = Odd(False), Odd(True)
    models[1].readout.load_state_dict(models[0].readout.state_dict())
    assert not models[0].params[1].is_contiguous()
    for model in models:
        optimizer = build(model, sigma=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            sum((p.sin() ** 2).sum() for p in model.parameters()).backward()
            optimizer.step()
    assert_same(*models, rtol=1e-12, atol=1e-14)


@every_optimizer
def test_sparse_gradients_are_refused(build: Build) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = build(model)
    model[0].weight.grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*sparse=False"):
        optimizer.step()


#: The options that an optimizer does not have.
MISSING = {
    "UPS": ("weight_decay",),
    "FeatureUPS": ("weight_decay",),
    "PGD": ("beta_utility", "scaling"),
    "Anti-PGD": ("beta_utility", "scaling"),
    "ShrinkAndPerturb": ("beta_utility", "scaling", "noise"),
    "MethodOptimizer": ("weight_decay", "beta_utility"),
    "MethodOptimizer-local-anticorrelated": ("weight_decay", "beta_utility"),
    "MethodOptimizer of Shrink & Perturb": ("beta_utility", "scaling", "noise"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("lr", [-0.1, "fast", math.nan, True, torch.ones(2)]),
        ("sigma", [np.bool_(True), -1.0]),
        ("weight_decay", [-1.0]),
        ("beta_utility", [1.0, -0.1]),
        ("scaling", ["galactic"]),
        ("noise", ["pink"]),
    ],
)
def test_bad_options_are_refused_by_name_and_value(name: str, option: str, values: list[Any]) -> None:
    unknown = f"unexpected keyword argument '{option}'|{option} is not an option of an optimizer"
    for value in values:
        if option in MISSING.get(name, ()):
            with pytest.raises((TypeError, ValueError), match=unknown):
                OPTIMIZERS[name](network(), **{option: value})
            continue
        with pytest.raises(ValueError, match=option) as error:
            OPTIMIZERS[name](network(), **{option: value})
        shown = "2 elements" if isinstance(value, Tensor) else repr(value)
        assert shown in str(error.value)
        assert "\n" not in str(error.value)


@every_optimizer
@pytest.mark.parametrize("kind", [np.float32, np.float64, Fraction])
def test_numbers_of_other_kinds_become_pythons(build: Build, kind: Callable[[float], Any]) -> None:
    models = network(), network()
    lr, sigma = kind(0.1), kind(0.5)
    optimizers = build(models[0], lr=float(lr), sigma=float(sigma)), build(models[1], lr=lr, sigma=sigma)
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(3)
        train(model, optimizer, 2)
    assert_same(*models)
    extra = {"params": [("extra", nn.Parameter(torch.ones(2)))], "lr": kind(0.5)}
    if "param_names" not in optimizer.param_groups[0]:
        extra["params"] = [param for _, param in extra["params"]]
    optimizer.add_param_group(extra)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    groups = torch.load(file, weights_only=True)["param_groups"]
    assert [type(group[name]) for group in (*groups, optimizer.defaults) for name in ("lr", "sigma")] == [float] * 6


@every_optimizer
def test_reading_gates_creates_no_state(build: Build) -> None:
    """Otherwise ``torch.distributed.checkpoint`` assumes that a new optimizer has state, and loads none."""
    model = network()
    optimizer = build(model)
    assert optimizer.gates() == {}
    assert not optimizer.state
    train(model, optimizer, 2)
    assert all(optimizer.state.values())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@every_optimizer_of_parameters  # for the others, torch would fill the state by a step without a backward pass
def test_distributed_checkpoints(build: Build) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    models = network(), network()
    optimizers = build(models[0]), build(models[1])
    train(models[0], optimizers[0], 2)
    optimizers[1].gates()
    saved = get_optimizer_state_dict(models[0], optimizers[0])
    # Files are read into the state of a new optimizer: missing entries are not read.
    into = get_optimizer_state_dict(models[1], optimizers[1])
    assert {name: set(state) for name, state in into["state"].items()} == {
        name: set(state) for name, state in saved["state"].items()
    }
    set_optimizer_state_dict(models[1], optimizers[1], optim_state_dict=saved)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        theirs, ours = optimizers[0].state.get(a, {}), optimizers[1].state.get(b, {})
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@every_optimizer
def test_complex_parameters_are_refused(build: Build) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).to(torch.complex64)
    with pytest.raises(TypeError, match="view_as_real"):
        build(model)


#: Each of these uses code that the others do not use.
COMPILED = (
    *("UPGD", "UPGD-local", "AdaUPGD-W-local-anticorrelated", "UPS", "PGD", "ShrinkAndPerturb"),
    *("FeatureUPGD-W-local", "FeatureUPS", "MethodOptimizer"),
)


@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        pytest.param(name, foreach, marks=() if name in COMPILED else pytest.mark.slow)
        for name in OPTIMIZERS
        for foreach in ([None] if name.startswith("MethodOptimizer") else [False, True])
    ],
)
def test_compiled_step_equals_the_eager_one(name: str, foreach: bool | None) -> None:
    """With dynamo and AOT autograd, for a network with few parameters."""
    torch._dynamo.reset()
    layers = nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 4, bias=False)
    models = [copy.deepcopy(nn.Sequential(*layers).double()) for _ in range(2)]
    options = {"sigma": 0.0} if foreach is None else {"sigma": 0.0, "foreach": foreach}
    eager, optimizer = (OPTIMIZERS[name](model, **options) for model in models)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(4):
        for model, advance in ((models[0], eager.step), (models[1], compiled)):
            model.zero_grad()
            backward(model, seed=step)
            advance()
    assert_same(*models, rtol=1e-5, atol=1e-6)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert eager.state[a].keys() == optimizer.state[b].keys()
        for key, value in eager.state[a].items():
            torch.testing.assert_close(optimizer.state[b][key], value, rtol=1e-5, atol=1e-8)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "name",
    [
        "UPGD-local",
        pytest.param("UPGD", marks=pytest.mark.slow),
        pytest.param("AdaUPGD-W-local-anticorrelated", marks=pytest.mark.slow),
        pytest.param("FeatureUPGD-W-local", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("foreach", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_inductor_compiled_equals_the_eager_one(name: str, foreach: bool | None) -> None:
    torch._dynamo.reset()
    models = network(torch.float64), network(torch.float64)
    eager, optimizer = (OPTIMIZERS[name](model, sigma=0.0, foreach=foreach) for model in models)
    compiled = torch.compile(optimizer.step)
    for step in range(3):
        for model, advance in ((models[0], eager.step), (models[1], compiled)):
            model.zero_grad()
            backward(model, seed=step)
            advance()
    assert_same(*models, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_a_checkpoint_may_have_steps_that_are_numbers(build: Build) -> None:
    """AdamW also accepts them."""
    models = network(), network()
    optimizers = build(models[0]), build(models[1])
    train(models[0], optimizers[0], 3)
    models[1].load_state_dict(models[0].state_dict())
    saved = copy.deepcopy(optimizers[0].state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    optimizers[1].load_state_dict(saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        train(model, optimizer, 2, first=3)
    assert_same(*models)


@every_optimizer_of_parameters
def test_invalid_defaults_are_refused_even_if_every_group_overrides_them(build: Build) -> None:
    model = network()
    good = nn.Module()
    good.parameters = lambda: [{"params": [param], "lr": 0.1} for param in model.parameters()]
    build(good, lr=0.2)
    with pytest.raises(ValueError, match=r"lr must be a number of at least 0, but it is -1\.0"):
        build(good, lr=-1.0)
