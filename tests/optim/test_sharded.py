"""Several processes: parameters sharded by FSDP2, where the global maximum, the norms and the noise reach across the
shards, and copies of a model under DistributedDataParallel, which must not drift apart."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn

import upgd

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
WORLD = 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(steps)
    ]


def in_processes(check: Callable[[int], None]) -> None:
    """Run the check in two processes that know of each other, with the process's number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_join, (check, port), nprocs=WORLD)


def _join(rank: int, check: Callable[[int], None], port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    check(rank)
    torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- sharded


def sharded_model() -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, sharded = init_device_mesh("cpu", (WORLD,)), model()
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=mesh)
    return sharded


def train_whole_and_sharded(cls: Any, seed: int | None = None, **options: Any) -> None:
    """One optimizer on a model in one piece and one on its shards learn the same. The noise is from torch's seed, or from
    generators."""
    networks = model(), sharded_model()
    generators = [None if seed is None else torch.Generator().manual_seed(seed) for _ in networks]
    optimizers = [
        cls(network.parameters(), lr=0.1, weight_decay=0.1, generator=generator, **options)
        for network, generator in zip(networks, generators, strict=True)
    ]
    for step, (x, y) in enumerate(batches(5)):
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            torch.manual_seed(step)
            optimizer.step()
    for a, b in zip(*(network.parameters() for network in networks), strict=True):
        assert b.to_local().numel() < a.numel()
        torch.testing.assert_close(b.full_tensor(), a.detach(), rtol=1e-12, atol=1e-14)


def check_shards(rank: int) -> None:
    for cls, scaling in ((upgd.UPGD, "global"), (upgd.UPGD, "local"), (upgd.AdaUPGD, "global")):
        train_whole_and_sharded(cls, sigma=0.0, scaling=scaling)
    for seed in (None, 7):
        train_whole_and_sharded(upgd.UPGD, seed, sigma=0.5)
        train_whole_and_sharded(upgd.PGD, seed, sigma=0.5, noise="anticorrelated")
    with pytest.raises(TypeError, match=r"'0.weight' is sharded over processes.*use the weight-wise optimizer\.$"):
        upgd.FeatureUPGD(sharded_model())


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")
def test_sharded_parameters_learn_as_whole_ones_do() -> None:
    in_processes(check_shards)


# -------------------------------------------------------------------------------------------------------------- copies


def average(tensor: Tensor | None) -> None:
    """As in docs/optimizers.md."""
    if tensor is not None:
        torch.distributed.all_reduce(tensor)
        tensor /= torch.distributed.get_world_size()


def final(rank: int | None, build: Callable[..., Any], **options: Any) -> list[Tensor]:
    """The parameters after some steps: of a process which has its share of each batch, or, for None, of one that has all.

    Gates and curvature are averaged over processes, as DistributedDataParallel does it with gradients.
    """
    network, criterion = model(), nn.CrossEntropyLoss()
    learner = network if rank is None else nn.parallel.DistributedDataParallel(network)
    curvature = upgd.HesScale(network, criterion) if options.pop("second", False) else None
    optimizer = build(network, curvature, **options)
    for x, y in batches(5):
        share = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        optimizer.zero_grad()
        criterion(learner(x[share]), y[share]).backward()
        if rank is not None:
            for feature in getattr(optimizer, "features", []):
                average(feature.grad)
                if curvature is not None:
                    average(curvature.feature_diagonal(feature.module))
            if curvature is not None and not hasattr(optimizer, "features"):
                for param in network.parameters():
                    average(curvature.diagonal(param))
        optimizer.step()
    return [param.detach() for param in network.parameters()]


def weights(network: nn.Module, curvature: Any, **options: Any) -> upgd.UPGD:
    return upgd.UPGD(network.parameters(), lr=0.1, curvature=curvature, **options)


def features(network: nn.Module, curvature: Any, **options: Any) -> upgd.FeatureUPGD:
    return upgd.FeatureUPGD(network, lr=0.1, curvature=curvature, **options)


def check_copies(rank: int) -> None:
    for build in (weights, features):
        for second in (False, True):
            ours, whole = (
                final(who, build, second=second, sigma=0.5, generator=torch.Generator().manual_seed(3))
                for who in (rank, None)
            )
            torch.testing.assert_close(ours, whole, rtol=1e-11, atol=1e-13)


def test_copies_with_one_seed_learn_as_one_process_does() -> None:
    in_processes(check_copies)
