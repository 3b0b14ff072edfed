"""Shared noise of several processes: replicas of a model under DistributedDataParallel must draw the same noise, or they
drift apart, and shards of a parameter draw theirs from one seed."""

import gc
import hashlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from upgd.optim._sharded import is_sharded


class ReplicaNoise:
    """The generators shared by all replicas, created when the first noise is drawn.

    All processes then use the seed of the first one. Each advances its global generator by one number and draws all noise
    from the optimizer's own generator. A generator passed by the user is not changed, but compared.
    """

    def __init__(self) -> None:
        self._asked = False
        self._seed: int | None = None
        self._shared: dict[torch.device, torch.Generator] = {}

    def generator(self, optimizer: Optimizer, device: torch.device, given: torch.Generator | None) -> Any:
        """Return the generator for noise on a device; None means torch's global one."""
        if not self._asked and not torch.compiler.is_compiling():
            self._asked = True
            self._agree(optimizer, given)
        if given is not None or self._seed is None:
            return given
        if device not in self._shared:
            self._shared[device] = torch.Generator(device).manual_seed(self._seed)
        return self._shared[device]

    def _agree(self, optimizer: Optimizer, given: torch.Generator | None) -> None:
        if any(group["capturable"] for group in optimizer.param_groups):
            return  # a CUDA graph records the global generator only
        params = [param for group in optimizer.param_groups for param in group["params"]]
        group = _group_of_replicas(optimizer, params)
        if group is None or torch.distributed.get_world_size(group) == 1:
            return
        own = int(torch.empty((), dtype=torch.int64).random_()) if given is None else _fingerprint(given)
        first = torch.tensor(own, device=params[0].device)
        torch.distributed.broadcast(first, torch.distributed.get_global_rank(group, 0), group=group)
        if given is None:
            self._seed = int(first)
        elif own != int(first):
            warnings.warn(
                f"generator of {type(optimizer).__name__} has another state than in the first process of "
                "DistributedDataParallel, so the replicas of the model drift apart; seed it equally in all processes, or "
                "leave generator out.",
                stacklevel=2,
            )


def of_the_first(optimizer: Optimizer, number: int) -> int:
    """Return the number of the first process among those with shards, replicas or other partitions of the parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return number
    params = [param for group in optimizer.param_groups for param in group["params"]]
    meshes = [param.device_mesh for param in params if is_sharded(param)]
    peers = getattr(optimizer, "_peers", None)
    if peers is not None:
        groups, device = [peers.group], peers.device
    elif meshes:
        mesh = max(meshes, key=lambda mesh: int(mesh.size()))
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        device = torch.device(mesh.device_type)
    else:
        groups, device = [_group_of_replicas(optimizer, params)], params[0].device
    first = torch.tensor(number, device=device)
    for group in groups:
        if group is not None and torch.distributed.get_world_size(group) > 1:
            torch.distributed.broadcast(first, torch.distributed.get_global_rank(group, 0), group=group)
    return int(first)


def _fingerprint(generator: torch.Generator) -> int:
    """Return 63 bits of a hash of the generator's state."""
    state = generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(state).digest()[:8], "big") >> 1


def _group_of_replicas(optimizer: Optimizer, params: list[Tensor]) -> Any:
    """Return the process group of the DistributedDataParallel with these parameters, or None.

    Parameters do not refer to their replicas, so this searches all objects, once per optimizer. A part of a
    ``ZeroRedundancyOptimizer`` is updated in one process only, and has no replicas.
    """
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    own, group = set(params), None
    for candidate in gc.get_objects():
        kind = type(candidate)  # not isinstance, which would trigger lazy proxies
        if zero is not None and issubclass(kind, zero.ZeroRedundancyOptimizer) and candidate.optim is optimizer:
            return None
        if issubclass(kind, torch.nn.parallel.DistributedDataParallel) and not own.isdisjoint(candidate.parameters()):
            group = candidate.process_group
    return group
