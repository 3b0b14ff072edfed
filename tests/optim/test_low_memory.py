"""State in 16 and 8 bits, and bfloat16 parameters, with stochastic rounding."""

import copy
import io
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_cases import Example
from torch import Tensor, nn

import upgd
from upgd.methods import METHODS
from upgd.noise import Purpose, parameter_keys
from upgd.optim._narrow import Rounding, Stored, begin, wide_state
from upgd.optim.from_method import MethodOptimizer

NARROW = [torch.bfloat16, torch.uint8]
every_dtype = pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "uint8"])
BUILDS: dict[str, Any] = {
    "UPGD": lambda params, **options: upgd.UPGD(params, lr=0.01, sigma=0.01, **options),
    "UPGD-local": lambda params, **options: upgd.UPGD(params, lr=0.01, sigma=0.01, scaling="local", **options),
    "AdaUPGD": lambda params, **options: upgd.AdaUPGD(params, lr=0.003, sigma=0.01, weight_decay=0.1, **options),
    "UPS": lambda params, **options: upgd.UPS(params, lr=0.1, sigma=0.01, **options),
    "MethodOptimizer of AdaUPGD": lambda params, **options: MethodOptimizer(
        params, METHODS["adaupgd"], lr=0.003, sigma=0.01, **options
    ),
    "MethodOptimizer": lambda params, **options: MethodOptimizer(params, Example, lr=0.01, sigma=0.01, **options),
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())


def rounding(step: int) -> Rounding:
    return Rounding(parameter_keys(1, step, 0, purpose=Purpose.ROUNDING), 0, 0, None)


def kept(values: Tensor, dtype: torch.dtype, step: int = 1) -> Tensor:
    """Return the rounded values."""
    blocks = -(-values[0].numel() // 256)
    scales = torch.zeros(len(values), blocks, dtype=values.dtype) if dtype == torch.uint8 else None
    stored = Stored(torch.zeros_like(values, dtype=dtype), scales, rounding(step), values.dtype)
    found = stored.keep(values)
    torch.testing.assert_close(found, stored.wide(), rtol=0, atol=0, equal_nan=True)
    return found


def neighbours(value: float, largest: float, signed: bool) -> tuple[float, float]:
    """Return the code words around a positive value, as documented."""
    codes = (
        [largest * (c / 127) ** 4 for c in range(128)] if signed else [largest * (c / 256) ** 4 for c in range(1, 257)]
    )
    return max((c for c in codes if c <= value * (1 + 1e-9)), default=codes[0]), min(
        c for c in codes if c >= value * (1 - 1e-9)
    )


@settings(max_examples=30)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=300), st.booleans())
def test_8_bits_round_to_a_neighbour(numbers: list[float], positive: bool) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)[None]
    values = torch.where(values.abs() < 1e-30, 0, values)
    values = values.abs() if positive else values
    found = kept(values, torch.uint8)[0]
    for start in range(0, len(numbers), 256):
        block, own = values[0, start : start + 256], found[start : start + 256]
        largest = float(torch.tensor(float(block.abs().max())))
        signed = bool((block < 0).any())
        for value, rounded in zip(block.tolist(), own.tolist(), strict=True):
            if largest == 0 or (signed and value == 0):
                assert rounded == 0
                continue
            low, high = neighbours(abs(value), largest, signed)
            assert low * (1 - 1e-5) <= abs(rounded) <= high * (1 + 1e-5)
            assert rounded * value >= 0


@every_dtype
def test_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    values = torch.randn(4, 300, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    rounds = torch.stack([kept(values, dtype, step) for step in range(1, 2001)]).double()
    spread, resolution = rounds.std(0) / math.sqrt(2000), values.abs() * (1 / 128 if dtype == torch.bfloat16 else 0.3)
    # The last term allows for a neighbour that was expected only a few times and did not occur.
    assert ((rounds.mean(0) - values).abs() <= 5 * spread + resolution * 10 / 2000 + 1e-7).all()
    assert (spread > 0).double().mean() > 0.9  # not exact, otherwise the test would be void


def test_averages_of_squares_never_become_zero() -> None:
    """Adam divides by them."""
    values = torch.cat([torch.tensor([[1.0]]), torch.full((1, 255), 1e-12)], 1)
    assert (kept(values, torch.uint8) > 0).all()


def test_infinite_and_undefined_values_stay() -> None:
    values = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]])
    assert torch.equal(kept(values, torch.bfloat16).isfinite(), values.isfinite())
    assert not kept(values, torch.uint8).isfinite().all()  # its block is also invalid


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 10)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> float:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 20, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), x.float().argmax(1) % 10)
        loss.backward()
        optimizer.step()
    return loss.item()


@every_dtype
@every_build
def test_training_is_close_to_that_with_32_bits(build: Any, dtype: torch.dtype) -> None:
    models = network(), network()
    optimizers = [
        build(model.parameters(), seed=1, **o) for model, o in zip(models, ({}, {"state_dtype": dtype}), strict=True)
    ]
    losses = [train(model, optimizer, 30) for model, optimizer in zip(models, optimizers, strict=True)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    change, difference = 0.0, 0.0
    for begun, exact, narrow in zip(network().parameters(), *(m.parameters() for m in models), strict=True):
        change += (exact - begun).square().sum().item()
        difference += (exact - narrow).square().sum().item()
    assert 0 < difference < 0.05 * change
    state = optimizers[1].state[models[1][0].weight]
    kinds = {
        name: value.dtype for name, value in state.items() if name not in ("step", "start") and "scale" not in name
    }
    assert set(kinds.values()) == {dtype}
    if dtype == torch.uint8:
        assert all(state[f"{name}_scale"].shape == (300, 1) for name in kinds)
        small = optimizers[1].state[models[1][0].bias]
        assert all(value.dtype == torch.float32 for name, value in small.items() if name != "step")


@every_dtype
@pytest.mark.parametrize("name", ["UPGD", "UPGD-local", "AdaUPGD"])
def test_foreach_equals_the_for_loop(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where the last bit determines the rounding."""
    from upgd.optim import _foreach

    monkeypatch.setitem(_foreach._BLOCK_ENTRIES, "cpu", 1000)
    models = [network(torch.bfloat16) for _ in range(2)]
    for model, foreach in zip(models, (True, False), strict=True):
        options = {"state_dtype": dtype, "stochastic_rounding": True, "seed": 1, "foreach": foreach}
        train(model, BUILDS[name](model.parameters(), **options), 3)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert (a == b).double().mean() > 0.98
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)


@every_dtype
@every_build
def test_a_checkpoint_resumes_identically(build: Any, dtype: torch.dtype) -> None:
    model = network(torch.bfloat16)
    optimizer = build(model.parameters(), state_dtype=dtype, stochastic_rounding=True)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network(torch.bfloat16)
    other.load_state_dict(saved["model"])
    loaded = build(other.parameters())
    loaded.load_state_dict(saved["optimizer"])
    for a, b in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert {n: v.dtype for n, v in a.items()} == {n: v.dtype for n, v in b.items()}
    copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, first=3)
    for network_, optimizer_ in ((other, loaded), copied):
        train(network_, optimizer_, 3, first=3)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), network_.parameters(), strict=True))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@every_dtype
@every_build
def test_a_full_state_dict_has_types_that_torch_gathers(build: Any, dtype: torch.dtype) -> None:
    """torch.distributed.checkpoint gathers tensors, numbers, strings and None, but no dtypes."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, other = network(torch.bfloat16), network(torch.bfloat16)
    optimizer, loaded = build(model.parameters(), state_dtype=dtype), build(other.parameters())
    train(model, optimizer, 2)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer, options=full), options=full)
    assert loaded.param_groups[0]["state_dtype"] == dtype
    states = [[one.state[p] for p in one.param_groups[0]["params"]] for one in (optimizer, loaded)]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "as a dtype, as in old checkpoints"])
def test_the_dtype_of_a_checkpoint(by_name: bool) -> None:
    optimizer = upgd.UPGD([nn.Parameter(torch.ones(2))], state_dtype=torch.bfloat16)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["state_dtype"] == "bfloat16"
    assert optimizer.param_groups[0]["state_dtype"] == torch.bfloat16
    if not by_name:
        saved["param_groups"][0]["state_dtype"] = torch.bfloat16
    loaded = upgd.UPGD([nn.Parameter(torch.ones(2))])
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["state_dtype"] == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, None])
def test_a_checkpoint_brings_its_dtype_which_may_be_changed_afterwards(dtype: torch.dtype | None) -> None:
    params = [nn.Parameter(torch.ones(20, 300)) for _ in range(2)]
    first, second = upgd.UPGD(params[:1], state_dtype=torch.bfloat16), upgd.UPGD(params[1:], state_dtype=dtype)
    for param in params:
        param.grad = torch.randn(20, 300)
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["state_dtype"] == torch.bfloat16
    assert second.state[params[1]]["utility"].dtype == torch.bfloat16
    second.param_groups[0]["state_dtype"] = dtype
    second.step()
    assert second.state[params[1]]["utility"].dtype == (dtype or torch.float32)


def test_state_changes_its_dtype_when_the_option_does() -> None:
    param = nn.Parameter(torch.zeros(20, 300))
    state: dict[str, Any] = {"utility": torch.randn(20, 300)}
    exact = state["utility"]
    for dtype in (torch.uint8, torch.bfloat16, None):
        begin(state, "utility", param, dtype)
        assert state["utility"].dtype == (dtype or torch.float32)
        assert ("utility_scale" in state) == (dtype == torch.uint8)
        torch.testing.assert_close(wide_state(state, "utility", param), exact, rtol=0.1, atol=1e-3)


def test_bfloat16_stalls_without_stochastic_rounding() -> None:
    """Steps of 2⁻¹² from 1, where bfloat16 has steps of 2⁻⁸: rounded to the nearest, none of 1000 is taken."""

    def moved(**options: Any) -> Tensor:
        param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = upgd.PGD([param], lr=2.0**-12, sigma=0.0, **options)
        for _ in range(1000):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return 1 - param.detach().float()

    assert (moved() == 0).all()
    assert float(moved(stochastic_rounding=True, seed=0).mean()) == pytest.approx(1000 / 4096, rel=0.02)


def test_a_slow_trace_is_updated_with_few_bits() -> None:
    """β = 0.999 and a utility that changes its sign: with rounding to nearest, the trace would not change."""
    param = nn.Parameter(torch.ones(20, 300))
    for dtype in NARROW:
        optimizer = upgd.UPGD([param], lr=0.0, sigma=0.0, beta_utility=0.999, state_dtype=dtype, seed=0)
        begin(optimizer.state[param], "utility", param, None)
        optimizer.state[param] |= {"utility": torch.ones(20, 300), "step": torch.tensor(1000.0)}
        for _ in range(500):
            param.grad = torch.ones_like(param)
            optimizer.step()
        found = wide_state(optimizer.state[param], "utility", param)
        assert float(found.mean()) == pytest.approx(2 * 0.999**500 - 1, abs=0.05)


def test_the_example_prints_losses_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "low_memory.py"))
    losses = example["main"](["--steps", "3"])
    assert all(2.0 < loss < 2.5 for loss in losses.values())
    sizes = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert sizes[:4] == [16.0, 14.0, 14.0, 8.0]
    assert sizes[4] < 6


@pytest.mark.parametrize(
    "option", [{"state_dtype": torch.float16}, {"state_dtype": "int8"}, {"stochastic_rounding": 1}]
)
def test_other_options_are_refused(option: dict[str, Any]) -> None:
    for build in BUILDS.values():
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
            build(network().parameters(), **option)
