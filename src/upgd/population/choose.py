"""Which backend runs a group of learners."""

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

__all__ = ["BackendChoice", "BackendName", "choose", "mute_slow_backend", "say_slow_backend"]

log = logging.getLogger("upgd.population")

BackendName = Literal["auto", "torch", "kernel"]
#: One of ours by name, or a class of the form of :class:`upgd.population.backend.Backend`.
BackendChoice: TypeAlias = BackendName | type[Backend]


def choose(
    wanted: BackendChoice, network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[str, type[Backend]]:
    """The name and the class of the backend.

    ``"auto"`` takes the kernel where it applies, and says in the log (``upgd.population``, level info) why where it does not.
    Methods whose steps a torch optimizer takes have a backend of their own. A class of one's own is taken as it is; it may
    have a static method ``unsupported(network, group, device, dtype)`` that gives the reason why it cannot run something, or
    None.
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
                f"backend='kernel' cannot be used, because the steps of {group.method.name} are those of torch's "
                f"{group.method.optimizer_class.__name__}; use backend='auto' or 'torch'"
            )
        return "optimizer", OptimizerBackend
    if reason := torch_backend.unsupported(network, group, device, dtype):
        raise ValueError(f"network cannot be used with these learners, because {reason}")
    if wanted == "torch":
        return "torch", _torch(device)
    missing = False
    try:
        kernel, reason = _kernel(network, group, device, dtype)
    except ImportError as error:  # numba also refuses versions of numpy that it does not know
        missing, kernel = True, None
        what = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        reason = f"{what} (pip install 'upgd[run]' brings what is needed)"
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
    """Warn, once, where installing a package would make everything many times faster."""
    log.warning("upgd: learners run on the torch backend, many times slower than compiled loops, because %s", reason)


def mute_slow_backend() -> None:
    """In a process beside others, one of which has said it."""
    log.addFilter(lambda record: record.levelno != logging.WARNING)


def _torch(device: torch.device) -> type[Backend]:
    """The torch backend; on a GPU under CUDA graphs."""
    return GraphedBackend if device.type == "cuda" else torch_backend.TorchBackend


def _kernel(
    network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[type[Backend] | None, str | None]:
    """The class, or the reason why not. On the CPU, a rule without a kernel written by hand gets a generated one."""
    where = "cuda" if device.type == "cuda" else "kernel"
    module = importlib.import_module(f"upgd.population.{where}")
    if where == "cuda":
        reason = module.unsupported(network, group, device, dtype)
        return (None, reason) if reason else (module.CudaBackend, None)
    if group.kind.rule not in module.BY_HAND:
        reason = module.cannot_generate(network, group, device, dtype)
        return (None, reason) if reason else (module.GeneratedBackend, None)
    if reason := module.unsupported(network, group.kind, device, dtype):
        return None, reason
    return module.KernelBackend, None
