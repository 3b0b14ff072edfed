"""How HesScale follows a network, and which networks it refuses instead of returning wrong numbers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import upgd
from upgd.curvature import Add, Fork, Gate, HesScale, Residual, elementwise, layer, loss
from upgd.networks import MLP, ConvNet


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2)).double()


def data(batch: int = 6, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 3, dtype=torch.float64, generator=generator),
        torch.randint(2, (batch,), generator=generator),
    )


def diagonals(model: nn.Module, curvature: HesScale) -> dict[str, torch.Tensor]:
    return {name: curvature.diagonal(p) for name, p in model.named_parameters()}


def alone(model: nn.Module, x, y, criterion: nn.Module | None = None, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the diagonals of one batch, from a fresh copy of the model."""
    model = copy.deepcopy(model)
    model.zero_grad()
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    with HesScale(model, criterion) as curvature:
        (factor * criterion(model(x), y)).backward()
    return diagonals(model, curvature)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-15)


def plus(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: a[name] + b[name] for name in a}


class Functional(nn.Module):
    """A hand-written network; ``between`` is applied between its two layers."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.act(self.first(x))))


# --------------------------------------------------------------------------------------------------- batches and passes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_is_the_reduction_of_its_samples(reduction):
    model, (x, y) = network(), data()
    together = alone(model, x, y, nn.CrossEntropyLoss(reduction=reduction))
    each = [alone(model, x[n : n + 1], y[n : n + 1]) for n in range(len(x))]
    total = {name: sum(d[name] for d in each) for name in together}
    same(together, {n: v / len(x) for n, v in total.items()} if reduction == "mean" else total)


def test_without_reduction_every_sample_has_its_own_factor():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(reduction="none"), data()
    factors = torch.linspace(-1, 2, len(x), dtype=torch.float64)
    with HesScale(model, criterion) as curvature:
        (factors * criterion(model(x), y)).sum().backward()
    each = [alone(model, x[n : n + 1], y[n : n + 1], factor=factors[n].item()) for n in range(len(x))]
    same(diagonals(model, curvature), {name: sum(d[name] for d in each) for name in each[0]})


@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_a_multiple_of_the_loss_has_a_multiple_of_its_curvature(factor):
    model, (x, y) = network(), data()
    same(alone(model, x, y, factor=factor), {n: factor * d for n, d in alone(model, x, y).items()})


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulates_as_gradients_do_until_zero_grad(set_to_none):
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HesScale(model, criterion) as curvature:
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            batches = [data(seed=10 * step + k) for k in range(2)]
            for x, y in batches:
                (criterion(model(x), y) / 2).backward()
            expected = [alone(model, x, y, factor=0.5) for x, y in batches]
            same(diagonals(model, curvature), plus(*expected))
            optimizer.step()


def test_a_returned_diagonal_is_not_modified():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        for zero in (True, False, True):
            criterion(model(x), y).backward()
            read = diagonals(model, curvature)
            kept = {name: d.clone() for name, d in read.items()}
            if zero:
                model.zero_grad()
            criterion(model(2 * x), y).backward()
            same(read, kept)


def test_several_forwards_before_one_backward():
    model, criterion = network(), nn.CrossEntropyLoss()
    (x1, y1), (x2, y2) = data(seed=1), data(seed=2)
    with HesScale(model, criterion) as curvature:
        (criterion(model(x1), y1) + 2 * criterion(model(x2), y2)).backward()
    same(diagonals(model, curvature), plus(alone(model, x1, y1), alone(model, x2, y2, factor=2.0)))


def test_evaluation_in_between_changes_nothing():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    expected = alone(model, x, y)
    with HesScale(model, criterion) as curvature:
        output = model(x)
        with torch.no_grad():
            criterion(model(3 * x), y)
        with torch.inference_mode():
            criterion(model(3 * x), y)
        value = criterion(output, y)
        model(5 * x)  # a forward pass without a backward pass
        value.backward()
        with torch.no_grad():
            model(3 * x)
    same(diagonals(model, curvature), expected)


def test_the_graph_can_be_used_twice():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        value = criterion(model(x), y)
        value.backward(retain_graph=True)
        value.backward()
    same(diagonals(model, curvature), {n: 2 * d for n, d in alone(model, x, y).items()})


def test_create_graph_and_autograd_grad():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        torch.autograd.grad(criterion(model(x), y), list(model.parameters()), create_graph=True)
        same(diagonals(model, curvature), alone(model, x, y))
        assert not any(d.requires_grad for d in diagonals(model, curvature).values())
        # Only the last layer's gradient: the sweep ends with it, and the next one is not confused.
        value = criterion(model(x), y)
        torch.autograd.grad(value, model[4].weight, retain_graph=True)
        value.backward()
    same(diagonals(model, curvature), alone(model, x, y))


def test_gradients_and_outputs_are_those_of_the_plain_model():
    plain, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    model = copy.deepcopy(plain)
    criterion(plain(x), y).backward()
    with HesScale(model, criterion, features=["1", "3"]):
        output = model(x)
        criterion(output, y).backward()
    assert torch.equal(output, plain(x))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_the_graph_is_freed():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        with HesScale(model, criterion, features=[model[1]]):
            for _ in range(3):
                value = criterion(model(x), y)
                value.backward()
                assert seen[-1]() is None  # even before the loss is deleted: nothing holds activations after backward
            value = criterion(model(x), y)
            assert seen[-1]() is not None
            del value
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------------- uses


def test_remove_and_context_manager():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
    before = diagonals(model, curvature)
    assert not any(m._forward_hooks for m in [*model.modules(), criterion])
    model.zero_grad()
    F.mse_loss(F.relu(model(x)), torch.ones(6, 2, dtype=torch.float64)).backward()
    same(diagonals(model, curvature), before)
    curvature.remove()  # again, which is harmless


def test_two_of_them_do_not_collide():
    model, (x, y) = network(), data()
    ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    first = HesScale(model, ce)
    second = HesScale(model, ce)
    ce(model(x), y).backward()
    same(diagonals(model, first), diagonals(model, second))
    first.remove()
    second.remove()
    target = torch.ones(6, 2, dtype=torch.float64)
    with HesScale(model, mse) as third:
        model.zero_grad()
        mse(model(x), target).backward()
        same(diagonals(model, third), alone(model, x, target, nn.MSELoss()))


def test_custom_forwards_with_reshapes_are_followed():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.pool = nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2)
            self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(6, 2)

        def forward(self, x):
            x = self.pool(self.act(self.conv(x)))
            x = torch.flatten(x, 1).unsqueeze(1).squeeze(1).contiguous().reshape(-1, 8)
            return self.fc2(
                self.act(self.fc1(x.view(len(x), 4, 2).clone().flatten(1)))
            )  # self.act twice: it has no weights

    torch.manual_seed(0)
    net = Net().double()
    x, y = torch.randn(3, 1, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 1])
    written_out = nn.Sequential(net.conv, net.act, net.pool, nn.Flatten(), net.fc1, nn.ReLU(), net.fc2)
    ours, theirs = alone(net, x, y), alone(written_out, x, y)
    same(dict(enumerate(ours.values())), dict(enumerate(theirs.values())))


def test_our_networks_are_followed():
    for model, shape in ((MLP((16, 5, 4, 3), "leaky_relu"), (2, 4, 4)), (ConvNet((1, 16, 16), 3), (2, 1, 16, 16))):
        for name, diagonal in alone(model, torch.randn(shape), torch.tensor([0, 2])).items():
            assert diagonal.shape == model.get_parameter(name).shape
            assert torch.isfinite(diagonal).all()


def test_the_criterion_may_be_called_with_keywords():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), target=y).backward()
        same(diagonals(model, curvature), alone(model, x, y))
        model.zero_grad()
        criterion(target=y, input=model(x)).backward()
        same(diagonals(model, curvature), alone(model, x, y))


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()], ids=lambda c: type(c).__name__)
def test_a_target_that_the_model_computes_is_refused(criterion):
    """The loss is linear in the target, so the curvature of the input would be wrong there."""
    model, (x, _) = network(), data()
    with HesScale(model, criterion) as curvature:
        with pytest.raises(RuntimeError, match=r"^HesScale knows .* of the criterion .*; pass target.detach\(\)$"):
            criterion(torch.zeros(6, 2, dtype=torch.float64), model(x))
        target = model(x).softmax(1)
        with pytest.raises(RuntimeError, match=r"cannot follow the output of '4'"):
            criterion(model(x), target).backward()
        model.zero_grad()
        criterion(model(x), target.detach()).backward()
        same(diagonals(model, curvature), alone(model, x, target.detach(), criterion))


def test_the_squared_error_is_symmetric():
    model, criterion, (x, _) = network(), nn.MSELoss(), data()
    target = torch.ones(6, 2, dtype=torch.float64)
    with HesScale(model, criterion) as curvature:
        criterion(target, model(x)).backward()
        same(diagonals(model, curvature), alone(model, x, target, criterion))


def test_dropout_uses_the_mask_of_the_forward_pass():
    torch.manual_seed(0)
    first, drop, second = nn.Linear(3, 8).double(), nn.Dropout(0.5), nn.Linear(8, 2).double()
    first.weight.data[0] = (
        0  # an entry that is zero before dropout: whether it was dropped cannot be seen in the output
    )
    first.bias.data[0] = 0
    model, criterion, (x, y) = nn.Sequential(first, drop, second), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        torch.manual_seed(5)
        criterion(model(x), y).backward()
    torch.manual_seed(5)
    mask = F.dropout(torch.ones(6, 8, dtype=torch.float64), 0.5)
    assert 0 < (mask == 0).sum() < mask.numel()

    class Masked(nn.Module):
        def forward(self, x):
            return x * mask

    layer(Masked)(lambda module, call, h, g: h * mask**2)
    expected = alone(nn.Sequential(first, Masked(), second), x, y)
    same(diagonals(model, curvature), expected)
    model.eval()
    same(alone(model, x, y), alone(nn.Sequential(first, nn.Identity(), second), x, y))


def test_frozen_layers_are_passed_through():
    model, (x, y) = network(), data()
    expected = alone(model, x, y)
    model[2].requires_grad_(False)
    criterion = nn.CrossEntropyLoss()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
    torch.testing.assert_close(curvature.diagonal(model[0].weight), expected["0.weight"])
    with pytest.raises(RuntimeError, match=r"'2.weight': it is frozen"):
        curvature.diagonal(model[2].weight)


def test_only_the_head_of_a_larger_network():
    body, head, criterion, (x, y) = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.CrossEntropyLoss(), data()
    with HesScale(head, criterion) as curvature:
        criterion(head(F.relu(body(x))), y).backward()
    same(diagonals(head, curvature), alone(head, F.relu(body(x)).detach(), y))


def test_two_heads_on_a_fork():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fork = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), Fork()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x, only=None):
            a, b = self.fork(self.body(x))
            return self.a(a), (self.b(b) if only is None else None)

    torch.manual_seed(0)
    net, criterion, (x, y) = Net().double(), nn.CrossEntropyLoss(), data()
    with HesScale(net, criterion) as curvature:
        first, second = net(x)
        (criterion(first, y) + criterion(second, 1 - y)).backward()
        both = diagonals(net, curvature)
        net.zero_grad()
        criterion(net(x)[0], y).backward()  # a branch that the loss does not use
        only_first = curvature.diagonal(net.body[0].weight)
    a, b = (nn.Sequential(*net.body, head) for head in (net.a, net.b))
    one, other = alone(a, x, y), alone(b, x, 1 - y)
    torch.testing.assert_close(both["body.0.weight"], one["0.weight"] + other["0.weight"])
    torch.testing.assert_close(both["a.weight"], one["2.weight"])
    torch.testing.assert_close(both["b.weight"], other["2.weight"])
    torch.testing.assert_close(only_first, one["0.weight"])


def test_torch_func_sees_a_plain_model():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
        params = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.grad(lambda p: F.relu(torch.func.functional_call(model, p, (x,))).sum())(params)
    same(diagonals(model, curvature), alone(model, x, y))


@pytest.mark.slow
def test_a_model_that_is_compiled_afterwards():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(torch.compile(model)(x), y).backward()
    same(diagonals(model, curvature), alone(model, x, y))


def test_another_loss_while_paused():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
        with curvature.paused():
            other = model(x).square().sum()
        torch.autograd.grad(other, list(model.parameters()))
        same(diagonals(model, curvature), alone(model, x, y))
        with pytest.raises(RuntimeError, match="paused"):
            model(x).square().sum().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["followed first", "followed last"])
def test_an_unfollowed_backward_pass_adds_nothing(set_to_none, order):
    model, criterion = network(), nn.CrossEntropyLoss()
    with HesScale(model, criterion, features=["1"]) as curvature:
        for step in range(3):
            model.zero_grad(set_to_none=set_to_none)
            x, y = data(seed=step)
            passes = [criterion(model(x), y)]
            with curvature.paused():
                passes.append(model(x).square().sum())
            for value in passes if order == "followed first" else reversed(passes):
                value.backward()
            same(diagonals(model, curvature), alone(model, x, y))
            features = curvature.feature_diagonal(model[1])
    with HesScale(fresh := network(), criterion, features=["1"]) as curvature:
        criterion(fresh(x), y).backward()
        torch.testing.assert_close(features, curvature.feature_diagonal(fresh[1]), rtol=1e-11, atol=1e-15)


def test_a_gradient_that_starts_without_hesscale_has_no_stale_diagonal():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    curvature = HesScale(model, criterion, features=["1"])
    optimizer = upgd.UPGD(model.parameters(), sigma=0.0, curvature=curvature)
    for _ in range(2):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with curvature.paused():
            other = model(x).square().sum()
        torch.autograd.grad(
            other, list(model.parameters()), retain_graph=True
        )  # leaves no gradient, so it has no effect
        with pytest.raises(RuntimeError, match=r"'0.weight': its gradient was reset.*after zero_grad\(\)"):
            curvature.diagonal(model[0].weight)
        other.backward()
        with pytest.raises(
            RuntimeError, match=r"'0.weight': since zero_grad\(\), its gradient comes only.*paused\(\) as well"
        ):
            curvature.diagonal(model[0].weight)
        with pytest.raises(RuntimeError, match=r"the features of '1' \(Tanh\): since zero_grad\(\)"):
            curvature.feature_diagonal(model[1])
        with pytest.raises(RuntimeError, match=r"since zero_grad\(\), its gradient"):
            optimizer.step()
    criterion(model(x), y).backward()
    same(diagonals(model, curvature), alone(model, x, y))


def test_a_zero_gradient_without_hesscale_has_a_zero_diagonal():
    """Detecting zeros on the device would require a synchronization."""
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion, features=["1"]) as curvature:
        criterion(model(x), y).backward()
        model.zero_grad(set_to_none=False)
        with curvature.paused():
            other = model(x).square().sum()
        other.backward()
        assert not any(diagonal.any() for diagonal in diagonals(model, curvature).values())
        assert not curvature.feature_diagonal(model[1]).any()


def test_there_is_no_diagonal_after_zero_grad():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion, features=["1"]) as curvature:
        for _ in range(2):
            criterion(model(x), y).backward()
            same(diagonals(model, curvature), alone(model, x, y))
            model.zero_grad()
            with pytest.raises(RuntimeError, match=r"'0.weight': its gradient was reset.*after zero_grad\(\)"):
                curvature.diagonal(model[0].weight)
            with pytest.raises(RuntimeError, match=r"features of '1' \(Tanh\): its gradient was reset"):
                curvature.feature_diagonal(model[1])
        criterion(model(x), y).backward()
        model.zero_grad(set_to_none=False)
        assert not any(diagonal.any() for diagonal in diagonals(model, curvature).values())
        assert not curvature.feature_diagonal(model[1]).any()


def test_there_is_no_diagonal_of_zeros_in_place_of_a_gradient():
    """A hand-written average over processes creates such gradients, often where the last one was in memory."""
    for _ in range(20):
        model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
        with HesScale(model, criterion) as curvature:
            criterion(model(x), y).backward()
            model.zero_grad()
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            assert not any(diagonal.any() for diagonal in diagonals(model, curvature).values())


@pytest.mark.parametrize("changed", [False, True])
def test_a_diagonal_can_be_changed_in_place(changed):
    """To average it over processes; DistributedDataParallel changes the gradient after the backward pass."""
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion, features=["1"]) as curvature:
        criterion(model(x), y).backward()
        if changed:
            for param in model.parameters():
                param.grad.mul_(0.5)
        before = curvature.diagonal(model[0].weight).clone(), curvature.feature_diagonal(model[1]).clone()
        curvature.diagonal(model[0].weight).mul_(3)
        curvature.feature_diagonal(model[1]).mul_(3)
        assert torch.equal(curvature.diagonal(model[0].weight), 3 * before[0])
        assert torch.equal(curvature.feature_diagonal(model[1]), 3 * before[1])


def test_a_clipped_gradient_keeps_its_diagonal():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion, features=["1"]) as curvature:
        criterion(model(x), y).backward()
        features = curvature.feature_diagonal(model[1])
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model[0].weight.grad = model[0].weight.grad.clone()
        model[0].bias.grad = model[0].bias.grad.clone()
        same(diagonals(model, curvature), alone(model, x, y))
        assert torch.equal(curvature.feature_diagonal(model[1]), features)


def test_a_gradient_that_is_zero_by_itself_keeps_its_diagonal():
    model, criterion = nn.Sequential(nn.Linear(2, 1, bias=False)), nn.MSELoss()
    x = torch.ones(1, 2)
    with HesScale(model, criterion) as curvature:
        criterion(model(x), model(x).detach()).backward()
        assert not model[0].weight.grad.any()
        assert torch.equal(curvature.diagonal(model[0].weight), torch.full((1, 2), 2.0))


class Heads(nn.Module):
    """Two heads, each with a hidden layer, of which a forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.body(x))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", ["weights", "features"])
def test_a_head_that_the_last_pass_did_not_use_has_no_curvature(make, set_to_none):
    torch.manual_seed(0)
    model, criterion, (x, y) = Heads().double(), nn.CrossEntropyLoss(), data()
    curvature = HesScale(model, criterion)
    options = {"sigma": 0.0, "beta_utility": 0.0, "lr": 0.1, "curvature": curvature}
    optimizer = upgd.FeatureUPGD(model, **options) if make == "features" else upgd.UPGD(model.parameters(), **options)
    criterion(model(x, 0), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    criterion(model(x, 1), y).backward()
    first = model.heads[0][0].weight
    if set_to_none:
        with pytest.raises(RuntimeError, match="its gradient was reset"):
            curvature.diagonal(first)
    optimizer.step()
    utility = optimizer.state[first]["utility"]
    assert bool(utility.any()) == set_to_none  # without a gradient, the state stays as it was
    assert optimizer.state[model.heads[1][0].weight]["utility"].any()


def test_passes_through_different_heads_accumulate():
    torch.manual_seed(0)
    model, criterion, (x, y) = Heads().double(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        for head in range(2):
            criterion(model(x, head), y).backward()
        both = diagonals(model, curvature)
    for head in range(2):
        one = alone(nn.Sequential(*model.body, *model.heads[head]), x, y)
        torch.testing.assert_close(both[f"heads.{head}.0.weight"], one["2.weight"])
    assert both.keys() == dict(model.named_parameters()).keys()


def test_copies_of_the_model_are_not_followed():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied.zero_grad()
            F.relu(copied(2 * x)).sum().backward()
        same(diagonals(model, curvature), alone(model, x, y))


def test_a_copy_of_hesscale_follows_the_copied_model():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    curvature = HesScale(model, criterion, features=["1"])
    criterion(model(x), y).backward()
    for copied in (copy.deepcopy(curvature), pickle.loads(pickle.dumps(curvature))):
        assert copied.model is not model
        copied.model.zero_grad()
        copied.criterion(copied.model(x), y).backward()
        same(diagonals(copied.model, copied), diagonals(model, curvature))
        assert torch.equal(copied.feature_diagonal(copied.model[1]), curvature.feature_diagonal(model[1]))
    curvature.remove()
    assert not copy.deepcopy(curvature).model[0]._forward_hooks


def test_a_scaler_is_divided_out():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with HesScale(model, criterion, scaler=scaler) as curvature:
        scaler.scale(criterion(model(x), y)).backward()
    same(diagonals(model, curvature), alone(model, x, y))


def test_mixed_precision_is_approximately_equal():
    torch.manual_seed(0)
    model, criterion = (
        nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2)),
        nn.CrossEntropyLoss(),
    )
    x, y = torch.randn(32, 3), torch.randint(2, (32,))
    expected = alone(model, x, y)
    with HesScale(model, criterion) as curvature:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = criterion(model(x), y)
        value.backward()
    for name, diagonal in diagonals(model, curvature).items():
        assert diagonal.dtype == torch.float32
        assert (diagonal - expected[name]).norm() < 0.02 * expected[name].norm()
    half = copy.deepcopy(model).bfloat16()
    for name, diagonal in alone(half, x.bfloat16(), y).items():
        assert diagonal.dtype == torch.bfloat16
        assert (diagonal - expected[name]).norm() < 0.1 * expected[name].norm()


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.float64), lambda x: x.double().view(2, -1).view_as(x)])
def test_a_cast_between_modules_is_followed(cast):
    model, criterion, (x, y) = Functional(cast), nn.CrossEntropyLoss(), data()
    model.second.double()
    plain = copy.deepcopy(model).double()
    plain.between = lambda x: x
    with HesScale(model, criterion) as curvature:
        criterion(model(x.float()), y).backward()
    ours, theirs = diagonals(model, curvature), alone(plain, x, y)
    assert ours["first.weight"].dtype == torch.float32
    for name, diagonal in ours.items():
        torch.testing.assert_close(diagonal.double(), theirs[name], rtol=1e-5, atol=1e-7)


def test_outputs_that_are_cast_before_the_loss_are_followed():
    """As in Accelerate: 16 bits inside the model, and outputs that are converted to 32."""
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)), nn.CrossEntropyLoss()
    x, y = torch.randn(32, 3), torch.randint(2, (32,))
    expected = alone(model, x, y)
    with HesScale(model, criterion) as curvature:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        assert logits.dtype == torch.bfloat16
        criterion(logits.float(), y).backward()
    for name, diagonal in diagonals(model, curvature).items():
        assert diagonal.dtype == torch.float32
        assert (diagonal - expected[name]).norm() < 0.02 * expected[name].norm()


def test_a_second_use_of_a_cast_output_is_refused():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion):
        logits = model(x)
        with pytest.raises(RuntimeError, match=r"output of '4'.*another part"):
            (criterion(logits.float(), y) + logits.square().sum()).backward()


# ------------------------------------------------------------------------------------------------------------- features


def test_features_are_gates():
    torch.manual_seed(0)
    gated = nn.Sequential(
        *(nn.Conv2d(2, 3, 2), nn.Tanh(), Gate(3), nn.Flatten(), nn.Linear(48, 5), nn.SiLU(), Gate(5)),
        *(nn.Linear(5, 4), nn.Identity(), Gate(4), nn.Linear(4, 2)),
    ).double()
    x, y, criterion = torch.randn(3, 2, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 1]), nn.CrossEntropyLoss()
    gates = alone(gated, x, y)
    plain = nn.Sequential(*(m for m in gated if not isinstance(m, Gate)))
    with HesScale(plain, criterion, features=[plain[1], "4"]) as curvature:
        curvature.watch(plain[6], plain[0])
        criterion(plain(x), y).backward()
        torch.testing.assert_close(curvature.feature_diagonal(plain[1]), gates["2.weight"])
        torch.testing.assert_close(curvature.feature_diagonal(plain[6]), gates["9.weight"])
        assert curvature.feature_diagonal(plain[0]).shape == (3,)
        once = curvature.feature_diagonal(plain[4])
        criterion(plain(x), y).backward()  # accumulates
        torch.testing.assert_close(curvature.feature_diagonal(plain[4]), 2 * once)
        plain.zero_grad()
        criterion(plain(x), y).backward()  # restarts
        torch.testing.assert_close(curvature.feature_diagonal(plain[4]), once)
        with pytest.raises(RuntimeError, match="did not watch the features of '3'"):
            curvature.feature_diagonal(plain[3])


def test_the_last_hidden_layers_features_are_exact_with_one_output():
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), nn.MSELoss()
    x, target = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    with HesScale(model, criterion, features=["1"]) as curvature:
        criterion(model(x), target).backward()
    hidden = model[1](model[0](x)).detach()
    gates = torch.ones(4, dtype=torch.float64)
    exact = torch.func.hessian(lambda m: criterion(model[2](m * hidden), target))(gates).diagonal()
    torch.testing.assert_close(curvature.feature_diagonal(model[1]), exact.detach())


def test_features_of_sequences_are_in_the_last_dimension():
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), nn.MSELoss()
    x, target = torch.randn(5, 6, 3, dtype=torch.float64), torch.zeros(5, 6, 2, dtype=torch.float64)
    with HesScale(model, criterion, features=["1"]) as curvature:
        criterion(model(x), target).backward()
        sequences = curvature.feature_diagonal(model[1])
        model.zero_grad()
        criterion(model(x.flatten(0, 1)), target.flatten(0, 1)).backward()
        torch.testing.assert_close(curvature.feature_diagonal(model[1]), sequences)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ([nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()], (4, 1, 5, 5)),
        ([nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()], (4, 1, 5)),
        ([nn.Conv1d(1, 4, 2), nn.Flatten(1), nn.Unflatten(1, (4, 4))], (4, 1, 5)),
        ([nn.Conv2d(1, 4, 2), nn.Flatten(2)], (4, 1, 3, 3)),
    ],
    ids=["pooled in two dimensions", "pooled in one", "flattened and back", "positions flattened"],
)
def test_channels_that_were_flattened_are_still_channels(body, shape):
    """All sizes are four, so that only the numbers reveal a wrong dimension."""
    torch.manual_seed(0)
    x, y, criterion = torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1, 1, 0]), nn.CrossEntropyLoss()
    width = nn.Sequential(*body).double()(x)[0].numel()
    gated = nn.Sequential(*body, nn.Tanh(), Gate(4), nn.Flatten(), nn.Linear(width, 2)).double()
    plain = nn.Sequential(*(m for m in gated if not isinstance(m, Gate)))
    expected = alone(gated, x, y)[f"{len(body) + 1}.weight"]
    with HesScale(plain, criterion, features=[str(len(body))]) as curvature:
        criterion(plain(x), y).backward()
    torch.testing.assert_close(curvature.feature_diagonal(plain[len(body)]), expected)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("between", "operation"),
    [
        (F.relu, "ReluBackward0"),
        (lambda x: 2 * x, "MulBackward0"),
        (lambda x: torch.cat([x, x], 1)[:, :4], "SliceBackward0"),
        (lambda x: x + x.detach(), "AddBackward0"),
        (lambda x: x.t().contiguous().t(), "TBackward0"),
        (lambda x: x.flip(1).view(-1, 4), "ViewBackward0"),
        (lambda x: x.clone().mul_(2), "MulBackward0"),
    ],
)
def test_functional_calls_between_modules_are_refused(between, operation):
    model, criterion, (x, y) = Functional(between).double(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion), pytest.raises(RuntimeError, match=f"output of 'act'.*'second'.*{operation}"):
        criterion(model(x), y).backward()


def test_functional_calls_before_the_criterion_are_refused():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion), pytest.raises(RuntimeError, match=r"criterion.*was called with.*DivBackward0"):
        criterion(model(x) / 2, y).backward()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_named(register):
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    getattr(model[1], register)(lambda *_: None)
    with HesScale(model, criterion), pytest.raises(RuntimeError, match=r"backward hook.*register_full_backward_hook"):
        criterion(model(x), y).backward()


def test_another_loss_is_refused():
    model, (x, y) = network(), data()
    with HesScale(model, nn.CrossEntropyLoss()), pytest.raises(RuntimeError, match="cannot follow the output of '4'"):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, hidden: hidden.square().mean(),
        lambda model, hidden: model.second(hidden).sum(),
        lambda model, hidden: hidden.view(-1).sum(),
    ],
)
def test_a_second_use_of_an_output_is_refused(use):
    criterion, (x, y) = nn.CrossEntropyLoss(), data()
    kept = []
    model = Functional(lambda hidden: kept.append(hidden) or hidden).double()
    with HesScale(model, criterion):
        value = criterion(model(x), y)
        with pytest.raises(RuntimeError, match=r"HesScale .*'(act|second)'"):
            (value + use(model, kept[-1])).backward()


def test_a_second_use_of_a_reshaped_output_is_refused():
    criterion, (x, y) = nn.CrossEntropyLoss(), data()
    kept = []
    model = Functional(lambda hidden: kept.append(hidden.view(-1, 2, 2)) or kept[-1].flatten(1)).double()
    with HesScale(model, criterion), pytest.raises(RuntimeError, match="another part"):
        (criterion(model(x), y) + kept[-1].sum()).backward()


def test_two_modules_on_one_output_are_refused():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.add = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), Add()

        def forward(self, x):
            x = self.a(x)
            return self.add(self.b(x), self.c(x))

    model, criterion, (x, y) = Net().double(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion), pytest.raises(RuntimeError, match=r"two modules that use the output of 'a'.*Fork"):
        criterion(model(x), y).backward()


def test_a_layer_called_twice_is_refused():
    shared = nn.Linear(3, 3)
    model, criterion, (x, y) = nn.Sequential(shared, nn.Tanh(), shared).double(), nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion), pytest.raises(RuntimeError, match=r"'0' \(Linear\) is called twice"):
        criterion(model(x), y).backward()


def test_a_changed_output_or_gradient_is_refused():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    for early in (True, False):
        if early:
            model[1].register_forward_hook(lambda module, args, output: 2 * output)
        with HesScale(model, criterion), pytest.raises(RuntimeError, match=r"output of '1' \(Tanh\)"):
            criterion(model(x), y).backward()
    model = network()
    model[1].register_forward_hook(lambda module, args, output: output.register_hook(lambda g: 2 * g) and None)
    with HesScale(model, criterion), pytest.raises(RuntimeError, match="tensor hook changed the gradient"):
        criterion(model(x), y).backward()


def test_an_input_changed_in_place_is_refused():
    # Tanh keeps its output for the gradient, so that autograd does not miss its input.
    kept = []
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    criterion, (x, y) = nn.CrossEntropyLoss(), data()
    with HesScale(model, criterion):
        value = criterion(model(x), y)
        with torch.no_grad():
            kept[-1].add_(1)
        with pytest.raises(RuntimeError, match=r"input of '1' \(Tanh\) was changed in place"):
            value.backward()


def test_modules_without_a_rule_are_named_when_attaching():
    class Odd(nn.Module):
        def forward(self, x):
            return x.sin()

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        """A subclass with the same forward is supported."""

    criterion = nn.CrossEntropyLoss()
    for bad, name in ((Odd(), "Odd"), (Doubled(3, 3), "Doubled"), (nn.GRU(3, 3), "GRU")):
        with pytest.raises(TypeError, match=rf"no rule for '1' \({name}\).*Linear.*@upgd.curvature.layer"):
            HesScale(nn.Sequential(nn.Linear(3, 3), bad), criterion)
    HesScale(nn.Sequential(Renamed(3, 3), nn.Sequential()), criterion)


def test_unsupported_models_are_refused_when_attaching():
    ce = nn.CrossEntropyLoss()
    with pytest.raises(TypeError, match="criterion must be one of the modules BCEWithLogitsLoss"):
        HesScale(network(), F.cross_entropy)
    with pytest.raises(TypeError, match="not L1Loss"):
        HesScale(network(), nn.L1Loss())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        HesScale([nn.Linear(3, 3)], ce)
    with pytest.raises(ValueError, match=r"'0' \(ReLU\).*inplace=False"):
        HesScale(nn.Sequential(nn.ReLU(inplace=True)), ce)
    with pytest.raises(ValueError, match=r"with zero padding only, but '0' \(Conv2d\) has 'circular'"):
        HesScale(nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="circular")), ce)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"'1' \(Linear\): it shares a parameter with '0'"):
        HesScale(tied, ce)
    computed = [nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))]
    computed.append(prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5))
    for linear in computed:
        with pytest.raises(TypeError, match=r"cannot follow '0' \(\w*Linear\): its weight is computed"):
            HesScale(nn.Sequential(linear), ce)
    with pytest.raises(TypeError, match="compiled"):
        HesScale(torch.compile(network()), ce)
    with pytest.raises(ValueError, match="features must be layers of the model, but one is a Sequential"):
        HesScale(nn.Sequential(nn.Sequential(nn.Linear(3, 3))), ce, features=["0"])


def test_unsupported_calls_are_refused():
    criterion, (x, _) = nn.CrossEntropyLoss(), data()
    normalized = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with HesScale(normalized, criterion), pytest.raises(RuntimeError, match=r"BatchNorm.*\.eval\(\)"):
        normalized(x)
    model = network()
    with HesScale(model, nn.MSELoss()) as curvature, pytest.raises(ValueError, match="the same shape"):
        curvature.criterion(model(x), torch.ones(6, 1, dtype=torch.float64).expand(6, 2)[:, :1]).backward()
    with pytest.raises(ValueError, match=r"Add takes tensors of the same shape.*\(2, 4\) and \(2, 3\)"):
        Residual(nn.Linear(3, 4))(torch.ones(2, 3))


def test_missing_diagonals_are_errors():
    model, criterion, (x, y) = network(), nn.CrossEntropyLoss(), data()
    unused = nn.ModuleDict({"used": model, "unused": nn.Linear(3, 3)})
    with HesScale(unused, criterion, features=["used.1"]) as curvature:
        with pytest.raises(RuntimeError, match=r"no diagonal for 'used.0.weight' yet.*backward"):
            curvature.diagonal(model[0].weight)
        with pytest.raises(RuntimeError, match=r"no backward through 'used.1'"):
            curvature.feature_diagonal(model[1])
        criterion(model(x), y).backward()
        with pytest.raises(RuntimeError, match=r"'unused.weight' yet"):
            curvature.diagonal(unused["unused"].weight)
        with pytest.raises(RuntimeError, match=r"does not know this parameter \(shape \(2,\)\)"):
            curvature.diagonal(nn.Parameter(torch.ones(2)))
        with pytest.raises(RuntimeError, match="a Linear"):
            curvature.feature_diagonal(nn.Linear(1, 1))


# --------------------------------------------------------------------------------------------------------- custom rules


def test_adding_an_activation_a_layer_and_a_loss():
    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(x)

    class Scale(nn.Module):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.linspace(1, 2, units, dtype=torch.float64))

        def forward(self, x):
            return x * self.gain

    class Cubes(nn.Module):
        def forward(self, input, target):
            return (input - target).pow(3).sum()

    @elementwise(Sine)
    def sine(module, x):
        return torch.cos(x), -torch.sin(x)

    @layer(Scale)
    def scale(module, call, h, g):
        call.add(module.gain, (h * call.input**2).sum(0))
        return h * module.gain**2

    @loss(Cubes)
    def cubes(criterion, y, target, factor):
        return factor * 6 * (y - target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4).double(), Sine(), Scale(4), nn.Linear(4, 1).double())
    x, target = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    ours = alone(model, x, target, Cubes())
    for name, p in model.named_parameters():  # one output after one hidden layer: exact
        exact = torch.func.hessian(
            lambda v, n=name: (torch.func.functional_call(model, {n: v}, (x,)) - target).pow(3).sum()
        )(p.detach())
        exact = exact.reshape(p.numel(), p.numel()).diagonal().view_as(p)
        torch.testing.assert_close(ours[name], exact.detach(), rtol=1e-10, atol=1e-12)


def test_a_module_that_uses_its_input_twice_gets_a_remedy():
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    class SwishOnce(nn.Module):
        def forward(self, x):
            x = x.view_as(x)
            return x * torch.sigmoid(x)

    @elementwise(Swish, SwishOnce)
    def swish(module, x):
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))

    a, b, (x, y) = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), data()
    with pytest.raises(RuntimeError, match=r"'1' \(Swish\).*2 places.*view_as"):
        alone(nn.Sequential(a, Swish(), b), x, y)
    same(alone(nn.Sequential(a, SwishOnce(), b), x, y), alone(nn.Sequential(a, nn.SiLU(), b), x, y))
