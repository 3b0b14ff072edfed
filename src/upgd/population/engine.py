"""The population engine: runs learners and returns windows of online metrics."""

import copy
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from upgd.monitor import sample_plasticity
from upgd.networks import initial_parameters
from upgd.population.backend import Backend, Loss, Tally
from upgd.population.blocks import Pace, Supply
from upgd.population.chain import Chain
from upgd.population.choose import BackendChoice, choose
from upgd.population.diagnostics import Diagnostics, look, losses, seen, stacked
from upgd.population.interrupt import interrupts_wait
from upgd.population.lanes import Lanes
from upgd.population.result import Floats, Integers, Result
from upgd.population.spec import Learner, groups
from upgd.streams.contract import Chunk, Stream, checked_chunk

__all__ = ["Population"]


class Population:
    """Many independent online learners, trained together.

    Initial weights, samples and noise depend only on (seed, purpose, step, index). The results of a learner are therefore
    independent of the other learners, of their order, and of how the steps are divided among calls of :meth:`run`.

    Args:
        network: An ``nn.Module``, used as a template and not modified. Every learner starts with the initial weights of its
            seed (:func:`upgd.networks.initial_parameters`), unless ``parameters`` is given.
        learners: Any mix of methods, settings and seeds.
        device: The device to compute on. Default: "cpu".
        backend: ``"torch"``, ``"kernel"`` (compiled loops on a CPU, on chip on a Hopper GPU), or ``"auto"``, the kernel if it
            applies; or a custom class, see :class:`upgd.population.backend.Backend`. Default: "auto".
        dtype: The type of parameters and computation, ``torch.float32`` or ``torch.float64``. Default: ``torch.float32``.
        parameters: Initial parameters: for each name of ``network.named_parameters()``, a tensor ``(learners, *shape)``.

    Attributes:
        learners: The learners, a tuple.
        step: Number of steps taken.
        backends: The backend of each learner.

    Example:
        >>> from upgd.networks import MLP
        >>> from upgd.streams import make
        >>> learners = [Learner(method=method, lr=0.01, seed=seed) for method in ("sgd", "upgd") for seed in range(2)]
        >>> population = Population(MLP((64, 32, 10)), learners, backend="torch")
        >>> result = population.run(make("input-permuted-digits", task_length=20), steps=50)
        >>> result.accuracy.shape, result.ends.tolist(), result.last_is_short
        ((3, 4), [20, 40, 50], True)
    """

    def __init__(
        self,
        network: nn.Module,
        learners: Sequence[Learner],
        device: torch.device | str = "cpu",
        backend: BackendChoice = "auto",
        dtype: torch.dtype = torch.float32,
        *,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.learners = _checked_learners(learners)
        self.step = 0
        self._device = torch.device(device)
        self._network = _template(network, dtype)
        seeds = [learner.seed for learner in self.learners]
        self._seeds = sorted(set(seeds))
        rows = {seed: row for row, seed in enumerate(self._seeds)}
        self._groups = groups(self.learners, [rows[seed] for seed in seeds])
        #: Maps the concatenated learners of all groups to the caller's order.
        self._order = torch.tensor([place for _, own in self._groups for place in own]).argsort()

        chosen = [choose(backend, self._network, group, self._device, dtype) for group, _ in self._groups]
        initial = _initial(self._network, seeds, parameters)
        self._backends: list[Backend] = [
            make(self._network, group, {name: p[own] for name, p in initial.items()}, self._device, dtype)
            for (_, make), (group, own) in zip(chosen, self._groups, strict=True)
        ]
        joined = [name for (name, _), (group, _) in zip(chosen, self._groups, strict=True) for _ in range(len(group))]
        self.backends = tuple(joined[i] for i in self._order.tolist())

        # One for all groups, so that reading and resetting it takes the same time for any number of groups.
        self._tally = Tally.empty(len(self.learners), self._device)
        self._tallies = self._tally.split([len(group) for group, _ in self._groups])
        self._lanes = Lanes(self._backends, self._tallies, self._device)
        self._curves: dict[str, list[Floats]] = {"loss": [], "accuracy": []}
        self._looks: list[tuple[int, list[dict[str, Floats]]]] = []
        #: Sample plasticities of the updates before the next snapshot, and the step of each.
        self._plasticities: list[tuple[int, Floats]] = []
        self._window: int | None = None
        self._loss: Loss | None = None
        self._problem: str | None = None
        self._checked: Stream | None = None
        self._pace = Pace()
        self._supply = Supply(self._seeds, self._device)
        self._whole = True

    def run(
        self,
        stream: Stream,
        steps: int,
        *,
        window: int | None = None,
        diagnostics: Diagnostics | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Result:
        """Train for ``steps`` more steps.

        Ctrl-C takes effect at the end of the current block of steps, after about half a second. The population is then in a
        consistent state, as after a shorter run, and can be saved or run further.

        Args:
            stream: The problem; must be the same in every call.
            steps: Number of steps.
            window: Number of steps per window of the result; must be the same in every call. Default: the stream's
                ``task_length``.
            diagnostics: Record periodic diagnostics of the learners, see :class:`Diagnostics`. They do not affect training.
            progress: Called after every block with the number of learner-steps done in this call and their total.

        Returns:
            The result of *all* steps so far. Two runs of 500 steps give bitwise the same result as one run of 1000.
        """
        self._check_whole()
        steps = _checked_count("steps", steps, 0)
        if diagnostics is not None and not isinstance(diagnostics, Diagnostics):
            raise TypeError(f"diagnostics must be Diagnostics(...), not {diagnostics!r}; try Diagnostics(every=1_000)")
        self._begin(stream, window)
        assert self._window is not None
        begin, end = self.step, self.step + steps
        while self.step < end:
            length = min(self._pace.steps, end - self.step, self._window - self.step % self._window)
            to_look = diagnostics.next_moment(self.step, self._window) - self.step if diagnostics is not None else 0
            with interrupts_wait():
                if diagnostics is None:
                    self._advance(stream, length, end)
                elif to_look == 1:
                    self._advance_and_look(stream, end, diagnostics)
                elif to_look > (alone := diagnostics.measured(self._window)):
                    self._advance(stream, min(length, to_look - alone), end)
                else:
                    # The steps before a snapshot are taken one by one, to measure the effect of each update.
                    for _ in range(min(length, to_look - 1)):
                        self._advance_and_measure(stream, end)
            if progress is not None:
                progress((self.step - begin) * len(self.learners), steps * len(self.learners))
        return self.result()

    def result(self) -> Result:
        """Return the result of all steps so far."""
        self._check_whole()
        window = self._window or 1
        curves = {name: list(rows) for name, rows in self._curves.items()}
        ends = [window * (i + 1) for i in range(len(curves["loss"]))]
        if self.step % window:
            for name, row in self._means(self.step % window).items():
                curves[name].append(row)
            ends.append(self.step)
        return Result(
            learners=self.learners,
            window=window,
            ends=np.array(ends, np.int64),
            lengths=np.array([end - start for start, end in pairwise([0, *ends])], np.int64),
            loss=self._stacked(curves["loss"]),
            accuracy=self._stacked(curves["accuracy"]),
            diverged_at=self.diverged_at,
            diagnostics=stacked([figures for _, figures in self._looks]),
            diagnosed_at=np.array([step for step, _ in self._looks], np.int64),
        )

    @property
    def diverged_at(self) -> Integers:
        """``(learners,)``: the step, from 0, at which each learner diverged; −1 if it has not. Cheap to compute."""
        diverged_at: Integers = self._gathered("diverged_at").numpy()
        return diverged_at

    def parameters(self, learner: int) -> dict[str, Tensor]:
        """Return a copy of one learner's current parameters, by name."""
        self._check_whole()
        for backend, (_, own) in zip(self._backends, self._groups, strict=True):
            if learner in own:
                return {name: p[own.index(learner)].clone() for name, p in backend.parameters().items()}
        raise IndexError(f"learner must be from 0 to {len(self.learners) - 1}, not {learner}")

    def network(self, learner: int) -> nn.Module:
        """Return a copy of the network with one learner's parameters."""
        network = copy.deepcopy(self._network).to(self._device)
        network.load_state_dict(self.parameters(learner), strict=False)
        return network

    # --------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume, as a flat dictionary of plain tensors on the CPU.

        Save it with ``torch.save(population.state(), path)`` and load it with ``torch.load(path, weights_only=True)``, which
        does not execute code from the file; ``numpy.savez(path, **state)`` also works.
        """
        self._check_whole()
        state = {
            "step": torch.tensor(self.step),
            "window": torch.tensor(self._window or 0),
            "loss": torch.tensor(_LOSSES.index(self._loss)),
            "learners": self._fingerprint(),
            **{f"tally.{name}": self._gathered(name) for name in ("loss", "correct", "diverged_at")},
            **{f"curve.{name}": torch.from_numpy(self._stacked(rows)) for name, rows in self._curves.items()},
            "diagnosed_at": torch.tensor([step for step, _ in self._looks], dtype=torch.int64),
            **{f"diagnostics.{name}": torch.from_numpy(f) for name, f in stacked([f for _, f in self._looks]).items()},
            "plasticity_at": torch.tensor([step for step, _ in self._plasticities], dtype=torch.int64),
            "plasticity": torch.from_numpy(self._stacked([row for _, row in self._plasticities])),
        }
        for number, backend in enumerate(self._backends):
            state |= {f"group.{number}.{name}": tensor.cpu() for name, tensor in backend.state().items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state`, in a population of the same network and learners.

        The device and the backend may be different; results then agree up to rounding.
        """
        state = {name: torch.as_tensor(value) for name, value in state.items()}
        self._check_belongs(state)
        self._whole = False
        for number, backend in enumerate(self._backends):
            prefix = f"group.{number}."
            backend.restore({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        for name in ("loss", "correct", "diverged_at"):
            for tally, (_, own) in zip(self._tallies, self._groups, strict=True):
                getattr(tally, name).copy_(state[f"tally.{name}"][own])
        for name in self._curves:
            self._curves[name] = list(state[f"curve.{name}"].numpy().copy())
        looks = {n.removeprefix("diagnostics."): t.numpy() for n, t in state.items() if n.startswith("diagnostics.")}
        self._looks = [
            (int(step), [{name: figures[k, i] for name, figures in looks.items()} for i in range(len(self.learners))])
            for k, step in enumerate(state["diagnosed_at"])
        ]
        measured = zip(state.get("plasticity_at", ()), state.get("plasticity", ()), strict=True)
        self._plasticities = [(int(step), row.numpy()) for step, row in measured]
        self.step = int(state["step"])
        self._window = int(state["window"]) or None
        self._loss = _LOSSES[int(state["loss"])]
        self._problem = None  # not part of the state
        self._whole = True

    def _fingerprint(self) -> Tensor:
        return torch.tensor([zlib.crc32(repr(learner).encode()) for learner in self.learners])

    # --------------------------------------------------------------------------------------------- blocks and windows

    def _begin(self, stream: Stream, window: int | None) -> None:
        if stream is not self._checked:
            _check_fits(self._network, stream)
            self._checked = stream
        window = _checked_count("window", stream.task_length if window is None else window, 1)
        before = (
            ("window", self._window, window),
            ("loss", self._loss, stream.loss),
            ("stream", self._problem, stream.name),
        )
        for name, old, new in before:
            if self.step and old not in (None, new):
                raise ValueError(f"the {name} was {old!r} until step {self.step} and cannot be changed to {new!r}")
        self._window, self._loss, self._problem = window, stream.loss, stream.name

    def _advance(self, stream: Stream, length: int, end: int) -> None:
        """Take up to ``length`` steps, at most to the end of the window; ``end`` is the end of the run."""
        before = time.perf_counter()
        chunk = self._supply.take(stream, self.step, length, end)
        self._learn(chunk, stream.loss)
        self._pace.adapt(chunk.length, time.perf_counter() - before)
        self._count(chunk)

    def _learn(self, chunk: Chunk, loss: Loss) -> None:
        self._whole = False
        self._lanes.advance(chunk, loss)

    def _count(self, chunk: Chunk) -> None:
        """Count the steps that all learners have taken."""
        assert self._window is not None
        self.step += chunk.length
        if self.step % self._window == 0:
            self._close_window()
        self._whole = True

    def _advance_and_look(self, stream: Stream, end: int, wanted: Diagnostics) -> None:
        """Take one step, and compute the diagnostics of every learner that it updated."""
        assert self._window is not None
        before = [{name: p.clone() for name, p in backend.parameters().items()} for backend in self._backends]
        self._advance_and_measure(stream, end)
        recent = [row for step, row in self._plasticities if step > self.step - wanted.measured(self._window)]
        plasticities: Floats = np.mean(recent, 0)
        self._plasticities = []
        samples = min(wanted.samples, self.step)
        chunk = checked_chunk(stream, self._seeds, self.step - samples, samples)
        found = [
            look(
                self._network,
                group,
                old,
                backend,
                tally.diverged_at,
                chunk,
                stream.loss,
                wanted,
                plasticities[own],
                [self.learners[i] for i in own],
            )
            for (group, own), old, backend, tally in zip(
                self._groups, before, self._backends, self._tallies, strict=True
            )
        ]
        joined = [figures for of_group in found for figures in of_group]
        self._looks.append((self.step, [joined[i] for i in self._order]))

    def _advance_and_measure(self, stream: Stream, end: int) -> None:
        """Take one step, and measure the fraction of its sample's loss that the update removes."""
        chunk = self._supply.take(stream, self.step, 1, end)
        so_far = self._tally.loss.clone()
        self._learn(chunk, stream.loss)
        # A learner's loss is that before its update.
        before = self._tally.loss - so_far
        inputs = chunk.inputs().to(next(self._network.parameters()).dtype)
        after = [
            losses(
                self._measured,
                backend.parameters(),
                seen(group, backend, inputs[group.rows])[:, 0],
                chunk.targets[group.rows, 0],
                stream.loss,
            )
            for (group, _), backend in zip(self._groups, self._backends, strict=True)
        ]
        plasticity = sample_plasticity(before, torch.cat(after).to(before)).cpu()[self._order]
        self._count(chunk)
        self._plasticities.append((self.step, plasticity.double().numpy()))

    @cached_property
    def _measured(self) -> Chain | nn.Module:
        """Return the network on the device of the parameters."""
        if Chain.unsupported(self._network) is None:
            return Chain(self._network)
        return self._network if self._device.type == "cpu" else copy.deepcopy(self._network).to(self._device)

    def _close_window(self) -> None:
        assert self._window is not None
        # A diverged loss is detected at once. An infinite weight behind a dead unit is not, so check once per window.
        healthy = torch.cat([backend.finite() for backend in self._backends]).to(self._device)
        tally = self._tally
        tally.diverged_at.masked_fill_((tally.diverged_at < 0) & ~healthy, self.step - 1)
        for name, row in self._means(self._window).items():
            self._curves[name].append(row)
        tally.loss.zero_()
        tally.correct.zero_()

    def _means(self, length: int) -> dict[str, Floats]:
        """Return the metrics of a window with ``length`` steps so far."""
        alive = (self._gathered("diverged_at") < 0).numpy()
        loss = self._gathered("loss").numpy() / length
        accuracy = self._gathered("correct").numpy() / length
        return {
            "loss": np.where(alive, loss, np.nan),
            "accuracy": np.where(alive & (self._loss != "mse"), accuracy, np.nan),
        }

    def _gathered(self, name: str) -> Tensor:
        """Return one field of the tallies for all learners, in the caller's order."""
        tensor: Tensor = getattr(self._tally, name)
        return tensor.cpu()[self._order]

    def _stacked(self, rows: list[Floats]) -> Floats:
        return np.array(rows, np.float64).reshape(len(rows), len(self.learners))

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError("an error interrupted this population during a step; call restore() with a saved state")

    def _check_belongs(self, state: Mapping[str, Tensor]) -> None:
        if "learners" not in state or not torch.equal(state["learners"], self._fingerprint()):
            raise ValueError(
                "state belongs to other learners; create the Population with those learners, in the same order"
            )
        for number, backend in enumerate(self._backends):
            for name, own in backend.state().items():
                given = state.get(f"group.{number}.{name}")
                if given is None or given.shape != own.shape:
                    shape = None if given is None else tuple(given.shape)
                    raise ValueError(
                        f"state has {shape} for {name}, not {tuple(own.shape)}: it belongs to another network"
                    )


_LOSSES: tuple[Loss | None, ...] = (None, "cross_entropy", "mse")


def _template(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"network must be an nn.Module, such as upgd.networks.MLP((784, 300, 150, 10)), not {network!r}"
        )
    frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(f"every parameter of network must be trainable, but {frozen[0]} has requires_grad=False")
    if dtype not in (torch.float32, torch.float64):  # in 16 bits, a utility trace with β = 0.999 would not decay
        raise ValueError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    return copy.deepcopy(network).to("cpu", dtype)


def _initial(network: nn.Module, seeds: list[int], given: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if given is None:
        return initial_parameters(network, seeds)
    for name, parameter in network.named_parameters():
        shape = (len(seeds), *parameter.shape)
        if name not in given or not isinstance(given[name], Tensor) or given[name].shape != shape:
            raise ValueError(f"parameters[{name!r}] must be a tensor of shape {shape}, one entry per learner")
    return {name: given[name].detach() for name, _ in network.named_parameters()}


def _check_fits(network: nn.Module, stream: Stream) -> None:
    """Raise an error if the network does not match the stream's inputs and outputs."""
    if not hasattr(stream, "chunk"):
        raise TypeError(f"stream must be a Stream, such as the result of upgd.streams.make(name), not {stream!r}")
    dtype = next((parameter.dtype for parameter in network.parameters()), None)
    if dtype is None:
        raise ValueError(f"network must have parameters, but this {type(network).__name__} has none")
    try:
        with torch.no_grad():
            shape = tuple(network(torch.zeros(1, *stream.input_shape, dtype=dtype)).shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"network does not accept the inputs of {stream.name}, {stream.input_shape}: {error}"
        ) from error
    if shape != (1, stream.outputs):
        raise ValueError(
            f"network must have {stream.outputs} outputs per sample of {stream.name}, but for one sample it returns "
            f"a tensor of shape {shape}"
        )


def _checked_learners(learners: Sequence[Learner]) -> tuple[Learner, ...]:
    checked = tuple(learners) if isinstance(learners, Iterable) else ()
    if not checked or not all(isinstance(learner, Learner) for learner in checked):
        raise ValueError(f"learners must be one or more Learner(…), not {learners!r}")
    return checked


def _checked_count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value.__index__()
