"""Parameters that are sharded over processes: FSDP2's, and whatever else is a DTensor."""

import torch
from torch import Tensor

from upgd import noise
from upgd.optim._phases import is_plain, utility_dtype


def is_sharded(param: Tensor) -> bool:
    """Whether this process holds only its part of the parameter."""
    if is_plain(param) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and only those who shard need it

    return isinstance(param, DTensor)


def is_flattened(param: Tensor) -> bool:
    """Whether this is what ``FullyShardedDataParallel`` leaves a process of a parameter: a piece without its shape."""
    return bool(getattr(param, "_fsdp_flattened", False))  # torch's own mark


def seeded_like(param: Tensor, seed: int, step: float | Tensor, number: int) -> Tensor:
    """:func:`upgd.noise.parameter_normals` for a parameter, sharded as the parameter is: a process makes its part only."""
    step = step.long() if isinstance(step, Tensor) else int(step)
    dtype = utility_dtype(param)
    if not is_sharded(param):
        drawn = noise.parameter_normals(seed, step, number, 0, param.numel(), dtype=dtype, device=param.device)
        return drawn.view(param.shape)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    # The same function tells torch.distributed.checkpoint where a shard belongs.
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    keys = noise.parameter_keys(seed, step, number, device=param.to_local().device)
    local = noise.parameter_normals_within(keys, tuple(param.shape), offset, shape, dtype=dtype)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
