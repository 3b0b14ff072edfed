"""Run a check in several processes of one process group."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed
import torch.multiprocessing

WORLD = 2
IMPORTED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "upgd.optim.from_method",
]


def in_processes(check: Callable[..., None], *args: Any, world: int = WORLD) -> None:
    """Run the check in processes of one process group, with the rank and the arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fork server with all imports starts processes much faster.
    multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(_join, (check, args, port, world), nprocs=world, start_method="forkserver")


def _join(rank: int, check: Callable[..., None], args: tuple[Any, ...], port: int, world: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    check(rank, *args)
    torch.distributed.destroy_process_group()
