"""Parameters that are sharded over processes: FSDP2, tensor parallelism, and other DTensors.

A step works on the local part of each tensor, as on any other tensor. Other processes are needed only for reductions
(:func:`across`, :func:`reduced_across`), which are combined into a few messages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from upgd import noise, rules
from upgd.methods.method import Reduction
from upgd.optim._phases import is_plain, utility_dtype


def is_sharded(param: Tensor) -> bool:
    """Whether this process holds only part of the parameter."""
    if is_plain(param) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # slow to import and needed only for sharded parameters

    return isinstance(param, DTensor)


def is_flattened(param: Tensor) -> bool:
    """Whether this is a flattened piece of a parameter, as in ``FullyShardedDataParallel``."""
    return bool(getattr(param, "_fsdp_flattened", False))  # torch's own mark


def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the local part of a tensor. ``like`` is the parameter, if the tensor may be sharded in another way."""
    if not is_sharded(tensor):
        return tensor
    placed: Any = tensor
    if like is not None and placed.placements != like.placements:  # type: ignore[attr-defined]
        placed = placed.redistribute(placed.device_mesh, like.placements)  # type: ignore[attr-defined]
    own: Any = placed.to_local()
    return own.wait() if hasattr(own, "wait") else own  # type: ignore[no-any-return]


def placed(own: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the given local part, sharded like a parameter."""
    if not is_sharded(like):
        return own
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def seeded_noise(param: Tensor, seed: int, step: float | Tensor, number: int) -> Tensor:
    """Return :func:`upgd.noise.parameter_normals` for the part of a parameter that this process has."""
    keys = noise.parameter_keys(
        seed, step if isinstance(step, Tensor) else int(step), number, device=local(param).device
    )
    return noise.parameter_normals_within(keys, *box(param), dtype=utility_dtype(param))


def box(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a parameter, and the offsets and the shape of the part that this process has."""
    shape = tuple(param.shape)
    if not is_sharded(param):
        return shape, (0,) * len(shape), shape
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(param, DTensor)
    # The same function tells torch.distributed.checkpoint where a shard belongs.
    size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return shape, tuple(offset), tuple(size)


def has_whole_rows(param: Tensor) -> bool:
    """Return whether the local part of a sharded parameter consists of whole rows, which are contiguous."""
    placements: Any = param.placements  # type: ignore[attr-defined]
    return all(placement.is_replicate() or getattr(placement, "dim", None) == 0 for placement in placements)


def first_entry(param: Tensor) -> int:
    """Return the index, in the whole parameter, of the first entry of a local part with whole rows."""
    if not is_sharded(param):
        return 0
    shape, offset, _ = box(param)
    return offset[0] * math.prod(shape[1:]) if shape else 0


def zeros_per_row(param: Tensor, columns: int) -> Tensor:
    """Return 32-bit zeros, ``columns`` for each row of a parameter, whose rows may be sharded."""
    rows = local(param).shape[0]
    own = torch.zeros(rows, columns, dtype=torch.float32, device=local(param).device)
    if not is_sharded(param):
        return own
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    if any(not placement.is_replicate() and placement.dim != 0 for placement in param.placements):  # type: ignore[attr-defined]
        raise ValueError(
            f"state_dtype=torch.uint8 has scales along rows, but a parameter of shape {tuple(param.shape)} is sharded "
            "within rows; use state_dtype=torch.bfloat16"
        )
    shape = torch.Size((param.shape[0], columns))
    return DTensor.from_local(
        own, param.device_mesh, param.placements, run_check=False, shape=shape, stride=(columns, 1)
    )


def across(partials: Sequence[Tensor], params: Sequence[Tensor], operation: str, over: str = "layer") -> list[Tensor]:
    """Reduce partial results of all processes.

    Args:
        partials: for each parameter a tensor of any shape that is the same in all processes.
        params: the parameters.
        operation: ``"max"``, where NaN counts as infinity, or ``"sum"``.
        over: ``"unit"`` where a partial result has a row for each unit, and units are not to be mixed.
    """
    results, together = list(partials), dict[Any, list[int]]()
    for i, param in enumerate(params):
        if is_sharded(param):
            mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
            dims = tuple(
                dim
                for dim, placement in enumerate(placements)
                if not placement.is_replicate() and (over != "unit" or param.ndim == 1 or placement.dim > 0)
            )
            together.setdefault((mesh, dims, partials[i].dtype), []).append(i)
    for (mesh, dims, _), members in together.items():
        flat = torch.cat([partials[i].flatten() for i in members])
        if operation == "max":
            flat = flat.nan_to_num(torch.inf, torch.inf, -torch.inf)
        for dim in dims:
            kind = torch.distributed.ReduceOp.MAX if operation == "max" else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(flat, kind, group=mesh.get_group(dim))
        for i, piece in zip(members, torch.split(flat, [partials[i].numel() for i in members]), strict=True):
            results[i] = piece.view(partials[i].shape)
    return results


def largest_across(keys: Tensor, params: Sequence[Tensor]) -> None:
    """Reduce maxima over the processes that hold parts of the same parameter, in place.

    Args:
        keys: integers of shape (reductions, parameters) that are ordered as the values are.
        params: the parameters.
    """
    together: dict[Any, list[int]] = {}
    for i, param in enumerate(params):
        if is_sharded(param):
            mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
            dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
            together.setdefault((mesh, dims), []).append(i)
    for (mesh, dims), members in together.items():
        every = len(members) == len(params)
        some = keys if every else torch.stack([keys[:, i] for i in members], 1)
        for dim in dims:
            torch.distributed.all_reduce(some, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
        if not every:
            for column, i in enumerate(members):
                keys[:, i].copy_(some[:, column])


def sum_across(values: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the sums, over the processes that hold parts of the same parameter, of one value for each parameter."""
    return torch.stack(across(list(values), params, "sum"))


def scales_of_units(utilities: Iterable[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Return :func:`upgd.rules.local_scale` of each parameter; this process holds part of it."""
    if not any(map(is_sharded, params)):
        return [rules.local_scale(utility) for utility in utilities]
    squares = across([_partial("norm", "unit", utility) for utility in utilities], params, "sum", "unit")
    return [square.sqrt().clamp(min=torch.finfo(square.dtype).tiny ** 0.5) for square in squares]


def reduced_across(
    reductions: Mapping[str, Reduction], observed: Mapping[str, Mapping[str, Tensor]], params: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """:func:`upgd.methods.reductions.reduced` where this process has parts of the parameters, by the same names."""
    results: dict[str, dict[str, Tensor]] = {of: {} for of in observed}
    owners = [params[of] for of in observed]
    for name, (operation, over) in reductions.items():
        values = [own[name] for own in observed.values()]
        kind = "max" if operation == "max" else "sum"
        whole = across([_partial(operation, over, value) for value in values], owners, kind, over)
        if over == "learner":
            device = whole[0].device
            gathered = torch.stack([one.to(device) for one in whole])
            overall = rules.largest(gathered.unbind()) if operation == "max" else gathered.sum()
            count = sum(param.numel() for param in owners)
            whole = [_finished(operation, overall, count).to(value) for value in values]
        else:
            counts = [
                param.shape[1:].numel() if over == "unit" and param.ndim > 1 else param.numel() for param in owners
            ]
            whole = [_finished(operation, one, count) for one, count in zip(whole, counts, strict=True)]
        for of, one in zip(observed, whole, strict=True):
            results[of][name] = one
    return results


def _partial(operation: str, over: str, value: Tensor) -> Tensor:
    """Return the partial result of one part: its maximum, its sum, or its sum of squares."""
    dims = tuple(range(1 if over == "unit" and value.ndim > 1 else 0, value.ndim))
    if operation == "max":
        if any(value.shape[dim] == 0 for dim in dims):
            value = value.new_full([1 if dim in dims else length for dim, length in enumerate(value.shape)], -torch.inf)
        return value.amax(dims, keepdim=over != "learner")
    if operation == "norm":
        value = value**2
    return value.sum(dims, keepdim=over != "learner") if dims else value


def _finished(operation: str, result: Tensor, count: int) -> Tensor:
    if operation == "norm":
        return result.sqrt()
    return result / count if operation == "mean" else result
