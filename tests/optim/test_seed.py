"""An optimizer with a seed: its noise is a function of seed, step, parameter and entry."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_cases import OPTIMIZERS, Build, backward, network, parameters, train
from torch import Tensor, nn

import upgd
from upgd.noise import parameter_normals

SEEDED = {name: build for name, build in OPTIMIZERS.items() if not name.startswith("Feature")}
every_seeded = pytest.mark.parametrize("build", SEEDED.values(), ids=SEEDED.keys())


def noises(shapes: list[tuple[int, ...]], seed: int, step: int) -> list[Tensor]:
    return [
        parameter_normals(seed, step, number, 0, math.prod(shape), dtype=torch.float64).view(shape)
        for number, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("kind", ["white", "anticorrelated"])
@pytest.mark.parametrize("foreach", [True, False])
def test_noise_is_that_of_the_definition(kind: str, foreach: bool) -> None:
    """Two groups, and a parameter that skips a step: it has its own count."""
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), (2, 3)]
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = upgd.PGD(
        [{"params": params[:1]}, {"params": params[1:]}], 1.0, sigma=0.5, noise=kind, foreach=foreach, seed=9
    )
    steps = [0, 0, 0]
    for step in range(3):
        before = [param.detach().clone() for param in params]
        for number, param in enumerate(params):
            param.grad = None if (step, number) == (1, 1) else torch.zeros_like(param)
            steps[number] += param.grad is not None
        optimizer.step()
        for number, param in enumerate(params):
            xi = noises(shapes, 9, steps[number])[number]
            if kind == "anticorrelated" and steps[number] > 1:
                xi = xi - noises(shapes, 9, steps[number] - 1)[number]
            if param.grad is None:
                xi = torch.zeros_like(xi)
            torch.testing.assert_close(before[number] - param.detach(), 0.5 * xi, rtol=1e-10, atol=1e-12)
        assert "previous_noise" not in optimizer.state[params[0]]


@every_seeded
def test_only_the_seed_matters_and_torchs_generators_are_not_used(build: Build) -> None:
    def final(seed: int, torch_seed: int) -> list[Tensor]:
        model = network()
        optimizer = build(model, seed=seed)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, seed=step)
            torch.manual_seed(torch_seed)
            state = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(torch.get_rng_state(), state)
        return parameters(model)

    torch.testing.assert_close(final(1, 0), final(1, 1), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(final(1, 0), final(2, 0))


@every_seeded
def test_a_checkpoint_resumes_with_the_same_noise(build: Build) -> None:
    """Also in an optimizer that was created without a seed."""
    model, other = network(), network(seed=1)
    optimizer = build(model, seed=4)
    train(model, optimizer, 3)
    loaded = build(other)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, first=3)
    train(other, loaded, 3, first=3)
    torch.testing.assert_close(parameters(other), parameters(model), rtol=0, atol=0)


@every_seeded
def test_a_capturable_step_draws_the_same(build: Build) -> None:
    models = network(torch.float64), network(torch.float64)
    optimizers = build(models[0], seed=4), build(models[1], seed=4, capturable=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 4)
    torch.testing.assert_close(parameters(models[1]), parameters(models[0]), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"capturable": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("build", [upgd.PGD, partial(upgd.methods.optimizer, "pgd")])
def test_noise_changes_at_every_step_of_a_very_long_run(build: Build, options: dict[str, bool]) -> None:
    """Floating-point numbers of 32 bits do not count beyond 2²⁴."""
    params = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    optimizer, other = (build([param], lr=1.0, sigma=1.0, seed=3, **options) for param in params)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[params[0]]["step"] = torch.tensor(2.0**24 - 2)  # as in a checkpoint of another optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2**24 - 1, 2**24 + 6):
        if step == 2**24 + 4:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer, params = other, params[1:]
        with torch.no_grad():
            params[0].zero_()
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == step
        torch.testing.assert_close(params[0].detach(), -parameter_normals(3, step, 0, 0, 8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("kind", ["white", "anticorrelated"])
def test_small_parameters_that_are_drawn_together_have_the_noise_of_each(kind: str, options: dict[str, bool]) -> None:
    """Of several types and odd sizes, around a large one, with steps of their own beyond 2²⁴."""
    shapes = [(), (1,), (3, 5), (200, 100), (7,), (8192,), (2, 2), (8191,), (3,)]
    dtypes = [torch.float32] * 5 + [torch.float64, torch.float64, torch.bfloat16, torch.float32]
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    optimizer = upgd.PGD(params, 1.0, sigma=1.0, noise=kind, seed=5, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    first = [0, 1, 2, 3, 2**24, 2**24 + 1, 2**33, 5, 0]
    for param, step in zip(params, first, strict=True):
        optimizer.state[param]["step"].fill_(step)
        param.detach().zero_()
    optimizer.step()
    for number, (param, step) in enumerate(zip(params, first, strict=True)):
        wide = torch.promote_types(param.dtype, torch.float32)
        xi = parameter_normals(5, step + 1, number, 0, param.numel(), dtype=wide).view(param.shape)
        if kind == "anticorrelated" and step > 0:
            xi = xi - parameter_normals(5, step, number, 0, param.numel(), dtype=wide).view(param.shape)
        assert torch.equal(param.detach(), (-xi).to(param.dtype)), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_of_16_bit_parameters_has_32_bits(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(7, dtype=dtype))
    param.grad = torch.zeros_like(param)
    upgd.PGD([param], 1.0, sigma=1.0, seed=3).step()
    assert torch.equal(param.detach(), (-parameter_normals(3, 1, 0, 0, 7)).to(dtype))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "one", True])
def test_a_wrong_seed_is_refused(seed: Any) -> None:
    for build in (OPTIMIZERS["UPGD"], OPTIMIZERS["MethodOptimizer"]):
        with pytest.raises(
            ValueError, match=r"seed must be an integer from 0 to 2\*\*63 - 1, but it is .*; try seed=0"
        ):
            build(network(), seed=seed)
