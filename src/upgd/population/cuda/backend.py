"""The kernel backend on a GPU: one learner per cluster of multiprocessors, on chip for a whole block of steps."""

import ctypes
import functools
from collections.abc import Mapping
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upgd.population.backend import Group, Kind, Loss, Tally
from upgd.population.cuda import compiler, driver
from upgd.population.cuda.network import dense_layers
from upgd.population.cuda.planner import CLUSTERS, THREADS, ChipPlan, Dense, fastest, plan, source
from upgd.population.cuda.schedule import schedule
from upgd.streams.contract import Chunk

__all__ = ["CudaBackend", "missing", "unsupported"]

#: Clusters of thread blocks came with this compute capability (Hopper).
_CAPABILITY = (9, 0)
_LAYERS = 12

_PARTS = ("basics.cuh", "tiles.cuh", "network.cuh", "rule.cuh", "onchip.cu")

#: ``Settings`` of basics.cuh.
_SETTINGS = np.dtype(
    [
        *((name, np.float32) for name in ("lr_c", "decay", "noise", "beta", "rest", "p", "q")),
        ("row", np.int32),
        ("seed", np.int64),
    ]
)


def _pointers(names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class _Arguments(ctypes.Structure):
    """``Arguments`` of basics.cuh."""

    _fields_ = (
        *_pointers("parameters utilities scales settings segments begins told"),
        ("telling", ctypes.c_int),
        *_pointers("source index permutation task pixel dense targets loss correct diverged_at"),
        ("start", ctypes.c_longlong),
        ("length", ctypes.c_int),
        ("tasks", ctypes.c_int),
    )


def unsupported(network: nn.Module, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run this, to be read after "because"; ``None`` if it can."""
    if device.type != "cuda":
        return f"it runs on a CUDA device, not on {device}"
    if kind.rule not in ("plain", "utility") or kind.granularity == "feature" or kind.order == 2:
        return "it runs the weight-wise first-order methods alone"
    if not kind.is_common:
        return "it neither normalizes inputs nor gates single layers"
    if dtype != torch.float32:
        return f"it computes in torch.float32, not in {dtype}"
    layers = dense_layers(network)
    if isinstance(layers, str):
        return layers
    if reason := missing(device):
        return reason
    if len(layers) > _LAYERS or layers[-1].outputs > THREADS:
        return f"it runs up to {_LAYERS} layers and {THREADS} outputs"
    if not _plans(tuple(layers), kind, _indexed(device)):
        numbers = sum(d.inputs * d.outputs for d in layers) * (2 if kind.rule == "utility" else 1)
        return f"a learner, {4 * numbers / 1e6:.1f} MB, does not fit on {max(CLUSTERS)} multiprocessors"
    return None


def missing(device: torch.device) -> str | None:
    """Why the kernel cannot run any learner on this CUDA device; ``None`` if it can."""
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"it needs compute capability 9.0 (Hopper), and {torch.cuda.get_device_name(device)} has less"
    return compiler.missing()


class CudaBackend:
    """See :class:`upgd.population.backend.Backend`.

    Utilities are kept as u / scale (see onchip.cu); the scales are 1 again at every 100th step, so a state that is saved
    there goes on bit for bit.
    """

    fills_device = True

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if reason := unsupported(network, group.kind, device, dtype):
            raise ValueError(f"the kernel cannot run this, because {reason}")
        layers = dense_layers(network)
        assert not isinstance(layers, str)
        self._device = _indexed(device)
        self._plan = fastest(_plans(tuple(layers), group.kind, self._device))
        self._shapes = {name: p.shape for name, p in network.named_parameters()}
        self._parameters = torch.empty(len(group), self._plan.parameters, device=self._device)
        for name, view in self._views(self._parameters).items():
            view.copy_(parameters[name])
        self._utilities = torch.zeros_like(self._parameters) if group.kind.rule == "utility" else None
        self._scales = torch.ones(len(group), device=self._device)
        self._settings = torch.from_numpy(_settings(group).view(np.uint8)).to(self._device)
        self._told = torch.zeros(len(group), dtype=torch.int32, device=self._device)
        self._telling = 0

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and add to the tally."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            kernel = _kernel(self._plan, loss, chunk.index is not None, self._device)
            segments, begins = _schedule(len(self._parameters), chunk.length, kernel.active, self._device)
            self._telling += 1
            tensors = {
                "parameters": self._parameters,
                "utilities": self._utilities,
                "scales": self._scales,
                "settings": self._settings,
                "segments": segments,
                "begins": begins,
                "told": self._told,
                "pixel": _pixels(chunk.white, self._device),
                "source": chunk.source,
                "index": chunk.index,
                "permutation": chunk.permutation,
                "task": chunk.task,
                "dense": chunk.dense,
                "targets": chunk.targets,
                "loss": tally.loss,
                "correct": tally.correct,
                "diverged_at": tally.diverged_at,
            }
            # Types, shapes and ranges of what the stream gave have been checked when it was asked.
            kept = {name: t.contiguous() for name, t in tensors.items() if t is not None}
            arguments = _Arguments(
                telling=self._telling,
                start=chunk.start,
                length=chunk.length,
                tasks=1 if chunk.permutation is None else chunk.permutation.shape[1],
                **{name: t.data_ptr() for name, t in kept.items()},
            )
            kernel.launch(len(begins) - 1, arguments, stream.cuda_stream)

    def parameters(self) -> dict[str, Tensor]:
        """The learners' parameters now."""
        return self._views(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on; the names are those of the interface."""
        state = {f"parameters.{name}": view.clone() for name, view in self._views(self._parameters).items()}
        if self._utilities is not None:
            utilities = self._utilities * self._scales.unsqueeze(1)
            state |= {f"utility.{name}": view for name, view in self._views(utilities).items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        for part, tensor in (("parameters", self._parameters), ("utility", self._utilities)):
            if tensor is not None:
                for name, view in self._views(tensor).items():
                    view.copy_(state[f"{part}.{name}"])
        self._scales.fill_(1)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """One vector per learner, taken apart into parameters."""
        pieces = torch.split(flat, [shape.numel() for shape in self._shapes.values()], 1)
        return {
            name: piece.view(len(flat), *shape)
            for piece, (name, shape) in zip(pieces, self._shapes.items(), strict=True)
        }


@functools.cache
def _kernel(chosen: ChipPlan, loss: Loss, indexed: bool, device: torch.device) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    code = compiler.compiled(_text(chosen, loss, indexed), f"sm_{major}{minor}")
    return driver.Kernel(code, b"advance", chosen.cluster, THREADS, chosen.shared_bytes)


def _text(chosen: ChipPlan, loss: Loss, indexed: bool) -> str:
    return source(chosen, loss, indexed, template())


def template() -> str:
    """The kernel's text, without the constants in front."""
    folder = resources.files("upgd.population.cuda")
    return "\n".join(folder.joinpath(part).read_text(encoding="utf-8") for part in _PARTS)


@functools.cache
def _plans(layers: tuple[Dense, ...], kind: Kind, device: torch.device) -> tuple[tuple[ChipPlan, int], ...]:
    """The cluster sizes that would do, with the number of clusters that the device runs at once."""
    limit = driver.shared_bytes(device)
    plans = [p for cluster in CLUSTERS if (p := plan(layers, kind, cluster, limit))]
    active = [(p, driver.active_clusters(device, p.cluster, THREADS, p.shared_bytes)) for p in plans]
    return tuple((p, count) for p, count in active if count)


@functools.lru_cache(maxsize=64)
def _schedule(learners: int, steps: int, clusters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Remembered on the device: putting it there would have to wait for the kernels before."""
    segments, begins = schedule(learners, steps, clusters)
    return torch.from_numpy(segments).to(device), torch.from_numpy(begins).to(device)


@functools.cache
def _pixels(white: int, device: torch.device) -> Tensor:
    """What a byte of an image means; rounded as in :meth:`upgd.streams.Chunk.inputs`."""
    values = torch.arange(256, dtype=torch.float32).mul_(2).sub_(white).div_(torch.tensor(float(white)))
    return values.to(device)


def _settings(group: Group) -> NDArray[np.void]:
    made = np.zeros(len(group), _SETTINGS)
    lr, wd, sigma, beta, p, q = (
        group.value(name).numpy() for name in ("lr", "weight_decay", "sigma", "beta_utility", "p", "q")
    )
    made["lr_c"] = lr * group.value("c", 1.0).numpy()
    made["decay"] = lr * wd
    made["noise"] = 2 * np.log(2) * (lr * sigma) ** 2
    made["beta"], made["rest"] = beta, 1 - beta
    made["p"], made["q"] = p, q
    made["row"], made["seed"] = group.rows.numpy(), group.seeds.numpy()
    return made


def _indexed(device: torch.device) -> torch.device:
    """The device with its number, so that caches know it."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
