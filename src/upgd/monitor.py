"""Diagnostics of a network during continual learning: plasticity, dormant units, norms, ranks and gates.

The functions define the diagnostics. They are pure and batched: tensors may have leading *learner dimensions*, in which case
there is one result per learner. :class:`Monitor` applies them to a model in an ordinary training loop.
"""

import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from upgd.curvature._backward import if_compiled, transform_level
from upgd.curvature._hooks import Hooks
from upgd.networks import ACTIVATION_MODULES, LAYERS, NORMS
from upgd.utility._model import function_before

__all__ = [
    "Monitor",
    "dormant_share",
    "effective_rank",
    "forgetting",
    "gate_histogram",
    "l0_share",
    "l1_norm",
    "l2_norm",
    "loss_of_plasticity",
    "sample_plasticity",
    "stable_rank",
    "windowed_means",
    "zero_share",
]

#: If at least this fraction of the gates is near ½, the summary explains what that means. It also suggests a remedy if the
#: gates change the step by less than the second value.
_NEARLY_ALL, _HARDLY = 0.95, 0.1
#: The diagnostics in a snapshot.
_FIGURES = (
    "dormant_share",
    "zero_share",
    "effective_rank",
    "stable_rank",
    "weight_l1",
    "weight_l2",
    "gradient_l1",
    "gradient_l2",
    "gradient_l0_share",
    "gate_histogram",
    "sample_plasticity",
)


def sample_plasticity(loss_before: Tensor, loss_after: Tensor) -> Tensor:
    """Return the fraction of a sample's loss removed by one update on it: ``clamp(1 − after/max(before, 1e-8), 0, 1)``.

    Example:
        >>> sample_plasticity(torch.tensor([2.0, 1.0]), torch.tensor([0.5, 3.0]))
        tensor([0.7500, 0.0000])
    """
    return (1 - loss_after / loss_before.clamp(min=1e-8)).clamp(0, 1)


def windowed_means(values: Tensor, window: int) -> Tensor:
    """Return means over consecutive windows of the last dimension. A shorter last window is kept.

    Example:
        >>> windowed_means(torch.tensor([1.0, 3.0, 5.0, 7.0, 100.0]), window=2)
        tensor([  2.,   6., 100.])
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    return torch.stack([part.mean(-1) for part in torch.split(values, window, dim=-1)], -1)


def loss_of_plasticity(curve: Tensor) -> Tensor:
    """Return the first minus the last entry of a curve of windowed mean plasticities (or accuracies), along the last
    dimension. Positive values mean that plasticity was lost."""
    return curve[..., 0] - curve[..., -1]


def forgetting(curve: Tensor) -> Tensor:
    """Return ``A_k − A_{k+1}`` for a curve with one mean accuracy per task, along the last dimension."""
    return curve[..., :-1] - curve[..., 1:]


def dormant_share(activations: Tensor, tau: float = 0.0) -> Tensor:
    """Return the fraction of τ-dormant units, whose mean |h| over samples is at most τ times the layer's mean.

    Args:
        activations: ``(*learners, samples, units)``.
        tau: τ. Default: 0, in which case only units that are always zero are dormant.

    Returns:
        ``(*learners,)``; 1 if all units of the layer are zero.

    Example:
        >>> dormant_share(torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]]), tau=0.75)
        tensor(0.6667)
    """
    magnitude = activations.abs().mean(-2)
    return (magnitude <= tau * magnitude.mean(-1, keepdim=True)).to(magnitude.dtype).mean(-1)


def zero_share(activations: Tensor) -> Tensor:
    """Return the fraction of activations that are exactly zero, of ``(*learners, samples, units)``."""
    return (activations == 0).flatten(-2).to(_float(activations)).mean(-1)


def l1_norm(values: Tensor, learner_dims: int = 0) -> Tensor:
    """Return ``Σ |x|`` per learner."""
    return values.flatten(learner_dims).abs().sum(-1) if values.ndim > learner_dims else values.abs()


def l2_norm(values: Tensor, learner_dims: int = 0) -> Tensor:
    """Return ``√(Σ x²)`` per learner."""
    return l1_norm(values, learner_dims) if values.ndim == learner_dims else values.flatten(learner_dims).norm(dim=-1)


def l0_share(values: Tensor, learner_dims: int = 0) -> Tensor:
    """Return ``‖x‖₀/n``, the fraction of nonzero entries, per learner."""
    nonzero = (values != 0).to(_float(values))
    return nonzero.flatten(learner_dims).mean(-1) if values.ndim > learner_dims else nonzero


def effective_rank(matrix: Tensor) -> Tensor:
    """Return ``exp(−Σ p log p)`` with ``p = s/Σs`` of the singular values ``s``, for matrices in the last two dimensions.

    The result is between 0 (for a zero matrix) and the number of singular values (if they are all equal), or NaN for a
    matrix with non-finite entries.
    """
    return _effective(_singular_values(matrix))


def stable_rank(matrix: Tensor) -> Tensor:
    """Return ``‖W‖²_F / ‖W‖²₂`` for matrices in the last two dimensions; 0 for a zero matrix, NaN for a non-finite one."""
    return _stable(_singular_values(matrix))


def _effective(singular: Tensor) -> Tensor:
    total = singular.sum(-1, keepdim=True)
    p = singular / total.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(total.squeeze(-1) == 0, 0, torch.exp(torch.special.entr(p).sum(-1)))


def _stable(singular: Tensor) -> Tensor:
    # Divide before squaring, because squares of large or small values overflow or underflow.
    ratios = singular / singular[..., :1].clamp(min=torch.finfo(singular.dtype).tiny)
    return (ratios**2).sum(-1)


def _singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of matrices in the last two dimensions, the largest first; NaN for non-finite ones, which
    LAPACK rejects."""
    matrix = _wide(matrix)
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    matrix = torch.where(finite, matrix, 0)
    if matrix.dtype == torch.float32 and matrix.device.type in ("cpu", "cuda"):
        # Eigenvalues of the smaller Gram matrix take a fraction of the time, and in 64 bits they lose nothing of 32.
        wide = (matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT).double()
        singular = torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt().flip(-1).float()
    else:
        singular = torch.linalg.svdvals(matrix)
    return torch.where(finite.squeeze(-1), singular, math.nan)


def gate_histogram(gates: Tensor, bins: int = 10, learner_dims: int = 0) -> Tensor:
    """Return the fraction of gates ū in each of ``bins`` equal intervals of [0, 1], per learner: ``(*learners, bins)``.

    Intervals include their lower end; the last one also includes its upper end. NaN gates are ignored; if all gates are
    NaN, the result is NaN.
    """
    flat = gates.flatten(learner_dims)
    known = ~flat.isnan()
    part = (flat.nan_to_num() * bins).clamp(0, bins - 1).long()
    counts = torch.zeros(*flat.shape[:-1], bins, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(-1, part, known.long())  # integers, because 16-bit floats cannot count beyond 256
    return counts.to(_wide(flat).dtype) / known.sum(-1, keepdim=True)


@runtime_checkable
class _Gated(Protocol):
    """An optimizer with gates."""

    def gates(self) -> dict[Any, Tensor]: ...


class _Window:
    """The outputs of one module for the last samples, stored cheaply; diagnostics are computed on request.

    Args:
        has_positions: whether the units are channels with values at many positions.
        samples: number of samples to keep.
    """

    def __init__(self, has_positions: bool, samples: int) -> None:
        self.has_positions = has_positions
        self.samples = samples
        #: For each forward pass, |h| and the fraction of zeros (samples, units); for channels, means over their positions.
        self._passes: deque[tuple[Tensor, Tensor]] = deque()
        self._kept = 0

    def add(self, output: Tensor, dim: int) -> None:
        """Store an output whose units or channels are in the dimension ``dim``, counted from the end."""
        output = output.detach()
        units, positions = output.shape[dim], math.prod(output.shape[output.ndim + dim + 1 :])
        output = output.reshape(-1, units, positions)
        if len(output) > self.samples:
            output = output[-self.samples :].clone()  # a view would keep the whole output alive
        # Units without positions are stored without computing anything.
        means = output.abs().mean(2) if self.has_positions else output.squeeze(2)
        zeros = (output == 0).to(output.dtype).mean(2) if self.has_positions else means
        self._passes.append((means, zeros))
        self._kept += len(means)
        while self._kept - len(self._passes[0][0]) >= self.samples:
            self._kept -= len(self._passes.popleft()[0])

    def figures(self, tau: float, wanted: Collection[str]) -> dict[str, Tensor]:
        means, zeros = (_wide(torch.cat(parts)[-self.samples :]) for parts in zip(*self._passes, strict=True))
        figures: dict[str, Tensor] = {}
        if "dormant_share" in wanted:
            figures["dormant_share"] = dormant_share(means, tau)
        if "zero_share" in wanted:
            figures["zero_share"] = zeros.mean() if self.has_positions else zero_share(means)
        if "effective_rank" in wanted and not self.has_positions:
            figures["effective_rank"] = effective_rank(means)
        return figures


class Monitor:
    """Record diagnostics of a model during training.

    Forward hooks keep the outputs of the hidden layers for the last training samples; diagnostics are computed only when
    :meth:`snapshot` is called. Forward passes under ``torch.no_grad()`` or ``torch.func`` are not recorded. Call
    :meth:`snapshot` after ``loss.backward()`` and before the gradients are cleared. Copying the model does not copy the
    monitor; copy both together to monitor the copy. The hooks are removed when the monitor is deleted.

    If parameters are sharded, all processes must call :meth:`snapshot` and :meth:`summary` together, which gather one
    parameter after the other. Diagnostics of activations are those of the samples of the own process.

    Args:
        model: Any module with Linear or convolution layers.
        optimizer: If it has a method ``gates()``, like :class:`upgd.UPGD`, snapshots contain histograms of the gates.
        tau: Units are dormant if their mean activation is at most τ times the layer's mean. Default: 0.1.
        samples: Number of recent samples to keep for diagnostics of activations. For convolutions, only means over
            positions are kept. Default: 256.
        layers: Names of the modules whose outputs are monitored. Default: the activation modules; in a model without any,
            all Linear and convolution layers but the last. If such a model uses functions such as ``F.relu``, the monitor
            sees pre-activations, which are hardly ever zero, and the first snapshot warns. Use modules, such as
            ``nn.ReLU()``, to monitor the activations.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> monitor = Monitor(model)
        >>> model(torch.randn(32, 4)).sum().backward()
        >>> sorted(monitor.snapshot())[:3]
        ['dormant_share/1', 'effective_rank/0.weight', 'effective_rank/1']
        >>> monitor.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: object | None = None,
        *,
        tau: float = 0.1,
        samples: int = 256,
        layers: Iterable[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
        if samples < 1:
            raise ValueError(f"samples must be at least 1, not {samples}")
        if not tau >= 0:
            raise ValueError(f"tau must be a number of at least 0, not {tau}; the usual value is 0.1")
        if optimizer is not None and not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "gates")):
            raise TypeError(f"optimizer must be a torch optimizer, not {optimizer!r}")
        self.model = model
        self.optimizer = optimizer
        self.tau = tau
        self.samples = samples
        self._watched = _watched(model, layers)
        #: Keyed by module name, number of units, and whether these are channels, because several layers may share one
        #: activation module.
        self._windows: dict[tuple[str, int, bool], _Window] = {}
        #: In this forward pass: number of output dimensions → unit dimension of the last layer with such an output.
        self._unit_dims: dict[int, int] = {}
        self._mean_plasticity: Tensor | None = None
        self._plasticities = 0
        self._hooks = Hooks(self)
        self._hook_outputs()
        #: A layer and the function that follows it, if its pre-activations are monitored; reset once the warning is given.
        self._looks_before: tuple[str, str] | None = None
        #: The layers whose inputs are checked for such a function.
        self._searched: dict[nn.Module, RemovableHandle] = {}
        if layers is None and not any(isinstance(module, ACTIVATION_MODULES) for module in self._watched.values()):
            self._look_for_functions()

    def snapshot(self, select: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Compute diagnostics and return them as ``"figure/layer"`` → number (``gate_histogram`` → list of ten fractions).

        * ``dormant_share``, ``zero_share``, ``effective_rank`` of hidden layers, over the last samples (the rank only for
          layers without positions)
        * ``weight_l1``, ``weight_l2``, ``gradient_l1``, ``gradient_l2``, ``gradient_l0_share`` of parameters; without
          ``/layer``, of all parameters together
        * ``effective_rank``, ``stable_rank`` of weight matrices; convolution weights have one row per filter
        * ``gate_histogram`` of the optimizer's gates
        * ``sample_plasticity``, the mean over the measurements of :meth:`plasticity` since the last snapshot that
          contained it

        Args:
            select: Names of the diagnostics to compute, such as ``["dormant_share", "weight_l2"]``. Default: all. Ranks
                take most of the time, because they require singular values.
        """
        wanted = _FIGURES if select is None else (select,) if isinstance(select, str) else tuple(select)
        if unknown := [name for name in wanted if name not in _FIGURES]:
            raise ValueError(f"select contains {unknown}; choose from {', '.join(_FIGURES)}")
        if self._looks_before is not None:
            layer, function = self._looks_before
            self._looks_before = None
            warnings.warn(
                "the model has no activation modules, so the monitor sees pre-activations, for example the output of the "
                f"layer {layer!r} before its {function}; use modules, such as nn.ReLU() instead of F.relu, or name the "
                "modules to monitor with layers=[...]",
                stacklevel=2,
            )
        if (
            self._watched
            and not self._windows
            and any(parameter.grad is not None for parameter in self.model.parameters())
        ):
            warnings.warn(
                "the monitor has recorded no forward pass, but the model has gradients; create it with the model that is "
                f"trained, before the forward pass.{if_compiled()}",
                stacklevel=2,
            )
        with torch.no_grad():
            figures = self._of_activations(wanted) | self._of_parameters(wanted) | self._of_matrices(wanted)
            if "gate_histogram" in wanted:
                figures |= self._of_gates()
            if "sample_plasticity" in wanted and self._mean_plasticity is not None:
                figures["sample_plasticity"] = self._mean_plasticity
                self._mean_plasticity, self._plasticities = None, 0
        return {name: figure.tolist() for name, figure in figures.items()}

    def summary(self) -> str:
        """Describe the gates and the hidden layers in a few lines of text.

        The summary points out if the gates have little effect: if nearly all of them are close to ½, most weights learn as
        with gradient descent at half the step size. The change of the step is ``‖(2·ū − 1)·g‖ / ‖g‖``, the part of a
        half-size step that the gates add or remove; it requires gradients.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
            >>> monitor = Monitor(model)
            >>> model(torch.ones(2, 4)).sum().backward()
            >>> print(monitor.summary())
            layer '1': 8 units, 0% dormant, 0% of the activations zero
        """
        with torch.no_grad():
            lines = self._gates_in_words()
            for (name, units, _), window in self._windows.items():
                shares = window.figures(self.tau, ("dormant_share", "zero_share"))
                dormant, zero = (_percent(float(share)) for share in shares.values())
                lines.append(f"layer {name!r}: {units} units, {dormant} dormant, {zero} of the activations zero")
        return "\n".join(lines) or "nothing to report: the monitor has recorded no forward pass"

    def plasticity(self, loss_before: Tensor, closure: Callable[[], Tensor]) -> Tensor:
        """Measure the sample plasticity of the last update.

        Args:
            loss_before: The loss that the update was computed from.
            closure: Recomputes the loss on the same samples. It is called without gradients, and its forward pass is not
                recorded.

        Returns:
            The plasticity, a scalar tensor. Its mean also appears in the next snapshot.

        Example:
            >>> model, x, y = nn.Linear(4, 1), torch.ones(1, 4), torch.zeros(1, 1)
            >>> optimizer, monitor = torch.optim.SGD(model.parameters(), lr=0.1), Monitor(model)
            >>> loss = nn.functional.mse_loss(model(x), y)
            >>> loss.backward()
            >>> optimizer.step()
            >>> monitor.plasticity(loss, lambda: nn.functional.mse_loss(model(x), y))
            tensor(1.)
        """
        with torch.no_grad():
            measured = sample_plasticity(torch.as_tensor(loss_before).detach(), closure())
            self._average(_wide(measured).mean())
        return measured

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hooks.adopt(self)

    def _hook_outputs(self) -> None:
        self._hooks.add(self.model.register_forward_pre_hook, "_before_model")
        for name, module in self.model.named_modules():
            if isinstance(module, LAYERS) or name in self._watched:
                self._hooks.add(
                    module.register_forward_hook, "_after_module", name, _unit_dim(module), name in self._watched
                )

    def _before_model(self, module: nn.Module, inputs: Any) -> None:
        """Reset the state of a forward pass."""
        self._unit_dims = {}

    def _after_module(
        self, name: str, unit_dim: int | None, is_watched: bool, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """Process the output of a module; ``unit_dim`` is the dimension of a layer's units, None for other modules."""
        if unit_dim is not None and isinstance(output, Tensor):
            self._unit_dims[output.ndim] = unit_dim
        if is_watched:
            self._record(name, output)

    def _record(self, name: str, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise TypeError(f"layers contains {name!r}, which outputs a {type(output).__name__}; it must be a tensor")
        if torch.is_grad_enabled() and transform_level() is None:
            # If no layer had an output with this number of dimensions, it was reshaped, usually flattened: units are last.
            dim = self._unit_dims.get(output.ndim, -1)
            key = name, output.shape[dim], dim < -1
            if key not in self._windows:
                self._windows[key] = _Window(dim < -1, self.samples)
            self._windows[key].add(output, dim)

    def _average(self, plasticity: Tensor) -> None:
        """Update the running mean, which needs constant memory, unlike a list, and stays accurate, unlike a sum."""
        self._plasticities += 1
        if self._mean_plasticity is None:
            self._mean_plasticity = plasticity
        else:
            self._mean_plasticity = self._mean_plasticity + (plasticity - self._mean_plasticity) / self._plasticities

    def _look_for_functions(self) -> None:
        """Check in the first pass whether the model applies functions to the outputs of the monitored layers."""
        for module in self.model.modules():
            if isinstance(module, LAYERS):
                self._searched[module] = self._hooks.add(module.register_forward_pre_hook, "_look_for_function")

    def _look_for_function(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transform_level() is not None:
            return
        self._searched[layer].remove()
        # A function that works in place also changes the recorded output, so no warning is needed.
        if inputs and isinstance(inputs[0], Tensor) and inputs[0]._version == 0:
            modules = self.model.modules()
            norms = {p for m in modules if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
            owners: dict[Tensor, str] = {
                p: name for name, watched in self._watched.items() for p in watched.parameters(recurse=False)
            }
            self._looks_before = function_before(inputs[0], owners, norms)
        if self._looks_before is not None:
            for handle in self._searched.values():
                handle.remove()

    def _of_activations(self, wanted: Collection[str]) -> dict[str, Tensor]:
        windows = Counter(name for name, _, _ in self._windows)
        widths = Counter((name, units) for name, units, _ in self._windows)
        figures: dict[str, Tensor] = {}
        for (name, units, are_channels), window in self._windows.items():
            kind = " channels" if are_channels and widths[name, units] > 1 else ""
            which = f"[{units}{kind}]" if windows[name] > 1 else ""
            figures |= {f"{figure}/{name}{which}": value for figure, value in window.figures(self.tau, wanted).items()}
        return figures

    def _of_parameters(self, wanted: Collection[str]) -> dict[str, Tensor]:
        weights = {f"/{name}": _wide(p.detach()) for name, p in self.model.named_parameters()}
        gradients = {f"/{name}": _wide(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        of_weights = {"weight_l1": l1_norm, "weight_l2": l2_norm}
        of_gradients = {"gradient_l1": l1_norm, "gradient_l2": l2_norm, "gradient_l0_share": l0_share}
        figures: dict[str, Tensor] = {}
        for tensors, definitions in ((weights, of_weights), (gradients, of_gradients)):
            chosen = {name: function for name, function in definitions.items() if name in wanted}
            for path, values in _with_all(tensors).items() if chosen else ():
                figures |= {f"{name}{path}": function(values) for name, function in chosen.items()}
        return figures

    def _of_matrices(self, wanted: Collection[str]) -> dict[str, Tensor]:
        ranks = {"effective_rank": _effective, "stable_rank": _stable}
        chosen = {name: function for name, function in ranks.items() if name in wanted}
        figures: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters() if chosen else ():
            if parameter.ndim > 1:
                singular = _singular_values(_wide(parameter.detach()).flatten(1))  # the slowest part of a snapshot
                figures |= {f"{rank}/{name}": function(singular) for rank, function in chosen.items()}
        return figures

    def _gates_in_words(self) -> list[str]:
        gates = self.optimizer.gates() if isinstance(self.optimizer, _Gated) else {}
        flat = [_wide(gate).flatten() for gate in gates.values()]
        if not flat:
            return []
        everywhere = torch.cat(flat)
        near = float(((everywhere > 0.45) & (everywhere < 0.55)).to(torch.float32).mean())
        words = f"gates: {_percent(near)} between 0.45 and 0.55"
        change = _change_of_step(gates)
        if near >= _NEARLY_ALL:
            words += ", so most weights learn as without gates at half the step size"
        if change is not None:
            words += f"; together, the gates change the step by {_percent(change)}"
        groups = getattr(self.optimizer, "param_groups", [])
        largest = max((group.get("beta_utility", 0.0) for group in groups), default=0.0)
        if near >= _NEARLY_ALL and (change is None or change < _HARDLY) and largest > 0:
            words += f"; try beta_utility smaller than {largest:g}"
        return [words]

    def _of_gates(self) -> dict[str, Tensor]:
        if not isinstance(self.optimizer, _Gated):
            return {}
        names: dict[object, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        names |= {module: name for name, module in self.model.named_modules()}
        return {
            f"gate_histogram/{names.get(key, key)}": gate_histogram(_wide(gates))
            for key, gates in self.optimizer.gates().items()
        }


def _change_of_step(gates: Mapping[Any, Tensor]) -> float | None:
    """Return the distance of the gates from ½, weighted by the gradients; None without gradients."""
    changed: list[float] = []
    whole: list[float] = []
    for param, gate in gates.items():
        if isinstance(param, Tensor) and param.grad is not None:
            grad, gate = _wide(param.grad), _wide(gate)
            spread = gate.reshape(
                gate.shape + (1,) * (grad.ndim - gate.ndim)
            )  # the gate of a feature applies to all its weights
            changed.append(float(l2_norm((2 * spread - 1) * grad)))
            whole.append(float(l2_norm(grad)))
    return math.hypot(*changed) / math.hypot(*whole) if any(whole) else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _watched(model: nn.Module, layers: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the modules to monitor, by name."""
    modules = dict(model.named_modules())
    hidden = [name for name, module in modules.items() if isinstance(module, LAYERS)][:-1]
    activations = [name for name, module in modules.items() if isinstance(module, ACTIVATION_MODULES)]
    chosen = list(layers) if layers is not None else activations or hidden
    unknown = [name for name in chosen if name not in modules]
    if unknown:
        raise ValueError(f"layers contains {unknown}, but the model's modules are {[name for name in modules if name]}")
    return {name: modules[name] for name in chosen}


def _unit_dim(module: nn.Module) -> int | None:
    """Return the dimension of a layer's units or channels, counted from the end; None for other modules."""
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)
    return -1 if isinstance(module, LAYERS) else None


def _with_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors and, under the empty name, all their entries together."""
    return tensors | {"": torch.cat([t.flatten() for t in tensors.values()])} if tensors else {}


def _wide(values: Tensor) -> Tensor:
    """Convert to a dense tensor of at least float32; all processes must call this for a sharded one."""
    whole: Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    dense = whole.to_dense() if whole.is_sparse else whole
    return dense.to(torch.promote_types(values.dtype, torch.float32))


def _float(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()
