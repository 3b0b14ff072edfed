"""Inspect a model during a forward pass: the order of its modules, its hidden features, and gates on these."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from upgd.networks import ACTIVATION_FUNCTIONS, ACTIVATION_MODULES, LAYERS, is_leaf

#: A loss as a function of outputs and targets: a module such as ``nn.MSELoss()``, or any function.
Criterion = Callable[[Tensor, Tensor], Tensor]

#: A method that adds a hook, such as ``module.register_forward_hook``, and the hook.
Hook = tuple[Callable[..., RemovableHandle], Callable[..., Any]]

_NOTHING_BETWEEN = "there is no module between two layers; use nn.ReLU() instead of F.relu"


class Call(NamedTuple):
    """A leaf module called in a forward pass, with copies of its tensors, because later modules may modify them in place."""

    name: str
    module: nn.Module
    input: Any
    output: Any


class Feature(NamedTuple):
    """The hidden features that one module outputs."""

    name: str
    module: nn.Module
    #: The output dimension of the units or channels, counted from the end.
    dim: int
    #: Neutral gates: a vector of ones, one per unit or channel.
    open: Tensor

    def along_output(self, gates: Tensor) -> Tensor:
        """Reshape a vector of gates so that it broadcasts against the output."""
        return gates.reshape(gates.shape + (1,) * (-1 - self.dim))


def check_repeatable(model: nn.Module) -> None:
    """Raise ValueError if the model does not give the same loss for the same sample every time."""
    for name, module in model.named_modules():
        changes = (
            isinstance(module, _BatchNorm)
            or (isinstance(module, _NormBase) and module.track_running_stats)
            or (isinstance(module, _DropoutNd) and module.p > 0)
        )
        if module.training and changes:
            raise ValueError(
                f"model has the {type(module).__name__} {name!r} in training mode, so the loss of a sample is not unique;"
                " call model.eval() first"
            )


@torch.no_grad()
def calls(model: nn.Module, x: Tensor) -> list[Call]:
    """Return the leaf modules in the order in which a forward pass calls them."""
    check_repeatable(model)
    seen: list[Call] = []
    inputs: dict[nn.Module, Any] = {}

    def before(module: nn.Module, args: Any) -> None:
        inputs[module] = _copied(args[0]) if args else None

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: seen.append(Call(name, module, inputs.pop(module), _copied(output)))

    leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
    hooks: list[Hook] = [(module.register_forward_pre_hook, before) for _, module in leaves]
    hooks += [(module.register_forward_hook, note(name)) for name, module in leaves]
    with hooked(hooks):
        model(x)
    return seen


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


def find_features(model: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> list[Feature]:
    """Return the hidden features of a model: the outputs of the activations between its layers, or of the named modules."""
    order = calls(model, x)
    layers = [place for place, call in enumerate(order) if isinstance(call.module, LAYERS)]
    found = []
    for here, following in pairwise(layers):
        between = order[here + 1 : following]
        named = [call for call in between if call.name in (names or ())]
        chosen = [_activation(order[here], between)] if names is None else named
        found += [_feature(call, order[here], order) for call in chosen]
    missing = set(names or ()) - {feature.name for feature in found}
    if missing:
        inner = order[min(layers, default=0) : max(layers, default=0)]
        between_layers = [call.name for call in inner if not isinstance(call.module, LAYERS)]
        raise ValueError(
            f"features contains {sorted(missing)}, but "
            + (f"the modules between two layers are {between_layers}" if between_layers else _NOTHING_BETWEEN)
        )
    if not found:
        raise ValueError("model has no hidden features: it has fewer than two Linear or convolution layers")
    return found


def _activation(layer: Call, between: list[Call]) -> Call:
    """Return the activation that follows a layer, or an Identity if there is no other."""
    activations = [call for call in between if isinstance(call.module, ACTIVATION_MODULES)]
    activations += [call for call in between if isinstance(call.module, nn.Identity)]
    if not activations:
        raise ValueError(
            f"no activation module follows the layer {layer.name!r}, so its features cannot be found; name the"
            " modules that output hidden features, such as features=['0.act', '1.act'], or use nn.ReLU() instead of F.relu"
        )
    return activations[0]


def _feature(call: Call, layer: Call, order: list[Call]) -> Feature:
    if sum(other.module is call.module for other in order) > 1:
        raise ValueError(f"the module {call.name!r} is called more than once; give each layer its own activation")
    dim = _unit_dim(call, layer)
    return Feature(call.name, call.module, dim, call.output.new_ones(call.output.shape[dim]))


def _unit_dim(call: Call, layer: Call) -> int:
    """Return the output dimension, counted from the end, of the units or channels of the preceding layer."""
    if isinstance(layer.module, nn.Linear):
        return -1
    dim: int = -1 - len(layer.module.kernel_size)  # type: ignore[arg-type]
    if call.output.ndim == layer.output.ndim:
        return dim
    # The output was flattened. If channels have a single position left, they keep their place from the front.
    dim += layer.output.ndim - call.output.ndim
    channels = layer.module.out_channels
    if dim >= 0 or call.output.shape[dim] != channels:
        raise ValueError(
            f"features cannot be the {channels} channels of {layer.name!r}, because the module {call.name!r} outputs the"
            f" shape {tuple(call.output.shape)}, in which they are merged; put the activation before the module that merges"
            " them, such as nn.Flatten()"
        )
    return dim


@contextmanager
def gated(found: Sequence[Feature], gates: Mapping[str, Tensor], at: str = "output") -> Iterator[None]:
    """Context manager that multiplies the features named in ``gates``, or the inputs of their modules, by their gates."""

    def multiply(feature: Feature) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda _module, _inputs, output: output * feature.along_output(gates[feature.name])

    def multiply_input(feature: Feature) -> Callable[[nn.Module, Any], Any]:
        return lambda _module, inputs: (inputs[0] * feature.along_output(gates[feature.name]), *inputs[1:])

    own = [feature for feature in found if feature.name in gates]
    if at == "output":
        hooks: list[Hook] = [(feature.module.register_forward_hook, multiply(feature)) for feature in own]
    else:
        hooks = [(feature.module.register_forward_pre_hook, multiply_input(feature)) for feature in own]
    with hooked(hooks):
        yield


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Context manager that adds hooks to modules."""
    handles = [register(hook) for register, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def function_before(x: Tensor, layers: Mapping[Tensor, str], passed: Container[Tensor] = ()) -> tuple[str, str] | None:
    """Return the layer that ``x`` was computed from and the activation function in between, or None.

    Hooks do not see functional calls, but autograd records them. The search goes back from ``x`` until it meets the
    parameters of a layer or unknown parameters.

    Args:
        x: the input of another layer.
        layers: names of the layers by their parameters.
        passed: parameters to skip, such as those of normalizations.
    """
    function = None
    nodes: list[Any] = [x.grad_fn] if x.grad_fn is not None else []
    while nodes:
        leaves = [node.variable for node in nodes if hasattr(node, "variable") and node.variable not in passed]
        if leaves:
            layer = next((layers[leaf] for leaf in leaves if leaf in layers), None)
            return (layer, function.lower()) if layer is not None and function is not None else None
        names = [node.name().split("Backward")[0] for node in nodes]
        function = next((name for name in names if name in ACTIVATION_FUNCTIONS), function)
        nodes = list({before: None for node in nodes for before, _ in node.next_functions if before is not None})
    return None
