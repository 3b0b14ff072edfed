"""Selection of the backend for a group of learners."""

import importlib
import logging
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import nn

from upgd.methods.deriving import TorchMethod
from upgd.population import torch_backend
from upgd.population.backend import Backend, Group
from upgd.population.chain import Chain
from upgd.population.graphed import GraphedBackend
from upgd.population.optimizer_backend import OptimizerBackend
from upgd.population.separate import check_separate

__all__ = ["BackendChoice", "BackendName", "choose", "mute_slow_backend", "say_slow_backend"]

log = logging.getLogger("upgd.population")

BackendName = Literal["auto", "torch", "kernel"]
#: The name of a built-in backend, or a class with the interface of :class:`upgd.population.backend.Backend`.
BackendChoice: TypeAlias = BackendName | type[Backend]


def choose(
    wanted: BackendChoice, network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[str, type[Backend]]:
    """Return the name and the class of the backend.

    ``"auto"`` selects a kernel if one applies; otherwise, the reason is logged (``upgd.population``, level info). Methods
    whose steps are computed by a torch optimizer have their own backend. A custom class is used without further checks; it
    may define a static method ``unsupported(network, group, device, dtype)`` that returns why it cannot run a group,
    or None.
    """
    if isinstance(wanted, type):
        unsupported = getattr(wanted, "unsupported", None)
        if unsupported is not None and (reason := unsupported(network, group, device, dtype)):
            raise ValueError(f"backend={wanted.__name__} cannot be used, because {reason}")
        return wanted.__name__, wanted
    if wanted not in ("auto", "torch", "kernel"):
        raise ValueError(f"backend must be 'auto', 'torch', 'kernel' or a class, not {wanted!r}")
    if isinstance(group.method, TorchMethod):
        if wanted == "kernel":
            raise ValueError(
                f"backend='kernel' cannot be used, because {group.method.name} runs torch's "
                f"{group.method.optimizer_class.__name__}; use backend='auto' or 'torch'"
            )
        return "optimizer", OptimizerBackend
    if reason := torch_backend.unsupported(network, group, device, dtype):
        raise ValueError(f"network cannot be used with these learners, because {reason}")
    check_separate(group)
    if wanted == "torch":
        return "torch", _torch(device)
    missing = False
    try:
        kernel, reason = _kernel(network, group, device, dtype)
    except ImportError as error:  # numba also rejects unsupported versions of numpy
        missing, kernel = True, None
        what = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        reason = f"{what} (run pip install 'upgd[run]')"
    if kernel is not None:
        return "kernel", kernel
    if wanted == "kernel":
        raise ValueError(f"backend='kernel' cannot be used, because {reason}; use backend='auto' or 'torch'")
    log.info("backend 'torch' for %s (%s), because %s", group.method.name, group.kind, reason)
    if missing and Chain.unsupported(network) is None:
        say_slow_backend(reason)
    return "torch", _torch(device)


@cache
def say_slow_backend(reason: str) -> None:
    """Warn once if installing a package would make the learners many times faster."""
    log.warning("upgd: learners run on the torch backend, many times slower than compiled loops, because %s", reason)


def mute_slow_backend() -> None:
    """Disable the warning in a process whose parent or siblings give it."""
    log.addFilter(lambda record: record.levelno != logging.WARNING)


def _torch(device: torch.device) -> type[Backend]:
    """Return the torch backend; on a GPU, the one with CUDA graphs."""
    return GraphedBackend if device.type == "cuda" else torch_backend.TorchBackend


def _kernel(
    network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[type[Backend] | None, str | None]:
    """Return the class, or the reason why there is none. On the CPU, a rule without a hand-written kernel is compiled."""
    on_gpu = device.type == "cuda"
    module = importlib.import_module(f"upgd.population.{'cuda' if on_gpu else 'kernel'}")
    if reason := module.unsupported(network, group, device, dtype):
        return None, reason
    if on_gpu:
        return module.CudaBackend, None
    return module.KernelBackend if module.by_hand(group.kind) else module.GeneratedBackend, None
