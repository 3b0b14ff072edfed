"""Periodic diagnostics of the learners of a population.

:class:`upgd.monitor.Monitor` defines the diagnostics. They have no cost unless requested. :func:`register` adds custom
diagnostics.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from upgd import plugins
from upgd.monitor import Monitor
from upgd.normalization import normalized
from upgd.population.backend import Backend, Group, Loss
from upgd.population.chain import Chain
from upgd.population.result import Floats
from upgd.population.spec import Learner
from upgd.population.torch_backend import gates
from upgd.streams.contract import Chunk

__all__ = ["Batch", "Diagnostics", "look", "losses", "names", "register", "seen", "stacked"]


class Batch(NamedTuple):
    """The last samples that a learner was trained on, oldest first."""

    inputs: Tensor  #: ``(samples, *input_shape)``
    targets: Tensor  #: ``(samples,)`` classes, or ``(samples, outputs)`` numbers
    loss: Loss  #: ``"cross_entropy"`` or ``"mse"``


AnyDiagnostic = TypeVar("AnyDiagnostic", bound=Callable[[nn.Module, Learner, Batch], Any])

_REGISTERED: dict[str, Callable[[nn.Module, Learner, Batch], Any]] = {}


def register(name: str) -> Callable[[AnyDiagnostic], AnyDiagnostic]:
    """Register a custom diagnostic; use it as a decorator, ``@register("my-figure")``, on a function of (network, learner,
    batch).

    The network is a copy with the learner's current parameters, ``learner`` holds its method and settings, and
    :class:`Batch` its last samples. The function returns a number, or a dictionary of names and numbers; a list of numbers
    must have the same length every time. The values are stored, exported and shown in the report under these names.
    PyTorch's generator is set to the learner's seed while the function runs.

    Example:
        >>> @register("example-margin")
        ... def margin(network, learner, batch):
        ...     best, second = network(batch.inputs).topk(2).values.unbind(1)
        ...     return (best - second).mean()
    """

    def remember(function: AnyDiagnostic) -> AnyDiagnostic:
        return plugins.add(_REGISTERED, "diagnostic", name, function)

    return remember


def names() -> list[str]:
    """Return the names of all registered diagnostics."""
    plugins.discover()
    return list(_REGISTERED)


@dataclass(frozen=True)
class Diagnostics:
    """Options of periodic diagnostics.

    Args:
        every: Number of steps between snapshots. Default: the window.
        samples: Number of last samples for diagnostics of activations.
        updates: Number of last updates, at most those since the previous snapshot, that ``sample_plasticity`` is averaged
            over. A single update is a noisy estimate, but these steps are taken one by one, which is slower.
        tau: Units are dormant if their mean activation is at most τ times the layer's mean.

    Example:
        >>> from upgd.networks import MLP
        >>> from upgd.population import Population
        >>> from upgd.streams import make
        >>> population = Population(MLP((64, 8, 10)), [Learner(method="sgd", lr=0.01)], backend="torch")
        >>> result = population.run(make("output-permuted-digits"), steps=40, diagnostics=Diagnostics(every=20))
        >>> result.diagnostics["dormant_share/layers.1"].shape
        (2, 1)
    """

    every: int | None = None
    samples: int = 100
    updates: int = 10
    tau: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("samples", self.samples), ("updates", self.updates)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")

    def next_moment(self, step: int, window: int) -> int:
        """Return the step of the next snapshot, after ``step`` steps."""
        every = self.every or window
        return (step // every + 1) * every

    def measured(self, window: int) -> int:
        """Return the number of updates before a snapshot that ``sample_plasticity`` is averaged over."""
        return min(self.updates, self.every or window)


def losses(model: Chain | nn.Module, parameters: Mapping[str, Tensor], x: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Return the loss of each learner on its own sample: ``(learners,)``.

    Args:
        model: the network, on the device of the parameters; a Chain if it is one.
        parameters: by name, ``(learners, *shape)``.
        x, target: ``(learners, …)``.
        loss: the loss function.
    """

    def outputs_of_one(own: dict[str, Tensor], sample: Tensor) -> Tensor:
        assert isinstance(model, nn.Module)
        outputs: Tensor = functional_call(model, own, (sample.unsqueeze(0),))
        return outputs.squeeze(0)

    with torch.no_grad():
        outputs = (
            model.outputs(parameters, x) if isinstance(model, Chain) else vmap(outputs_of_one)(dict(parameters), x)
        )
        if loss == "cross_entropy":
            return F.cross_entropy(outputs, target, reduction="none")
        return F.mse_loss(outputs, target.to(outputs), reduction="none").flatten(1).mean(1)


def seen(group: Group, backend: Backend, inputs: Tensor) -> Tensor:
    """Return the inputs of the networks of a group's learners, ``(learners, samples, …)``, after any normalization."""
    state = backend.state() if group.kind.normalize else {}
    if "normalizer.mean" not in state:
        return inputs
    mean, variance = (state[f"normalizer.{name}"].to(inputs).unsqueeze(1) for name in ("mean", "variance"))
    return normalized(inputs, mean, variance)


def look(
    network: nn.Module,
    group: Group,
    before: Mapping[str, Tensor],
    backend: Backend,
    diverged_at: Tensor,
    chunk: Chunk,
    loss: Loss,
    wanted: Diagnostics,
    plasticities: Floats,
    learners: Sequence[Learner],
) -> list[dict[str, Floats]]:
    """Return the diagnostics of a group's learners, by learner and name, each a number or a short vector; empty for diverged
    learners.

    Args:
        network: the template, on the CPU.
        group: the learners.
        before: their parameters before the last update.
        backend: the backend that computed the update.
        diverged_at: for each learner, as in a tally; −1 if it has not diverged.
        chunk: the last samples, on the CPU; the latest one is that of the update.
        loss: the loss function.
        wanted: the options.
        plasticities: for each learner, the mean sample plasticity of its last updates.
        learners: their specifications.
    """
    after = backend.parameters()
    traces = {name.removeprefix("utility."): t for name, t in backend.state().items() if name.startswith("utility.")}
    useful = gates(group, traces, chunk.start + chunk.length) if traces else {}
    inputs = seen(group, backend, chunk.inputs().to(next(network.parameters()).dtype)[group.rows.cpu()])
    found: list[dict[str, Floats]] = []
    model = copy.deepcopy(network)
    for i, (row, step) in enumerate(zip(group.rows, diverged_at.tolist(), strict=True)):
        if step >= 0:
            found.append({})
            continue
        old, new, useful_now = ({name: t[i].cpu() for name, t in named.items()} for named in (before, after, useful))
        figures = _look_at_one(model, old, new, useful_now, inputs[i], chunk.targets[row, -1:], loss, wanted)
        if figures:
            figures["sample_plasticity"] = plasticities[i]
            figures |= _registered(network, new, learners[i], Batch(inputs[i], chunk.targets[row], loss), figures)
        found.append(figures)
    return found


def _look_at_one(
    model: nn.Module,
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    useful: dict[str, Tensor],
    inputs: Tensor,
    target: Tensor,
    loss: Loss,
    wanted: Diagnostics,
) -> dict[str, Floats]:
    """Return the diagnostics of one learner. Gradients are those of the last update; everything else is current."""
    if not all(p.isfinite().all() for p in after.values()):
        return {}
    model.load_state_dict(before, strict=False)
    model.zero_grad()
    outputs = model(inputs[-1:])
    lost = F.cross_entropy(outputs, target) if loss == "cross_entropy" else F.mse_loss(outputs, target.to(outputs))
    torch.autograd.backward(lost)
    model.load_state_dict(after, strict=False)
    with Monitor(model, _Gates(model, useful), tau=wanted.tau, samples=wanted.samples) as monitor:
        model(inputs)
        return {name: np.asarray(figure, np.float64) for name, figure in monitor.snapshot().items()}


def _registered(
    network: nn.Module, parameters: Mapping[str, Tensor], learner: Learner, batch: Batch, taken: Mapping[str, Any]
) -> dict[str, Floats]:
    """Return the registered diagnostics of a learner."""
    found: dict[str, Floats] = {}
    for name in names():
        model = copy.deepcopy(network)
        model.load_state_dict(dict(parameters), strict=False)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(learner.seed)
                given = _REGISTERED[name](model, learner, batch)
            figures = {key: _figure(value) for key, value in _named(name, given).items()}
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"the diagnostic {name!r} failed for {learner} ({reason})") from error
        if again := next((key for key in figures if key in taken or key in found), None):
            raise ValueError(f"the diagnostic {name!r} returns {again!r}, which already exists; rename it")
        found |= figures
    return found


def _named(name: str, given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {name: given}


def _figure(value: Any) -> Floats:
    """Convert to a number or a short vector."""
    array: Floats = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, np.float64)
    if array.ndim > 1:
        raise TypeError(f"a diagnostic must be a number or a list of numbers, not an array of shape {array.shape}")
    return array


class _Gates:
    """Provides the ``gates()`` that a monitor expects from an optimizer."""

    def __init__(self, model: nn.Module, gates: Mapping[str, Tensor]) -> None:
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._gates = {parameters[name]: gate for name, gate in gates.items()}

    def gates(self) -> dict[Tensor, Tensor]:
        return self._gates


def stacked(moments: Sequence[Sequence[Mapping[str, Floats]]]) -> dict[str, Floats]:
    """Convert diagnostics by moment, learner and name to arrays by name, ``(moments, learners, …)``, NaN where missing."""
    shapes = {name: figure.shape for moment in moments for figures in moment for name, figure in figures.items()}
    return {
        name: np.array([[figures.get(name, np.full(shape, np.nan)) for figures in moment] for moment in moments])
        for name, shape in sorted(shapes.items())
    }
