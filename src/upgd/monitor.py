"""What is happening inside a network that keeps learning: plasticity, dormant units, norms, ranks, gates.

The functions are the definitions, pure and batched: tensors may begin with *learner dimensions*, and then there is one
result for each learner. :class:`Monitor` applies them to a model in an ordinary training loop.
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

#: From this share of gates near ½ on, a summary says what that means; and it says how to get others where all gates together
#: change the step by less than this.
_NEARLY_ALL, _HARDLY = 0.95, 0.1
#: What snapshots can contain.
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
    """How much of a sample's loss one update on that sample removed: ``clamp(1 − after/max(before, 1e-8), 0, 1)``.

    Example:
        >>> sample_plasticity(torch.tensor([2.0, 1.0]), torch.tensor([0.5, 3.0]))
        tensor([0.7500, 0.0000])
    """
    return (1 - loss_after / loss_before.clamp(min=1e-8)).clamp(0, 1)


def windowed_means(values: Tensor, window: int) -> Tensor:
    """The means over successive windows of the last dimension. The last window may be shorter; it is never dropped.

    Example:
        >>> windowed_means(torch.tensor([1.0, 3.0, 5.0, 7.0, 100.0]), window=2)
        tensor([  2.,   6., 100.])
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    return torch.stack([part.mean(-1) for part in torch.split(values, window, dim=-1)], -1)


def loss_of_plasticity(curve: Tensor) -> Tensor:
    """The first minus the last entry of a curve of windowed mean plasticities (or accuracies), along the last
    dimension: positive if plasticity was lost."""
    return curve[..., 0] - curve[..., -1]


def forgetting(curve: Tensor) -> Tensor:
    """``A_k − A_{k+1}`` of a curve with one mean accuracy for each task, along the last dimension."""
    return curve[..., :-1] - curve[..., 1:]


def dormant_share(activations: Tensor, tau: float = 0.0) -> Tensor:
    """The share of τ-dormant units: those whose mean |h| over samples is at most τ times the layer's mean.

    Args:
        activations: ``(*learners, samples, units)``.
        tau: τ. With 0, only units that are always zero are dormant.

    Returns:
        ``(*learners,)``; 1 where the whole layer is silent.

    Example:
        >>> dormant_share(torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]]), tau=0.75)
        tensor(0.6667)
    """
    magnitude = activations.abs().mean(-2)
    return (magnitude <= tau * magnitude.mean(-1, keepdim=True)).to(magnitude.dtype).mean(-1)


def zero_share(activations: Tensor) -> Tensor:
    """The share of activations that are exactly zero, of ``(*learners, samples, units)``."""
    return (activations == 0).flatten(-2).to(_float(activations)).mean(-1)


def l1_norm(values: Tensor, learner_dims: int = 0) -> Tensor:
    """``Σ |x|``, for each learner."""
    return values.flatten(learner_dims).abs().sum(-1) if values.ndim > learner_dims else values.abs()


def l2_norm(values: Tensor, learner_dims: int = 0) -> Tensor:
    """``√(Σ x²)``, for each learner."""
    return l1_norm(values, learner_dims) if values.ndim == learner_dims else values.flatten(learner_dims).norm(dim=-1)


def l0_share(values: Tensor, learner_dims: int = 0) -> Tensor:
    """``‖x‖₀/n``, the share of entries that are not zero, for each learner."""
    nonzero = (values != 0).to(_float(values))
    return nonzero.flatten(learner_dims).mean(-1) if values.ndim > learner_dims else nonzero


def effective_rank(matrix: Tensor) -> Tensor:
    """``exp(−Σ p log p)`` with ``p = s/Σs`` of the singular values ``s``, for matrices in the last two dimensions.

    Between 0 (of a zero matrix) and the number of singular values, which it has if they are all equal. NaN where a matrix
    is not finite.
    """
    return _effective(_singular_values(matrix))


def stable_rank(matrix: Tensor) -> Tensor:
    """``‖W‖²_F / ‖W‖²₂``, for matrices in the last two dimensions; 0 for a zero matrix, NaN where one is not finite."""
    return _stable(_singular_values(matrix))


def _effective(singular: Tensor) -> Tensor:
    total = singular.sum(-1, keepdim=True)
    p = singular / total.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(total.squeeze(-1) == 0, 0, torch.exp(torch.special.entr(p).sum(-1)))


def _stable(singular: Tensor) -> Tensor:
    # The ratios first: squares of large or small values would leave the range of numbers.
    ratios = singular / singular[..., :1].clamp(min=torch.finfo(singular.dtype).tiny)
    return (ratios**2).sum(-1)


def _singular_values(matrix: Tensor) -> Tensor:
    """Of matrices in the last two dimensions; NaN where one is not finite, for which LAPACK would raise and print."""
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    singular = torch.linalg.svdvals(torch.where(finite, matrix, 0))
    return torch.where(finite.squeeze(-1), singular, math.nan)


def gate_histogram(gates: Tensor, bins: int = 10, learner_dims: int = 0) -> Tensor:
    """The share of gates ū in each of ``bins`` equal parts of [0, 1], for each learner: ``(*learners, bins)``.

    A part contains its lower end, the last one its upper end too. Gates that are NaN do not count; where all are, so are
    the shares.
    """
    flat = gates.flatten(learner_dims)
    known = ~flat.isnan()
    part = (flat.nan_to_num() * bins).clamp(0, bins - 1).long()
    counts = torch.zeros(*flat.shape[:-1], bins, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(-1, part, known.long())  # whole numbers, for sums of ones in 16 bits end at 256
    return counts.to(_wide(flat).dtype) / known.sum(-1, keepdim=True)


@runtime_checkable
class _Gated(Protocol):
    """An optimizer that says how useful it holds things to be."""

    def gates(self) -> dict[Any, Tensor]: ...


class _Window:
    """What one module put out for the last samples, kept cheaply: computing waits until somebody asks.

    Args:
        has_positions: whether its units are channels, each with a value at many positions.
        samples: how many samples to keep.
    """

    def __init__(self, has_positions: bool, samples: int) -> None:
        self.has_positions = has_positions
        self.samples = samples
        #: Of each forward pass, |h| and the share of zeros (samples, units): of a channel, the means over its positions.
        self._passes: deque[tuple[Tensor, Tensor]] = deque()
        self._kept = 0

    def add(self, output: Tensor, dim: int) -> None:
        """Keep an output whose units or channels lie along the dimension ``dim``, counted from the end."""
        output = output.detach()
        units, positions = output.shape[dim], math.prod(output.shape[output.ndim + dim + 1 :])
        output = output.reshape(-1, units, positions)
        if len(output) > self.samples:
            output = output[-self.samples :].clone()  # a mere view would keep all of it alive
        # Units without positions are kept as they are, which costs nothing.
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
    """Looks inside a model while it learns.

    Forward hooks keep what the hidden layers put out in the last training passes; figures are computed only when
    :meth:`snapshot` is called. Passes under ``torch.no_grad()`` or ``torch.func`` are not recorded. Call it after
    ``loss.backward()`` and before the gradients are cleared. A copy of the model is not looked at, unless the monitor is
    copied with it. The hooks are gone as soon as the monitor is.

    Args:
        model: any module with Linear or convolution layers.
        optimizer: if it has a method ``gates()``, as :class:`upgd.UPGD` does, snapshots contain histograms of the gates.
        tau: the τ below which units count as dormant.
        samples: how many of the last samples are kept for the figures about activations. Of a convolution only means over
            positions are kept.
        layers: names of the modules whose outputs are looked at. By default the activation modules; in a model that has
            none, all Linear and convolution layers but the last. Of a model that calls functions instead, such as
            ``F.relu``, these are the units before their activation, of which hardly any is ever zero: the first snapshot
            warns. Write activations as modules, such as ``nn.ReLU()``, to look behind them.

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
        #: By a module's name, its number of units and whether these are channels: an activation module may serve several
        #: layers.
        self._windows: dict[tuple[str, int, bool], _Window] = {}
        #: In this forward pass: along which dimension the units of the last layer lay that put out so many dimensions.
        self._unit_dims: dict[int, int] = {}
        self._mean_plasticity: Tensor | None = None
        self._plasticities = 0
        self._hooks = Hooks(self)
        self._hook_outputs()
        #: A layer, and the function behind it that we look before; once one was seen, until that was said.
        self._looks_before: tuple[str, str] | None = None
        #: The layers before which there may be such a function.
        self._searched: dict[nn.Module, RemovableHandle] = {}
        if layers is None and not any(isinstance(module, ACTIVATION_MODULES) for module in self._watched.values()):
            self._look_for_functions()

    def snapshot(self, select: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Compute the figures and return them as ``"figure/layer"`` → number (``gate_histogram`` → list of ten shares).

        * ``dormant_share``, ``zero_share``, ``effective_rank`` of hidden layers, over the last samples (the rank only for
          layers without positions)
        * ``weight_l1``, ``weight_l2``, ``gradient_l1``, ``gradient_l2``, ``gradient_l0_share`` of parameters; without
          ``/layer`` of all of them together
        * ``effective_rank``, ``stable_rank`` of weight matrices; of a convolution, with one row for each filter
        * ``gate_histogram`` of the optimizer's gates
        * ``sample_plasticity``, the mean over what :meth:`plasticity` has measured since the last snapshot that
          contained it

        Args:
            select: names of the figures to compute, such as ``["dormant_share", "weight_l2"]``; all of them by default.
                Ranks take most of the time, because they need singular values.
        """
        wanted = _FIGURES if select is None else (select,) if isinstance(select, str) else tuple(select)
        if unknown := [name for name in wanted if name not in _FIGURES]:
            raise ValueError(f"select names {unknown}; choose from {', '.join(_FIGURES)}")
        if self._looks_before is not None:
            layer, function = self._looks_before
            self._looks_before = None
            warnings.warn(
                f"the model has no activation modules, so that the monitor looks at what the layer {layer!r}, for one, puts "
                f"out before its {function}; write activations as modules, such as nn.ReLU() for F.relu, or name the modules "
                "to look at with layers=[...]",
                stacklevel=2,
            )
        if (
            self._watched
            and not self._windows
            and any(parameter.grad is not None for parameter in self.model.parameters())
        ):
            warnings.warn(
                "the monitor has seen no forward pass, but the model has gradients; attach it to the model that computes, "
                f"before it does.{if_compiled()}",
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
        """What the gates and the hidden layers do, in a few lines of text.

        It says when the gates do next to nothing: where nearly all of them are close to ½, most weights learn as with
        gradient descent at half the step size. The change of the step is ``‖(2·ū − 1)·g‖ / ‖g‖``, the part of a step of
        half the size that the gates add or take away; it needs gradients.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
            >>> monitor = Monitor(model)
            >>> model(torch.ones(2, 4)).sum().backward()
            >>> print(monitor.summary())
            layer '1': 8 units, 0 % dormant, 0 % of the activations zero
        """
        with torch.no_grad():
            lines = self._gates_in_words()
            for (name, units, _), window in self._windows.items():
                shares = window.figures(self.tau, ("dormant_share", "zero_share"))
                dormant, zero = (_percent(float(share)) for share in shares.values())
                lines.append(f"layer {name!r}: {units} units, {dormant} dormant, {zero} of the activations zero")
        return "\n".join(lines) or "nothing to tell: the monitor has seen no forward pass"

    def plasticity(self, loss_before: Tensor, closure: Callable[[], Tensor]) -> Tensor:
        """Measure the sample plasticity of the update that was just made.

        Args:
            loss_before: the loss that the update was made from.
            closure: computes the loss on the same samples again; called without gradients, its pass is not recorded.

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
        """Take the hooks off the model."""
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
        """A forward pass begins."""
        self._unit_dims = {}

    def _after_module(
        self, name: str, unit_dim: int | None, is_watched: bool, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """See what a module puts out; ``unit_dim`` is where the units of a layer lie, and None for other modules."""
        if unit_dim is not None and isinstance(output, Tensor):
            self._unit_dims[output.ndim] = unit_dim
        if is_watched:
            self._record(name, output)

    def _record(self, name: str, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise TypeError(f"layers names {name!r}, which puts out a {type(output).__name__}; it must be a tensor")
        if torch.is_grad_enabled() and transform_level() is None:
            # What no layer has put out so many dimensions of was reshaped since, mostly flattened: its units lie last.
            dim = self._unit_dims.get(output.ndim, -1)
            key = name, output.shape[dim], dim < -1
            if key not in self._windows:
                self._windows[key] = _Window(dim < -1, self.samples)
            self._windows[key].add(output, dim)

    def _average(self, plasticity: Tensor) -> None:
        """Take a plasticity into the mean. It does not grow, as a list would, and loses no small numbers, as a sum would."""
        self._plasticities += 1
        if self._mean_plasticity is None:
            self._mean_plasticity = plasticity
        else:
            self._mean_plasticity = self._mean_plasticity + (plasticity - self._mean_plasticity) / self._plasticities

    def _look_for_functions(self) -> None:
        """See, in the first pass, whether the model applies functions to what the watched layers put out."""
        for module in self.model.modules():
            if isinstance(module, LAYERS):
                self._searched[module] = self._hooks.add(module.register_forward_pre_hook, "_look_for_function")

    def _look_for_function(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transform_level() is not None:
            return
        self._searched[layer].remove()
        # A function that works in place changes what we keep, too: there is nothing to say about it.
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
                singular = _singular_values(_wide(parameter.detach()).flatten(1))  # takes most of a snapshot's time
                figures |= {f"{rank}/{name}": function(singular) for rank, function in chosen.items()}
        return figures

    def _gates_in_words(self) -> list[str]:
        gates = self.optimizer.gates() if isinstance(self.optimizer, _Gated) else {}
        flat = [_wide(gate).flatten() for gate in gates.values()]
        if not flat:
            return []
        everywhere = torch.cat(flat)
        near = float(((everywhere > 0.45) & (everywhere < 0.55)).to(torch.float32).mean())
        words = f"gates: {_percent(near)} of them lie between 0.45 and 0.55"
        change = _change_of_step(gates)
        if near >= _NEARLY_ALL:
            words += ", so that most weights learn as without gates at half the step size"
        if change is not None:
            words += f"; all gates together change the step by {_percent(change)}"
        groups = getattr(self.optimizer, "param_groups", [])
        largest = max((group.get("beta_utility", 0.0) for group in groups), default=0.0)
        if near >= _NEARLY_ALL and (change is None or change < _HARDLY) and largest > 0:
            words += f"; try a smaller beta_utility than {largest:g}"
        return [words]

    def _of_gates(self) -> dict[str, Tensor]:
        if not isinstance(self.optimizer, _Gated):
            return {}
        names: dict[object, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        names |= {module: name for name, module in self.model.named_modules()}
        return {
            f"gate_histogram/{names.get(key, key)}": gate_histogram(gates)
            for key, gates in self.optimizer.gates().items()
        }


def _change_of_step(gates: Mapping[Any, Tensor]) -> float | None:
    """How far the gates are from ½, weighted by the gradients that they let through; None without gradients."""
    changed: list[float] = []
    whole: list[float] = []
    for param, gate in gates.items():
        if isinstance(param, Tensor) and param.grad is not None:
            grad = _wide(param.grad)
            spread = gate.reshape(
                gate.shape + (1,) * (grad.ndim - gate.ndim)
            )  # a feature's gate is that of its weights
            changed.append(float(l2_norm((2 * spread - 1) * grad)))
            whole.append(float(l2_norm(grad)))
    return math.hypot(*changed) / math.hypot(*whole) if any(whole) else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _watched(model: nn.Module, layers: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to look at."""
    modules = dict(model.named_modules())
    hidden = [name for name, module in modules.items() if isinstance(module, LAYERS)][:-1]
    activations = [name for name, module in modules.items() if isinstance(module, ACTIVATION_MODULES)]
    chosen = list(layers) if layers is not None else activations or hidden
    unknown = [name for name in chosen if name not in modules]
    if unknown:
        raise ValueError(f"layers names {unknown}, but the model's modules are {[name for name in modules if name]}")
    return {name: modules[name] for name in chosen}


def _unit_dim(module: nn.Module) -> int | None:
    """The dimension of a layer's output, from the end, along which its units or channels lie; None if it is no layer."""
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)
    return -1 if isinstance(module, LAYERS) else None


def _with_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors and, under the empty name, all their entries together."""
    return tensors | {"": torch.cat([t.flatten() for t in tensors.values()])} if tensors else {}


def _wide(values: Tensor) -> Tensor:
    """With float32's precision at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _float(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()
