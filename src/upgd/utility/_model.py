"""Looking at a model while it computes: the order of its modules, its hidden features, gates on these."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from upgd.networks import ACTIVATION_FUNCTIONS, ACTIVATION_MODULES, LAYERS, is_leaf

#: A loss as a function of outputs and targets: a module such as ``nn.MSELoss()``, or any function.
Criterion = Callable[[Tensor, Tensor], Tensor]

_NOTHING_BETWEEN = "there is no module between two layers; use nn.ReLU() for F.relu"


class Call(NamedTuple):
    """A module without children that took part in a forward pass, with copies of its tensors: others may work in place."""

    name: str
    module: nn.Module
    input: Any
    output: Any


class Feature(NamedTuple):
    """The hidden features that one module puts out."""

    name: str
    module: nn.Module
    #: The dimension of the output, from the end, along which the units or channels lie.
    dim: int
    #: The gates that change nothing: a vector of ones, one for each unit or channel.
    open: Tensor

    def along_output(self, gates: Tensor) -> Tensor:
        """A vector of gates in the shape in which it multiplies the output."""
        return gates.reshape(gates.shape + (1,) * (-1 - self.dim))


def check_repeatable(model: nn.Module) -> None:
    """Refuse a model that gives another loss for the same sample when asked again."""
    for name, module in model.named_modules():
        changes = (
            isinstance(module, _BatchNorm)
            or (isinstance(module, _NormBase) and module.track_running_stats)
            or (isinstance(module, _DropoutNd) and module.p > 0)
        )
        if module.training and changes:
            raise ValueError(
                f"model has the {type(module).__name__} {name!r} in training mode, so that one sample has no one loss;"
                " call model.eval() first"
            )


@torch.no_grad()
def calls(model: nn.Module, x: Tensor) -> list[Call]:
    """The modules without children, in the order in which a forward pass calls them."""
    check_repeatable(model)
    seen: list[Call] = []
    inputs: dict[nn.Module, Any] = {}

    def before(module: nn.Module, args: Any) -> None:
        inputs[module] = _copied(args[0]) if args else None

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: seen.append(Call(name, module, inputs.pop(module), _copied(output)))

    leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
    handles = [module.register_forward_pre_hook(before) for _, module in leaves]
    try:
        with hooked([(module, note(name)) for name, module in leaves]):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


def find_features(model: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> list[Feature]:
    """The hidden features of a model: what the activations between its layers put out, or the modules named."""
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
            f"features names {sorted(missing)}, but "
            + (f"the modules between two layers are {between_layers}" if between_layers else _NOTHING_BETWEEN)
        )
    if not found:
        raise ValueError("model has no hidden features: it has fewer than two Linear or convolution layers")
    return found


def _activation(layer: Call, between: list[Call]) -> Call:
    """The activation that follows a layer. An Identity stands for one only where there is no other."""
    activations = [call for call in between if isinstance(call.module, ACTIVATION_MODULES)]
    activations += [call for call in between if isinstance(call.module, nn.Identity)]
    if not activations:
        raise ValueError(
            f"no activation module follows the layer {layer.name!r}, so its features cannot be found; name the"
            " modules that put out hidden features, such as features=['0.act', '1.act'], or use nn.ReLU() for F.relu"
        )
    return activations[0]


def _feature(call: Call, layer: Call, order: list[Call]) -> Feature:
    if sum(other.module is call.module for other in order) > 1:
        raise ValueError(f"the module {call.name!r} is called more than once; give each layer an activation of its own")
    dim = _unit_dim(call, layer)
    return Feature(call.name, call.module, dim, call.output.new_ones(call.output.shape[dim]))


def _unit_dim(call: Call, layer: Call) -> int:
    """The dimension of a call's output, from the end, along which the units or channels of the layer before it lie."""
    if isinstance(layer.module, nn.Linear):
        return -1
    dim: int = -1 - len(layer.module.kernel_size)  # type: ignore[arg-type]
    if call.output.ndim == layer.output.ndim:
        return dim
    # Something flattened in between. If channels have one position left, they are where they were, from the front.
    dim += layer.output.ndim - call.output.ndim
    channels = layer.module.out_channels
    if dim >= 0 or call.output.shape[dim] != channels:
        raise ValueError(
            f"features cannot be the {channels} channels of {layer.name!r} where the module {call.name!r} puts out the shape"
            f" {tuple(call.output.shape)}, in which they cannot be told apart; put the activation before what merges them,"
            " such as nn.Flatten()"
        )
    return dim


@contextmanager
def gated(found: Sequence[Feature], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """While this holds, the features named in ``gates`` are multiplied by their gate."""

    def multiply(feature: Feature) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda _module, _inputs, output: output * feature.along_output(gates[feature.name])

    with hooked([(feature.module, multiply(feature)) for feature in found if feature.name in gates]):
        yield


@contextmanager
def hooked(hooks: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """While this holds, the modules have these forward hooks."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def function_before(x: Tensor, layers: Mapping[Tensor, str], passed: Container[Tensor] = ()) -> tuple[str, str] | None:
    """The layer that ``x`` was computed from, and the activation function in between. None if there is no such function.

    Hooks cannot see functions, but autograd remembers them. From ``x`` we go back until we meet parameters of a layer, or of
    something that we know nothing about.

    Args:
        x: what another layer is called with.
        layers: the layers' names by their parameters.
        passed: parameters that we may go past, of normalisations.
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
