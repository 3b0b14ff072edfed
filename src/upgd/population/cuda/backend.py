"""The kernel backend on a GPU: one learner per cluster of multiprocessors, kept on chip for a whole block of steps."""

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upgd.methods.tracing import CannotTrace
from upgd.population.backend import Group, Kind, Loss, Tally, finite_learners
from upgd.population.cuda import compiler, convolutional, driver
from upgd.population.cuda.ahead import Ahead
from upgd.population.cuda.convolutional import Stage, StagePlan
from upgd.population.cuda.generated import program, scalars
from upgd.population.cuda.network import dense_layers
from upgd.population.cuda.planner import CLUSTERS, THREADS, ChipPlan, Dense, Program, fastest, plan
from upgd.population.cuda.schedule import schedule
from upgd.population.cuda.source import source
from upgd.population.shares import Need, laid
from upgd.streams.contract import Chunk

__all__ = ["CudaBackend", "missing", "unsupported"]

#: Compute capability (Hopper) that introduced clusters of thread blocks.
_CAPABILITY = (9, 0)
_LAYERS = 12

#: Of an MLP, or of a network that begins with convolutions.
Layers: TypeAlias = tuple[Dense, ...] | tuple[Stage, ...]
Plan: TypeAlias = ChipPlan | StagePlan

_NORMALIZER = ("mean", "variance")
#: The files of the kernel.
_PARTS = (
    "machine.cuh",
    "basics.cuh",
    "judge.cuh",
    "joins.cuh",
    "tiles.cuh",
    "network.cuh",
    "rule.cuh",
    "by_hand.cuh",
    "generated.cuh",
    "resets.cuh",
    "onchip.cu",
    "convolution.cuh",
    "rows.cuh",
    "convolution.cu",
)

#: ``Settings`` of basics.cuh.
_SETTINGS = np.dtype(
    [
        *((name, np.float32) for name in ("lr_c", "decay", "noise", "beta", "rest", "p", "q")),
        ("row", np.int32),
        ("seed", np.int64),
        ("rate", np.float64),
    ]
)


def _pointers(names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class _Arguments(ctypes.Structure):
    """``Arguments`` of basics.cuh."""

    _fields_ = (
        *_pointers("far words scales scalars units inputs settings segments begins told"),
        ("telling", ctypes.c_int),
        *_pointers("source index permutation task pixel dense targets loss correct diverged_at"),
        ("start", ctypes.c_longlong),
        ("length", ctypes.c_int),
        ("tasks", ctypes.c_int),
    )


def unsupported(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run this, worded to follow "because"; ``None`` if it can."""
    if device.type != "cuda":
        return f"it runs on a CUDA device, not on {device}"
    if dtype != torch.float32:
        return f"it computes in torch.float32, not in {dtype}"
    try:
        program = _program(group, _convolutional(network))
    except CannotTrace as why:
        return f"no kernel can be generated for {group.method.name}: {why}"
    layers = _layers(network, group.kind.gated)
    if isinstance(layers, str):
        return layers
    if _convolutional(network) and hasattr(group.method, "reset_units"):
        return f"{group.method.name} resets hidden units, which it supports only without convolutions"
    if reason := missing(device):
        return reason
    if len(layers) > _LAYERS or layers[-1].outputs > THREADS:
        return f"it supports up to {_LAYERS} layers and {THREADS} outputs"
    if not _plans(layers, group.kind, program, _indexed(device)):
        words = 1 + len(group.method.state)
        numbers = words * sum(d.inputs * d.outputs for d in layers)
        most = max(CLUSTERS if isinstance(layers[0], Dense) else convolutional.CLUSTERS)
        return f"a learner, {4 * numbers / 1e6:.1f} MB, does not fit on {most} multiprocessors"
    return None


def _convolutional(network: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in network.modules())


def _layers(network: nn.Module, gated: str) -> Layers | str:
    """Return the layers for the planner, or why there are none, worded to follow "because"."""
    if _convolutional(network):
        stages = convolutional.stages(network, gated)
        return stages if isinstance(stages, str) else tuple(stages)
    layers = dense_layers(network, gated)
    return layers if isinstance(layers, str) else tuple(layers)


def _program(group: Group, convolutional: bool = False) -> Program | None:
    """Return the generated rule; ``None`` if there is a hand-written kernel."""
    kind = group.kind
    by_weight = kind.granularity == "weight" and kind.order == 1 and not kind.others
    by_hand = kind.rule in ("plain", "utility") and by_weight and not convolutional
    return None if by_hand else program(group.method)


def missing(device: torch.device) -> str | None:
    """Return why the kernel cannot run any learner on this CUDA device; ``None`` if it can."""
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"it needs compute capability 9.0 (Hopper), but {torch.cuda.get_device_name(device)} has less"
    return compiler.missing()


class Block:
    """The steps of a block, ready to be started cluster by cluster; must be kept until they are done.

    Args:
        kernel, arguments: what to launch.
        clusters: the number of clusters in the schedule.
        far: the number of floats of each cluster in global memory.
        device: the GPU.
        kept: the tensors whose addresses are among the arguments.
    """

    def __init__(
        self,
        kernel: driver.Kernel,
        arguments: _Arguments,
        clusters: int,
        far: int,
        device: torch.device,
        kept: Mapping[str, Tensor],
    ) -> None:
        self._kernel, self._arguments, self._far, self._device, self._kept = kernel, arguments, far, device, kept
        self.clusters = clusters

    def start(self, first: int, stop: int) -> None:
        """Start some of the clusters on the current stream."""
        if first == stop:
            return
        arguments = _Arguments.from_buffer_copy(self._arguments)
        arguments.begins += 4 * first
        arguments.far = (arguments.far or 0) + 4 * first * self._far
        with torch.cuda.device(self._device):
            self._kernel.launch(stop - first, arguments, torch.cuda.current_stream().cuda_stream)


class CudaBackend:
    """See :class:`upgd.population.backend.Backend`.

    Utilities are stored as u / scale (see onchip.cu). The scales are reset to 1 at every 100th step, so resuming from a state
    saved there is bitwise exact.
    """

    fills_device = True
    #: Which learners have not diverged, on the host; None to ask the tally, which waits for the GPU.
    alive: Tensor | None = None

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if reason := unsupported(network, group, device, dtype):
            raise ValueError(f"the kernel cannot run this, because {reason}")
        layers = _layers(network, group.kind.gated)
        assert not isinstance(layers, str)
        self._device = _indexed(device)
        program = _program(group, _convolutional(network))
        self._plan = fastest(_plans(layers, group.kind, program, self._device))
        self.cost, self.size = self._plan.cycles, self._plan.cluster
        self.room = dict(_plans(layers, group.kind, program, self._device))[self._plan]
        values = {name: value.to(self._device).unsqueeze(1) for name, value in group.values.items()}
        self._ahead = None if program is None else Ahead(scalars(group.method), values, len(group), self._device)
        self._shapes = {name: p.shape for name, p in network.named_parameters()}
        #: The names of all words of an entry except the first.
        self._state_names = tuple(group.method.state)
        learners, made = len(group), self._plan
        self._words = torch.zeros(learners, made.words, made.parameters, device=self._device)
        for name, view in self._views(self._words[:, 0]).items():
            view.copy_(parameters[name])
        for number, begins_as in enumerate(group.method.state.values(), 1):
            if begins_as == "parameter":
                self._words[:, number] = self._words[:, 0]
        self._far = torch.empty(0, device=self._device)
        self._scales = torch.ones(learners, device=self._device)
        self._unit_names = tuple(group.method.unit_state)
        self._of_layers = tuple(begins_as == "layer" for begins_as in group.method.unit_state.values())
        self._units = torch.zeros(learners, len(self._unit_names), made.hidden, device=self._device)
        first = layers[0]
        inputs = first.inputs if isinstance(first, Dense) else first.channels * first.sides[0] * first.sides[1]
        self._inputs = torch.zeros(learners, 2, inputs, device=self._device)
        self._inputs[:, 1] = 1
        self._input_shape: torch.Size | None = None  #: known after the first sample
        self._settings = torch.from_numpy(_settings(group).view(np.uint8)).to(self._device)
        self._told = torch.zeros(len(group), dtype=torch.int32, device=self._device)
        self._telling = 0

    def prepare(self, chunk: Chunk, loss: Loss) -> None:
        """Compile the kernel for such a chunk, unless it is cached on disk. Safe to call in any thread."""
        _code(self._plan, loss, chunk.index is not None, self._device)

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""
        block = self.ready(chunk, loss, tally)
        block.start(0, block.clusters)

    def ready(self, chunk: Chunk, loss: Loss, tally: Tally, pieces: Sequence[int] | None = None) -> Block:
        """Prepare what :meth:`advance` computes, without starting it. By default, it uses all clusters.

        See :func:`.schedule` for the pieces.
        """
        with torch.cuda.device(self._device):
            kernel = _kernel(self._plan, loss, chunk.index is not None, self._device)
            # The kernel skips diverged learners, but in the schedule they would keep clusters from the others.
            alive = (tally.diverged_at < 0).cpu() if self.alive is None else self.alive
            rows = np.flatnonzero(alive.numpy()).astype(np.int32)
            if pieces is None:
                ((pieces, _),) = laid([Need(len(rows), 1.0, kernel.active)], kernel.active, chunk.length)
            segments, begins = _schedule(rows.tobytes(), chunk.length, tuple(pieces), self._device)
            self._telling += 1
            self._input_shape = _input_shape(chunk)
            far = len(pieces) * self._plan.cluster * self._plan.far_floats
            if self._far.numel() < far:
                self._far = torch.empty(far, device=self._device)
            tensors = {
                "far": self._far,
                "words": self._words,
                "scales": self._scales,
                "scalars": None if self._ahead is None else self._ahead.table(chunk.start, chunk.length),
                "units": self._units,
                "inputs": self._inputs,
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
            # The engine has checked types, shapes and ranges of the chunk.
            kept = {name: t.contiguous() for name, t in tensors.items() if t is not None}
            arguments = _Arguments(
                telling=self._telling,
                start=chunk.start,
                length=chunk.length,
                tasks=1 if chunk.permutation is None else chunk.permutation.shape[1],
                **{name: t.data_ptr() for name, t in kept.items()},
            )
            return Block(kernel, arguments, len(pieces), self._plan.cluster * self._plan.far_floats, self._device, kept)

    def parameters(self) -> dict[str, Tensor]:
        """Return the learners' current parameters."""
        return self._views(self._words[:, 0])

    def finite(self) -> Tensor:
        """Return whether all parameters of each learner are finite; called after every window, which may be short."""
        return finite_learners(self._words[:, 0])

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume; the names are those of the interface."""
        parts = ("parameters", *self._state_names)
        state = {
            f"{part}.{name}": view.clone()
            for number, part in enumerate(parts)
            for name, view in self._views(self._word(number)).items()
        }
        for number, part in enumerate(self._unit_names):
            state |= {f"{part}.{name}": view.clone() for name, view in self._unit_views(number).items()}
        if self._plan.kind.normalize and self._input_shape is not None:
            for n, name in enumerate(_NORMALIZER):
                state[f"normalizer.{name}"] = self._inputs[:, n].reshape(-1, *self._input_shape).clone()
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        for number, part in enumerate(("parameters", *self._state_names)):
            for name, view in self._views(self._words[:, number]).items():
                view.copy_(state[f"{part}.{name}"])
        for number, part in enumerate(self._unit_names):
            for name, view in self._unit_views(number).items():
                view.copy_(state[f"{part}.{name}"])
        for n, name in enumerate(_NORMALIZER):
            if f"normalizer.{name}" in state:
                self._input_shape = state[f"normalizer.{name}"].shape[1:]
                self._inputs[:, n] = state[f"normalizer.{name}"].flatten(1).to(self._inputs)
        self._scales.fill_(1)

    def _word(self, number: int) -> Tensor:
        """Return a word of all entries; in hand-written kernels, utilities are stored as u / scale."""
        word = self._words[:, number]
        return word * self._scales.unsqueeze(1) if number and self._plan.program is None else word

    def _unit_views(self, number: int) -> dict[str, Tensor]:
        """Return a number of every hidden unit, or of every layer, by incoming weight."""
        weights = [name for name, shape in self._shapes.items() if len(shape) > 1][:-1]
        pieces = torch.split(self._units[:, number], [self._shapes[name][0] for name in weights], 1)
        # The number of a layer is stored in the place of its first unit.
        count = 1 if self._of_layers[number] else None
        return {name: piece[:, :count] for name, piece in zip(weights, pieces, strict=True)}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Split one vector per learner into parameters."""
        pieces = torch.split(flat, [shape.numel() for shape in self._shapes.values()], 1)
        return {
            name: piece.view(len(flat), *shape)
            for piece, (name, shape) in zip(pieces, self._shapes.items(), strict=True)
        }


@functools.cache
def _kernel(chosen: Plan, loss: Loss, indexed: bool, device: torch.device) -> driver.Kernel:
    code = _code(chosen, loss, indexed, device)
    return driver.Kernel(code, b"advance", chosen.cluster, chosen.threads, chosen.shared_bytes)


def _code(chosen: Plan, loss: Loss, indexed: bool, device: torch.device) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    return compiler.compiled(source(chosen, loss, indexed, parts()), f"sm_{major}{minor}")


@functools.cache
def parts() -> Mapping[str, str]:
    """Return the texts of the kernel's files by name."""
    folder = resources.files("upgd.population.cuda")
    return {part: folder.joinpath(part).read_text(encoding="utf-8") for part in _PARTS}


@functools.cache
def _plans(layers: Layers, kind: Kind, program: Program | None, device: torch.device) -> tuple[tuple[Plan, int], ...]:
    """Return the possible cluster sizes, with the number of clusters that the device runs at once."""
    limit = driver.shared_bytes(device)
    plans = [p for p in _each_plan(layers, kind, program, limit) if p is not None]
    # A kernel leaves no registers for a second block on its multiprocessor, so a probe must request as much shared memory.
    active = [
        (p, driver.active_clusters(device, p.cluster, p.threads, max(p.shared_bytes, limit // 2 + 1024))) for p in plans
    ]
    return tuple((p, count) for p, count in active if count)


def _each_plan(layers: Layers, kind: Kind, program: Program | None, limit: int) -> Iterator[Plan | None]:
    if isinstance(layers[0], Dense):
        for cluster in CLUSTERS:
            yield plan(layers, kind, cluster, limit, program)
    else:
        assert program is not None
        for cluster in convolutional.CLUSTERS:
            yield convolutional.plan(layers, kind, cluster, limit, program)


@functools.lru_cache(maxsize=256)
def _schedule(rows: bytes, steps: int, pieces: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the schedule of learners (int32), cached on the device, because copying it would wait for running kernels."""
    learners = np.frombuffer(rows, np.int32)
    segments, begins = schedule(len(learners), steps, pieces)
    segments[:, 0] = learners[segments[:, 0]]
    return torch.from_numpy(segments).to(device), torch.from_numpy(begins).to(device)


@functools.cache
def _pixels(white: int, device: torch.device) -> Tensor:
    """Return the scaled value of each byte of an image; rounded as in :meth:`upgd.streams.Chunk.inputs`."""
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
    made["rate"] = group.value("normalize").numpy()
    return made


def _input_shape(chunk: Chunk) -> torch.Size:
    if chunk.dense is not None:
        return chunk.dense.shape[2:]
    assert chunk.source is not None
    return chunk.source.shape[1:]


def _indexed(device: torch.device) -> torch.device:
    """Return the device with an explicit index, for use as a cache key."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
