"""HesScale and the feature-wise optimizers on a GPU: agreement with the CPU, no synchronization, mixed precision."""

import copy

import pytest
import torch
from torch import Tensor, nn

import upgd
from upgd.curvature import Residual

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 3, padding="same"),
            nn.GELU(),
            nn.MaxPool2d(2),
            Residual(nn.Conv2d(6, 6, 3, padding=1)),
            nn.ReLU(),
        ),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4)),
    )


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator)


def diagonals(model: nn.Module, curvature: upgd.HesScale) -> dict[str, Tensor]:
    return {name: curvature.diagonal(p).cpu() for name, p in model.named_parameters()}


def test_the_gpu_equals_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        model, criterion = network().double().to(device), nn.CrossEntropyLoss(label_smoothing=0.1)
        with upgd.HesScale(model, criterion, features=["1", "9"]) as curvature:
            for seed in (1, 2):  # accumulates
                x, y = batch(seed)
                criterion(model(x.double().to(device)), y.to(device)).backward()
        results.append(diagonals(model, curvature) | {n: curvature.feature_diagonal(model[int(n)]).cpu() for n in "19"})
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_dropout_keeps_its_mask() -> None:
    model, criterion = nn.Sequential(nn.Linear(9, 64), nn.Dropout(0.5), nn.Linear(64, 1)).double().cuda(), nn.MSELoss()
    x, y = torch.randn(1, 9, dtype=torch.float64, device="cuda"), torch.zeros(1, 1, dtype=torch.float64, device="cuda")
    with upgd.HesScale(model, criterion) as curvature:
        criterion(model(x), y).backward()
    # One sample, one output, linear: gradients are 2y·∂y/∂w and curvatures 2·(∂y/∂w)², zero for the units that were dropped.
    squared = model[0].weight.grad.square()
    ratio = curvature.diagonal(model[0].weight) / squared
    kept = squared > 0
    assert 0 < kept.sum() < kept.numel()
    assert torch.isfinite(ratio[kept]).all()
    assert (ratio[kept].max() / ratio[kept].min() - 1).abs() < 1e-6
    assert (curvature.diagonal(model[0].weight)[~kept] == 0).all()


def test_mixed_precision_with_a_scaler() -> None:
    exact = network().cuda()
    model, criterion = copy.deepcopy(exact), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    x, y = (t.cuda() for t in batch())
    with upgd.HesScale(exact, criterion) as curvature:
        criterion(exact(x), y).backward()
    expected = diagonals(exact, curvature)
    with upgd.HesScale(model, criterion, scaler=scaler) as curvature:
        with torch.autocast("cuda", dtype=torch.float16):
            value = criterion(model(x), y)
        scaler.scale(value).backward()
    for name, diagonal in diagonals(model, curvature).items():
        assert diagonal.dtype == torch.float32
        assert (diagonal - expected[name]).norm() < 0.02 * expected[name].norm(), name


@pytest.mark.parametrize("order", [1, 2])
def test_a_step_of_features_never_waits_for_the_device(order: int) -> None:
    model = nn.Sequential(*(m for m in network() if not isinstance(m, Residual))).cuda()
    criterion = nn.CrossEntropyLoss()
    options = {"curvature": upgd.HesScale(model, criterion)} if order == 2 else {}
    optimizer = upgd.FeatureUPGD(model, capturable=True, **options)
    x, y = (t.cuda() for t in batch())
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        finally:
            if step == 3:
                torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_features_on_the_gpu_learn_as_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = nn.Sequential(*(m for m in network() if not isinstance(m, Residual))).double().to(device)
        criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(3)
        curvature = upgd.HesScale(model, criterion)
        optimizer = upgd.FeatureUPGD(model, 0.1, sigma=0.01, beta_utility=0.9, curvature=curvature, generator=generator)
        for seed in range(10):
            x, y = batch(seed)
            optimizer.zero_grad()
            criterion(model(x.double().to(device)), y.to(device)).backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-7, atol=1e-9)
