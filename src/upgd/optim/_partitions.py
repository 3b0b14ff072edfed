"""Optimizers that hold only part of a model's parameters, while global scaling needs the largest utility of all of them.

If the other parts are in other processes and the process group is known, the maximum is reduced over it. If each parameter
has its own optimizer that steps during the backward pass, the other utilities are not known yet, which gives a warning or
an error.
"""

import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from upgd import rules
from upgd.optim._sharded import is_flattened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Peers(NamedTuple):
    """The processes that hold the other parts, and the device on which all of them reduce."""

    group: "ProcessGroup"
    device: torch.device


def largest_of(peers: Peers, maxima: list[Tensor]) -> Tensor:
    """Return the largest utility in any of the processes. All of them must call this, even without utilities."""
    # In 64 bits regardless of the parameters, because the dtypes of the processes must agree.
    nothing = torch.zeros((), dtype=torch.float64, device=peers.device)
    largest = rules.global_scale([nothing, *(m.to(nothing) for m in maxima)])
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=peers.group)
    return largest


def given(process_group: Any, params: list[Tensor]) -> Peers | None:
    """Return the peers of an optimizer with a process group."""
    if process_group is None:
        return None
    if not torch.distributed.is_available() or not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"process_group must be a process group of torch.distributed, but it is {process_group!r}; "
            "try torch.distributed.group.WORLD"
        )
    return Peers(process_group, params[0].device)


def check_flattened(optimizer: Optimizer, peers: Peers | None) -> None:
    """Raise an error or warn if the parameters are shards of ``FullyShardedDataParallel``, which have lost their shapes."""
    groups = [group for group in optimizer.param_groups if any(map(is_flattened, group["params"]))]
    if any(group["scaling"] == "local" for group in groups):
        raise ValueError(
            "scaling='local' compares the weights of a unit, and FullyShardedDataParallel flattens units; shard with "
            "torch.distributed.fsdp.fully_shard, or use scaling='global'"
        )
    if groups and peers is None:
        warnings.warn(
            "FullyShardedDataParallel leaves each process a part of the weights, and scaling='global' compares utilities "
            "within that part only; pass process_group=torch.distributed.group.WORLD, or shard with "
            "torch.distributed.fsdp.fully_shard.",
            stacklevel=4,
        )


_watching_zero = False


def watch_zero() -> None:
    """Set the peers of optimizers that a ``ZeroRedundancyOptimizer`` has created for its part.

    It does not pass on its process group, but a global torch hook sees every optimizer before its step.
    """
    global _watching_zero
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and not _watching_zero:
        register_optimizer_step_pre_hook(_introduce)
        _watching_zero = True


def _introduce(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        part = optimizer.optim
        if hasattr(part, "_peers"):
            part._peers = Peers(optimizer.process_group, optimizer.param_groups[0]["params"][0].device)
            part._places = {
                param: place
                for place, param in enumerate(p for group in optimizer.param_groups for p in group["params"])
            }


#: The backward pass during which an optimizer stepped last, and that optimizer.
_last_step: tuple[int, "weakref.ref[Optimizer]"] | None = None


def warn_if_one_of_several(optimizer: Optimizer) -> None:
    """Warn if a second optimizer steps with global scaling during one backward pass; raise an error if torch created them."""
    global _last_step
    backward = torch._C._current_graph_task_id()
    if backward < 0 or not any(group["scaling"] == "global" for group in optimizer.param_groups):
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(optimizer in getattr(param, "_in_backward_optimizers", ()) for param in params):
        name = type(optimizer).__name__
        raise RuntimeError(
            "scaling='global' compares the utilities of all parameters, which are not known while the backward pass steps "
            f"one parameter after the other; pass scaling='local', or let one {name} with all parameters step after "
            "backward()"
        )
    if _last_step is not None and _last_step[0] == backward and _last_step[1]() is not optimizer:
        name = type(optimizer).__name__
        warnings.warn(
            f"several {name} optimizers step during one backward pass, so scaling='global' compares utilities within "
            f"each of them only; pass scaling='local', or let one {name} with all parameters step after backward().",
            stacklevel=2,
        )
    _last_step = backward, weakref.ref(optimizer)
