"""The torch backend on a GPU: the step is compiled, captured in a CUDA graph and replayed, which removes Python's overhead.

Everything that a step reads or writes is at a fixed address: the learners' state, a stretch of the stream, the tally, and a
counter that the graph increments. The step is that of :class:`.TorchBackend`, except that values that depend only on the
learner and the step (powers of β, keys of the noise) are computed for a whole stretch at once; within a step, they would
take two hundred tiny kernels. The step is traced once. ``torch.compile`` then fuses it if Triton is available;
``UPGD_COMPILE=0`` disables this, which is faster for short runs.
"""

import gc
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from upgd import noise
from upgd.methods._scalars import Scalar, Scalars, evaluate
from upgd.methods.utility import Utility
from upgd.noise import learner_keys, learner_normals_at
from upgd.population.backend import Group, Loss, Tally
from upgd.population.torch_backend import Named, TorchBackend
from upgd.streams.contract import Chunk

__all__ = ["GraphedBackend"]

log = logging.getLogger("upgd.population")

#: Number of steps of the stream that are stored at once, and number of steps per graph.
_STRETCH = 512
_UNROLLED = 8
#: Number of tasks to reserve memory for, unless that takes too much.
_TASKS = 64
#: Memory limits in bytes for a stretch of the stream and for the tasks.
_BYTES = 256 << 20

_LOG2_E = math.log2(math.e)

Step = Callable[..., Any]


class GraphedBackend(TorchBackend):
    """See :class:`upgd.population.backend.Backend`. On the CPU, the same steps run without a graph."""

    _branches = False  # a graph has no branches

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(network, group, parameters, device, dtype)
        self._h = Scalars(self._group.values, self._resolve, by_reciprocal=True)
        if isinstance(self._method, Utility):
            self._method.gate = _gate
        #: Per-learner expressions of the rule, by key; known after the first step.
        self._expressions: dict[str, Scalar] = {}
        self._constant: Named = {}  #: those that do not depend on the step, in the dtype of the computation
        self._device = device
        self._fixed: Named = {}
        self._places_now: Named = {}  #: the same, during tracing
        self._source: Tensor | None = None
        self._white = 255
        self._loss: Loss | None = None
        self._replays: dict[int, Callable[[], None]] = {}

    @torch.no_grad()
    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""
        stretch = self._prepare(chunk, loss)
        totals = {name: getattr(tally, name) for name in ("loss", "correct", "diverged_at")}
        for name, total in totals.items():
            self._fixed[name].copy_(total)
        for begin in range(0, chunk.length, stretch):
            length = min(stretch, chunk.length - begin)
            self._lay_out(chunk, begin, length)
            for _ in range(length // _UNROLLED):
                self._replays[_UNROLLED]()
            for _ in range(length % _UNROLLED):
                self._replays[1]()
        for name, total in totals.items():
            total.copy_(self._fixed[name])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        for part, named in self._state.items():
            for name, tensor in named.items():
                tensor.copy_(state[f"{part}.{name}"])
        if self._kind.normalize and "normalizer.mean" in state and "normalizer" not in self._state:
            like = next(iter(self._parameters.values()))
            self._state["normalizer"] = {n: state[f"normalizer.{n}"].to(like, copy=True) for n in ("mean", "variance")}

    # -------------------------------------------------------------------------------------------------- fixed buffers

    def _prepare(self, chunk: Chunk, loss: Loss) -> int:
        """Allocate buffers for chunks like this one, record graphs that use them, and return the number of steps that fit."""
        stretch = max(_UNROLLED, min(_STRETCH, _BYTES // self._bytes_per_step(chunk)))
        tasks = self._room_for_tasks(chunk)
        if not self._expressions:
            self._find_expressions(chunk, loss)
        shapes = {name: t.shape for name, t in self._places(chunk, stretch, tasks).items()}
        same = self._source is chunk.source and self._white == chunk.white and self._loss == loss
        if same and all(name in self._fixed and self._fixed[name].shape == shape for name, shape in shapes.items()):
            return stretch
        self._fixed = self._places(chunk, stretch, tasks)
        self._source, self._white, self._loss = chunk.source, chunk.white, loss
        self._lay_out(chunk, 0, min(stretch, chunk.length))
        self._replays = self._recorded()
        return stretch

    def _find_expressions(self, chunk: Chunk, loss: Loss) -> None:
        """Run a step of the plain backend to find the per-learner expressions of the rule, and undo it."""
        before = {part: {name: t.clone() for name, t in named.items()} for part, named in self._state.items()}
        tally = Tally.empty(len(self._group), self._device)
        TorchBackend.advance(self, chunk.narrow(0, 1), loss, tally)
        for part, named in self._state.items():
            for name, tensor in named.items():
                if part in before:
                    named[name] = before[part][name]
                else:  # the normalizer, which the first sample created
                    named[name] = tensor.fill_(0.0 if name == "mean" else 1.0)
        self._constant = {
            key: evaluate(scalar, self._group.values, self._group.seeds).to(self._dtype)
            for key, scalar in self._expressions.items()
            if not scalar.changes
        }

    def _room_for_tasks(self, chunk: Chunk) -> int:
        """Return a capacity larger than the number of tasks in this chunk, which avoids recompilation for later chunks."""
        if chunk.permutation is None:
            return 0
        room = _BYTES // (len(self._group) * chunk.permutation[0, 0].nbytes)
        needed = 1 << (chunk.permutation.shape[1] - 1).bit_length()
        before = self._fixed["permutation"].shape[1] if "permutation" in self._fixed else 0
        return max(needed, before, min(_TASKS, room))

    def _bytes_per_step(self, chunk: Chunk) -> int:
        tensors = [t for t in (chunk.targets, chunk.dense, chunk.index) if t is not None]
        return len(self._group) * sum(t.element_size() * t[0, 0].numel() for t in tensors)

    def _places(self, chunk: Chunk, stretch: int, tasks: int) -> Named:
        learners = len(self._group)
        totals = Tally.empty(learners, self._device)
        places: Named = {"loss": totals.loss, "correct": totals.correct, "diverged_at": totals.diverged_at}
        for name in ("offset", "start"):
            places[name] = torch.zeros(1, dtype=torch.long, device=self._device)
        for key, scalar in self._changing():
            value = evaluate(scalar, {**self._group.values, "t": 1}, self._group.seeds)
            dtype = value.dtype if value.dtype == torch.bool else self._dtype
            places[f"scalar.{key}"] = torch.ones(stretch, learners, dtype=dtype, device=self._device)
        if self._kind.noise != "none":  # includes those of the previous step
            places["keys"] = torch.zeros(stretch + 1, learners, 4, dtype=torch.int32, device=self._device)
        for name, tensor in (("targets", chunk.targets), ("dense", chunk.dense), ("index", chunk.index)):
            if tensor is not None:
                places[name] = tensor.new_zeros(learners, stretch, *tensor.shape[2:])
        places["task"] = chunk.task.new_zeros(stretch)
        if chunk.permutation is not None:
            places["permutation"] = chunk.permutation.new_zeros(learners, tasks, chunk.permutation.shape[2])
        return places

    def _lay_out(self, chunk: Chunk, begin: int, length: int) -> None:
        """Copy a stretch of the stream to the buffers of the graphs."""
        rows, steps = self._group.rows, slice(begin, begin + length)
        for name, tensor in (("targets", chunk.targets), ("dense", chunk.dense), ("index", chunk.index)):
            if tensor is not None:
                self._fixed[name][:, :length] = tensor[rows, steps]
        self._fixed["task"][:length] = chunk.task[steps]
        if chunk.permutation is not None:
            self._fixed["permutation"][:, : chunk.permutation.shape[1]] = chunk.permutation[rows]
        start = chunk.start + begin
        taken = torch.arange(start, start + length + 1, device=self._device).unsqueeze(1)
        for key, scalar in self._changing():
            values = {**self._group.values, "t": taken[1:]}
            self._fixed[f"scalar.{key}"][:length] = evaluate(scalar, values, self._group.seeds)
        if self._kind.noise != "none":
            self._fixed["keys"][: length + 1] = learner_keys(self._group.seeds, taken)
        self._fixed["offset"].zero_()
        self._fixed["start"].fill_(start)

    # --------------------------------------------------------------------------------------------------------- the step

    def _recorded(self) -> dict[int, Callable[[], None]]:
        """Return functions that take one step and several steps, by number of steps."""
        changing = [tensor for part in self._parts() for tensor in self._state[part].values()]
        tensors = [*self._fixed.values(), *changing]
        if self._device.type != "cuda":
            return {count: _repeated(self._take, tensors, count) for count in (1, _UNROLLED)}
        before = [t.clone() for t in tensors]
        step = self._compiled(tensors)
        rewind = self._fixed["offset"].zero_  # a stretch may be as short as one graph
        graphs = {count: _captured(_repeated(step, tensors, count), rewind) for count in (1, _UNROLLED)}
        for tensor, old in zip(tensors, before, strict=True):  # undo the steps of tracing and warm-up
            tensor.copy_(old)
        return {count: graph.replay for count, graph in graphs.items()}

    def _compiled(self, tensors: list[Tensor]) -> Step:
        if os.environ.get("UPGD_COMPILE", "1") == "0":
            return self._take
        self._take(*tensors)  # creates everything that is cached before the graph is captured
        try:
            traced = make_fx(self._take, pre_dispatch=False)(*tensors)
            compiled: Step = torch.compile(traced, fullgraph=True, dynamic=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled(*tensors)
            return compiled
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            log.warning("torch.compile failed (%s); steps run uncompiled, which is several times slower", reason)
            return self._take

    def _parts(self) -> list[str]:
        """Return the parts of the state in the order of the graph's tensors; utilities are last, see :meth:`_take`."""
        return sorted(self._state, key=lambda part: part == "utility")

    def _changing(self) -> list[tuple[str, Scalar]]:
        return [(key, scalar) for key, scalar in self._expressions.items() if scalar.changes]

    def _resolve(self, scalar: Scalar) -> Tensor:
        """Return the value computed for the whole stretch; computing it per step would take many tiny kernels."""
        if self._places_now:
            if not scalar.changes:
                return self._constant[scalar.key]
            if scalar.key not in self._resolved:
                table = self._places_now[f"scalar.{scalar.key}"]
                self._resolved[scalar.key] = table.index_select(0, self._places_now["offset"])[0]
            return self._resolved[scalar.key]
        self._expressions[scalar.key] = scalar
        return super()._resolve(scalar)

    def _take(self, *tensors: Tensor) -> list[Tensor]:
        """Take one step, in place except for the utilities, which are the last tensors and are returned. Gates require all
        utilities, so a second pass reads them; an in-place update would make the compiler write them twice."""
        fixed = dict(zip(self._fixed, tensors, strict=False))
        self._places_now = fixed
        state = iter(tensors[len(fixed) :])
        kept = {part: dict(self._state[part]) for part in self._parts()}
        places = {part: {name: next(state) for name in named} for part, named in kept.items()}
        for part, named in places.items():
            self._state[part].update(named)
        clock = (fixed["start"] + fixed["offset"])[0]
        assert self._loss is not None
        x, target = self._sample(fixed)
        tally = Tally(fixed["loss"], fixed["correct"], fixed["diverged_at"])
        self._step(x, target, self._loss, self._noises_now(clock), clock, tally)
        utilities = list(self._state.get("utility", {}).values())
        for part, named in places.items():
            for name, place in named.items() if part != "utility" else ():
                place.copy_(self._state[part][name])
            self._state[part].update(kept[part])
        fixed["offset"].add_(1)
        self._places_now = {}
        return utilities

    def _sample(self, fixed: Named) -> tuple[Tensor, Tensor]:
        offset = fixed["offset"]
        now: Named = {n: fixed[n].index_select(1, offset) for n in ("targets", "dense", "index") if n in fixed}
        if "permutation" in fixed:
            now["permutation"] = fixed["permutation"].index_select(1, fixed["task"].index_select(0, offset))
        chunk = Chunk(start=0, source=self._source, white=self._white, task=torch.zeros_like(offset), **now)
        target = chunk.targets[:, 0]
        return chunk.inputs_at(0).to(self._dtype), target.to(self._dtype) if self._loss == "mse" else target

    def _noises_now(self, clock: Tensor) -> Named:
        """Return ξ by parameter; each entry is computed independently, so that a compiler can fuse it with its use."""
        if self._kind.noise == "none":
            return {}
        offset = self._places_now["offset"]
        before, keys = (self._places_now["keys"].index_select(0, offset + later)[0] for later in (0, 1))
        noises, begin = {}, 0
        for name, parameter in self._parameters.items():
            shape = parameter.shape[1:]
            index = torch.arange(begin, begin + shape.numel(), dtype=torch.int32, device=self._device).view(shape)
            begin += shape.numel()
            noises[name] = learner_normals_at(keys, index, dtype=self._dtype)
            if self._kind.noise == "anticorrelated":
                previous = learner_normals_at(before, index, dtype=self._dtype)
                noises[name] = noise.anticorrelated(noises[name], torch.where(clock > 0, previous, 0))
        return noises


def _gate(utility: Tensor, scale: Tensor) -> Tensor:
    # A power of two is one instruction, and dividing once per learner is cheaper than once per weight.
    return 1 / (1 + torch.exp2(utility * (-_LOG2_E / scale)))


def _repeated(step: Step, tensors: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Return a function that takes ``count`` steps; each step's results replace the last tensors of the next step."""

    def repeat() -> None:
        returned: Sequence[Tensor] = ()
        for _ in range(count):
            returned = step(*tensors[: len(tensors) - len(returned)], *returned)
        for place, new in zip(tensors[len(tensors) - len(returned) :], returned, strict=True):
            place.copy_(new)

    return repeat


def _captured(steps: Callable[[], None], rewind: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    # Use a separate stream: graphs captured on one stream share memory and must not run concurrently.
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        for _ in range(2):
            rewind()
            steps()
    torch.cuda.current_stream().wait_stream(own)
    graph = torch.cuda.CUDAGraph()
    with _without_collection(), torch.cuda.graph(graph, stream=own):
        steps()
    return graph


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's garbage collector: freeing another graph during a capture would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
