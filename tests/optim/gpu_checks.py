"""The optimizers on a CUDA device: plain functions, so that they also run without pytest."""

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import upgd

sys.path.insert(0, str(Path(__file__).parent))
import fused_on_gpu
from optimizer_cases import OPTIMIZERS, network

CUDA = torch.device("cuda")


def gradients(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1 for p in model.parameters()]


def put_gradients(model: nn.Module, seed: int) -> None:
    """Set gradients in place if they exist, as a captured graph requires."""
    for param, gradient in zip(model.parameters(), gradients(model, seed), strict=True):
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(gradient)


def assert_same(first: nn.Module, second: nn.Module, rtol: float = 1e-9) -> None:
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=rtol)


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def check_graph_replays_equal_eager_steps(foreach: bool) -> None:
    """A captured step, replayed on new gradients and a new learning rate, is the eager step on the CPU."""
    for name, build in OPTIMIZERS.items():
        if "Feature" in name or "Method" in name:
            continue
        cpu, gpu = network(torch.float64), network(torch.float64).to(CUDA)
        lr = torch.tensor(0.05, dtype=torch.float64, device=CUDA)
        eager = build(cpu, lr=0.05, sigma=0.0, foreach=False)
        captured = build(gpu, lr=lr, sigma=0.0, foreach=foreach, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for seed in range(3):
                put_gradients(gpu, seed)
                captured.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = capture(captured.step)
        for seed in range(3):
            put_gradients(cpu, seed)
            eager.step()
        for seed in range(3, 30):
            rate = 0.05 / (1 + seed)
            lr.fill_(rate)
            eager.param_groups[0]["lr"] = rate
            put_gradients(gpu, seed)
            put_gradients(cpu, seed)
            graph.replay()
            eager.step()
        # The step count on the device has 32 bits, and the bias correction with it.
        assert_same(cpu, gpu, rtol=1e-5)


def check_every_replay_draws_new_noise() -> None:
    param = nn.Parameter(torch.zeros(100_000, device=CUDA))
    param.grad = torch.zeros_like(param)
    optimizer = upgd.PGD([param], 1.0, sigma=0.5, capturable=True)
    optimizer.step()
    graph = capture(optimizer.step)
    moves = []
    for _ in range(3):
        before = param.detach().clone()
        graph.replay()
        moves.append(param.detach() - before)
    for move in moves:
        assert abs(float(move.std()) - 0.5) < 0.01, float(move.std())
    correlation = float(torch.corrcoef(torch.stack(moves))[0, 1])
    assert abs(correlation) < 0.02, correlation


def check_cuda_equals_cpu() -> None:
    for name, build in OPTIMIZERS.items():
        if "Feature" in name or "Method" in name:
            continue
        for foreach in (False, True):
            cpu, gpu = network(torch.float64), network(torch.float64).to(CUDA)
            # One generator on the CPU gives the same noise on both devices.
            own = build(cpu, generator=torch.Generator().manual_seed(1), foreach=foreach)
            other = build(gpu, generator=torch.Generator().manual_seed(1), foreach=foreach)
            for seed in range(20):
                for model, optimizer in ((cpu, own), (gpu, other)):
                    put_gradients(model, seed)
                    optimizer.step()
            assert_same(cpu, gpu)


def check_parameters_on_two_devices_share_the_maximum() -> None:
    one, two = network(torch.float64), network(torch.float64)
    two[0].to(CUDA)
    optimizers = [upgd.UPGD(model.parameters(), sigma=0.0) for model in (one, two)]
    for seed in range(10):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            put_gradients(model, seed)
            optimizer.step()
    assert_same(one, two)


def check_accidents_stay_where_they_are() -> None:
    for foreach in (False, True):
        for accident in (float("nan"), float("inf"), float("-inf")):
            spoilt, sound = (nn.Parameter(torch.randn(30, 40, device=CUDA)) for _ in range(2))
            spoilt.grad, sound.grad = torch.randn_like(spoilt), torch.randn_like(sound)
            spoilt.grad[3, 4] = accident
            optimizer = upgd.UPGD([spoilt, sound], foreach=foreach)
            for _ in range(3):
                optimizer.step()
            assert bool(sound.isfinite().all())


def check_gradient_scaler() -> None:
    for build in (OPTIMIZERS["UPGD"], OPTIMIZERS["PGD"]):
        models = [network().to(CUDA) for _ in range(2)]
        optimizers = [build(model, sigma=0.0) for model in models]
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        x, y = torch.randn(5, 1, 6, 6, device=CUDA), torch.arange(5, device=CUDA) % 4
        nn.functional.cross_entropy(models[0](x), y).backward()
        scaler.scale(nn.functional.cross_entropy(models[1](x), y)).backward()
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        assert_same(*models, rtol=1e-5)


def check_compiled_step() -> None:
    models = [network().to(CUDA) for _ in range(2)]
    optimizers = [upgd.UPGD(model.parameters(), sigma=0.0, weight_decay=0.1, capturable=True) for model in models]
    compiled: Any = torch.compile(optimizers[1].step)
    for seed in range(5):
        for model in models:
            put_gradients(model, seed)
        optimizers[0].step()
        compiled()
    assert_same(*models, rtol=1e-5)


def check_state_moves_with_the_parameters() -> None:
    cpu = network()
    own = OPTIMIZERS["UPGD"](cpu, sigma=0.0)
    put_gradients(cpu, 0)
    own.step()
    gpu = copy.deepcopy(cpu).to(CUDA)
    other = OPTIMIZERS["UPGD"](gpu, sigma=0.0)
    other.load_state_dict(own.state_dict())
    for model, optimizer in ((cpu, own), (gpu, other)):
        put_gradients(model, 1)
        optimizer.step()
    assert_same(cpu, gpu, rtol=1e-5)


def check_sharded_steps(device: str = "cuda", backend: str = "nccl") -> None:
    """FSDP2 and tensor parallelism with NCCL, in one process because NCCL refuses a second one on the same GPU.

    The optimizers communicate as they do with several; ``test_sharded.py`` has several processes, with gloo.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).to(device)

    def train(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x, y = torch.randn(8, 64, generator=generator).to(device), torch.arange(8, device=device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh(device, (1,))
            narrow = (
                {"state_dtype": torch.bfloat16, "fused": True},
                {"state_dtype": torch.bfloat16},
                {"state_dtype": torch.uint8, "fused": True, "scaling": "local"},
                {"state_dtype": torch.uint8},
            )
            for options in ({"fused": True}, {}, {"scaling": "local"}, *narrow):
                options = {"foreach": True, **options} if "fused" not in options else options
                whole, sharded, parallel = model(), model(), model()
                fully_shard(sharded, mesh=mesh)
                parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
                drawn: int | None = None
                tolerance = 5e-4 if "state_dtype" in options else 1e-5  # the last bit may determine the rounding
                for network in (sharded, whole, parallel):
                    if network is parallel and (options.get("state_dtype") == torch.uint8 or "fused" in options):
                        continue  # rows are sharded
                    optimizer = upgd.AdaUPGD(network.parameters(), sigma=0.1, seed=drawn, **options)
                    train(network, optimizer)
                    drawn = optimizer.param_groups[0]["seed"]
                    assert drawn is not None
                    if network is not sharded:
                        for a, b in zip(network.parameters(), sharded.parameters(), strict=True):
                            full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in (a, b)]
                            torch.testing.assert_close(*(one.detach() for one in full), rtol=1e-4, atol=tolerance)
        finally:
            torch.distributed.destroy_process_group()


CHECKS: dict[str, Callable[[], None]] = {
    "sharded steps": check_sharded_steps,
    "graph replays equal eager steps, for-loop": lambda: check_graph_replays_equal_eager_steps(False),
    "graph replays equal eager steps, foreach": lambda: check_graph_replays_equal_eager_steps(True),
    "every replay draws new noise": check_every_replay_draws_new_noise,
    "cuda equals cpu": check_cuda_equals_cpu,
    "two devices share the maximum": check_parameters_on_two_devices_share_the_maximum,
    "accidents stay where they are": check_accidents_stay_where_they_are,
    "gradient scaler": check_gradient_scaler,
    "compiled step": check_compiled_step,
    "state moves with the parameters": check_state_moves_with_the_parameters,
    **fused_on_gpu.CHECKS,
}
