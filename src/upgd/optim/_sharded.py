"""Parameters that are sharded over processes: FSDP2's, and whatever else is a DTensor."""

from typing import cast

import torch
from torch import Tensor

from upgd import noise
from upgd.optim._phases import is_plain


def is_sharded(param: Tensor) -> bool:
    """Whether this process holds only its part of the parameter."""
    if is_plain(param) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and only those who shard need it

    return isinstance(param, DTensor)


def is_flattened(param: Tensor) -> bool:
    """Whether this is what ``FullyShardedDataParallel`` leaves a process of a parameter: a piece without its shape."""
    return bool(getattr(param, "_fsdp_flattened", False))  # torch's own mark


def white_like(param: Tensor, generator: torch.Generator | None) -> Tensor:
    """White noise for a sharded parameter, sharded in the same way.

    On a GPU torch draws each shard's part of one stream. On the CPU it would give every shard the same noise, and a
    generator it would ignore; there each process draws the noise of the whole parameter and keeps its part. With the same
    seed in all processes the noise is then that of the parameter in one piece.
    """
    from torch.distributed.tensor import DTensor, Replicate

    out = cast(DTensor, torch.empty_like(param, memory_format=torch.preserve_format))
    if generator is None and param.device.type != "cpu":
        return noise.white_(out)
    whole = noise.white_(torch.empty(param.shape, dtype=param.dtype, device=param.device), generator)
    everywhere = DTensor.from_local(whole, out.device_mesh, [Replicate()] * out.device_mesh.ndim, run_check=False)
    # A copy, because a slice would keep the whole in memory.
    return out.copy_(everywhere.redistribute(out.device_mesh, out.placements))
