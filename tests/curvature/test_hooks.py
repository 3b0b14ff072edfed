"""Hooks are removed with their owner, and a model is freed when it is dropped, at once and without garbage collection."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import upgd

CRITERION = nn.MSELoss()

#: Owners of hooks on a model and possibly the criterion.
OWNERS: dict[str, Callable[[nn.Module], Any]] = {
    "HesScale": lambda model: upgd.HesScale(model, CRITERION),
    "Monitor": upgd.Monitor,
    "Monitor of layers": lambda model: upgd.Monitor(model, layers=["0"]),
    "FeatureUPGD": upgd.FeatureUPGD,
    "FeatureUPGD of second order": lambda model: upgd.FeatureUPGD(model, curvature=upgd.HesScale(model, CRITERION)),
}
every_owner = pytest.mark.parametrize("hook", OWNERS.values(), ids=OWNERS.keys())
every_copy = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: saved_and_loaded(model)]
)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1))


def train(model: nn.Module) -> None:
    model.zero_grad()
    CRITERION(model(torch.ones(2, 1, 4)), torch.zeros(2, 1)).backward()


def hooks(model: nn.Module) -> int:
    modules = [*model.modules(), CRITERION]
    on_modules = sum(
        len(hooks)
        for module in modules
        for hooks in (
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
        )
    )
    on_params = (
        len(registry or ())
        for param in model.parameters()
        for registry in (param._backward_hooks, param._post_accumulate_grad_hooks)
    )
    return on_modules + sum(on_params)


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # torch leaves the very first optimizer in a reference cycle
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every_owner
def test_hooks_are_removed_with_their_owner(hook: Callable[[nn.Module], Any]) -> None:
    model = network()
    owner = hook(model)
    train(model)
    assert hooks(model)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    assert not hooks(model)
    train(model)


@every_owner
def test_a_model_that_is_dropped_with_its_owner_is_freed(hook: Callable[[nn.Module], Any]) -> None:
    """… although the criterion, which HesScale also hooks, stays alive."""
    model = network()
    owner = hook(model)
    train(model)
    gone = weakref.ref(model)
    del model, owner
    assert gone() is None
    assert not CRITERION._forward_hooks


@every_owner
def test_an_owner_that_is_dropped_between_forward_and_backward_is_not_missed(hook: Callable[[nn.Module], Any]) -> None:
    model, plain = network(), network()
    owner = hook(model)
    loss = CRITERION(model(torch.ones(2, 1, 4)), torch.zeros(2, 1))
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    loss.backward()
    train(plain)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@every_owner
@every_copy
def test_hooks_of_a_copied_model_remove_themselves(
    hook: Callable[[nn.Module], Any], copied: Callable[[nn.Module], nn.Module]
) -> None:
    """Otherwise a model that is repeatedly copied and hooked would accumulate them."""
    model = network()
    owner = hook(model)
    train(model)
    before = hooks(model)
    twin = copied(model)
    del owner
    train(twin)
    assert not hooks(twin)
    again = hook(twin)
    train(twin)
    assert hooks(twin) == before
    del again


def test_a_copied_optimizer_owns_the_hooks_of_the_copied_model() -> None:
    model = network()
    optimizer = upgd.FeatureUPGD(model)
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        twin, second = copied((model, optimizer))
        train(twin)
        assert [feature.grad is not None for feature in second.features] == [True, True]
        assert [feature.grad is None for feature in optimizer.features] == [True, True]
        assert hooks(twin)
        del second
        assert not hooks(twin)
    assert hooks(model)


def test_deleting_an_owner_does_not_affect_its_copy() -> None:
    model = network()
    optimizer, monitor = upgd.FeatureUPGD(model), upgd.Monitor(model)
    twin, second, looking = copy.deepcopy((model, optimizer, monitor))
    del model, optimizer, monitor
    train(twin)
    assert second.features[0].grad is not None
    assert "zero_share/1" in looking.snapshot()
