"""Parameters sharded over processes by FSDP2: the global maximum and the norms reach across the shards."""

import os
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

import upgd

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def work(rank: int, world: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for cls, scaling in ((upgd.UPGD, "global"), (upgd.UPGD, "local"), (upgd.AdaUPGD, "global")):
        whole, sharded = model(), model()
        for part in (sharded[0], sharded[2], sharded):
            fully_shard(part, mesh=mesh)
        optimizers = [
            cls(m.parameters(), lr=0.1, sigma=0.0, scaling=scaling, weight_decay=0.1) for m in (whole, sharded)
        ]
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 3, (4,), generator=generator)
            for network, optimizer in zip((whole, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                optimizer.step()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert b.to_local().numel() < a.numel()
            torch.testing.assert_close(b.full_tensor(), a.detach(), rtol=1e-12, atol=1e-14)
    torch.distributed.destroy_process_group()


def test_sharded_parameters_learn_as_whole_ones_do() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (2, port), nprocs=2)
