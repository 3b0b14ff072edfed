"""Hidden features: which layer makes them, where they can be seen, and the gradient of a gate on each.

A gate, constant 1, multiplies every hidden unit (or channel of a convolution) behind its activation. There is no such gate
in the network: with output h the gate's gradient is ``Σ ∂L/∂h·h`` over the batch and a channel's positions, and a hook on
the activation computes that in the ordinary backward pass.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from upgd.curvature._backward import add_as_grad, any_nonzero, sum_by_unit, transform_level
from upgd.networks import ACTIVATION_MODULES, is_leaf

#: What to pass as ``features``: the activation's name or module for each layer's.
Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Feature:
    """The features of one layer, and the forward hook of the module that puts them out.

    It refers to modules alone, so that a model and its optimizer can be copied or pickled together and stay together.

    Attributes:
        name: the layer's name.
        layer: whose incoming weights and bias the features' utility gates.
        module: the activation, whose output the features are.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        module: nn.Module,
        other_layers: list[nn.Module],
        scaler: "torch.amp.GradScaler | None",
    ) -> None:
        self.name = name
        self.layer = layer
        self.module = module
        self._other_layers = other_layers
        self._scaler = scaler
        self._sum: tuple[int, Tensor] | None = None
        self._is_used = False  # since the last backward pass
        self._channel_dim = 1  # of the layer's output, if it is a convolution
        module.register_forward_hook(self)
        if not isinstance(layer, nn.Linear):
            layer.register_forward_hook(self._note_channel_dim)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the gates, one for each unit or channel; None before the first backward pass."""
        return None if self._sum is None else self._sum[1]

    @property
    def params(self) -> list[nn.Parameter]:
        """The incoming weights and the bias, if the layer has one."""
        return list(self.layer.parameters(recurse=False))

    def use_grad(self) -> Tensor | None:
        """The gradient of the gates, for a step; None before the first backward pass.

        If none has come since the step before, the layer was left out: the gates' gradient is zero as soon as that of the
        layer's parameters is, which others may have reset.
        """
        if self._sum is None:
            return None
        backward, total = self._sum
        if self._is_used:
            gradients = [param.grad for param in self.params if param.grad is not None]
            total = torch.where(any_nonzero(gradients), total, 0)
            self._sum = backward, total
        self._is_used = True
        return total

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradient of the gates."""
        if self._sum is not None:
            self._sum = None if set_to_none else (-1, torch.zeros_like(self._sum[1]))

    def remove(self) -> None:
        """Take the hook off."""
        for module, ours in ((self.module, self), (self.layer, self._note_channel_dim)):
            for number, hook in list(module._forward_hooks.items()):
                if hook == ours:
                    del module._forward_hooks[number]

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if not output.requires_grad or transform_level() is not None:
            return
        trainable = [param for param in self.params if param.requires_grad]
        if not trainable:
            return  # a frozen layer needs no gates
        self._check_origin(output)
        features, version, dim = output.detach(), output._version, self._unit_dim(output)

        def capture(grad: Tensor) -> None:
            if features._version != version:
                raise RuntimeError(
                    f"the features of {self.name!r} were changed in place after the forward pass, but their utility needs "
                    "them as they were; use inplace=False in what follows the activation."
                )
            with torch.no_grad():
                wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
                by_unit = sum_by_unit(grad.to(wide) * features, dim)
                if self._scaler is not None:
                    by_unit = by_unit / self._scaler.scale(by_unit.new_ones(()))
                self._sum = add_as_grad(self._sum, by_unit, trainable)
                self._is_used = False

        output.register_hook(capture)  # type: ignore[no-untyped-call]

    def _note_channel_dim(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        # With a batch or without: from what comes behind a pooling and a Flatten, this can no longer be told.
        self._channel_dim = output.ndim - 1 - len(layer.kernel_size)  # type: ignore[arg-type]

    def _unit_dim(self, output: Tensor) -> int:
        """The dimension of the activation's output along which the units or channels lie."""
        linear = isinstance(self.layer, nn.Linear)
        dim = output.ndim - 1 if linear else self._channel_dim
        units = self.layer.out_features if linear else self.layer.out_channels
        if dim >= output.ndim or output.shape[dim] != units:
            raise RuntimeError(
                f"the features of {self.name!r} are its {units} units or channels, but its {type(self.module).__name__} puts "
                f"out the shape {tuple(output.shape)}, in which they cannot be told apart; put the activation before what "
                "merges them, such as nn.Flatten()."
            )
        return dim

    def _check_origin(self, output: Tensor) -> None:
        """Is the output made of this layer's? Going back in the graph, no other layer's parameters may come first."""
        own = self.params
        others = [param for layer in self._other_layers for param in layer.parameters()]
        nodes: list[Any] = [output.grad_fn]
        while nodes:
            leaves = [node.variable for node in nodes if hasattr(node, "variable")]
            if any(leaf is param for leaf in leaves for param in own):
                return
            if any(leaf is param for leaf in leaves for param in others):
                break
            nodes = list({before: None for node in nodes for before, _ in node.next_functions if before is not None})
        self.remove()  # so that the model is of use without this optimizer
        raise RuntimeError(
            f"the {type(self.module).__name__} that was taken for the activation of {self.name!r} is called with something "
            f"else in the forward pass; say which module puts out its features, and no other layer's, with "
            f"features={{{self.name!r}: 'activation', ...}}, and give each layer an activation module of its own."
        )


def find(model: nn.Module, pairs: Pairs | None, scaler: "torch.amp.GradScaler | None") -> list[Feature]:
    """Find the features of a model and hook them: those of the pairs, or of all layers but the last."""
    found = _found_pairs(model) if pairs is None else _given_pairs(model, pairs)
    for name, layer, _ in found:
        _check_own_weight(name, layer)
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    return [
        Feature(name, layer, module, [other for other in layers if other is not layer], scaler)
        for name, layer, module in found
    ]


def _check_own_weight(name: str, layer: nn.Module) -> None:
    if is_parametrized(layer):
        raise TypeError(
            f"the incoming weights of the features of {name!r} are computed from other parameters (weight or spectral norm, "
            "another parametrization), which need not belong to a unit; take that off with "
            "torch.nn.utils.parametrize.remove_parametrizations, or leave the layer out with features={...}."
        )


def _found_pairs(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
    layers = [place for place, (_, module) in enumerate(leaves) if isinstance(module, _LAYERS)]
    if len(layers) < 2:
        raise ValueError(
            f"model must have two or more Linear or Conv layers, but this {type(model).__name__} has {len(layers)} and so no "
            "hidden features; use the weight-wise optimizer."
        )
    pairs: list[tuple[str, nn.Module, nn.Module]] = []
    for here, following in pairwise(layers):
        name, layer = leaves[here]
        between = [module for _, module in leaves[here + 1 : following]]
        candidates = [
            module for kind in (ACTIVATION_MODULES, nn.Identity) for module in between if isinstance(module, kind)
        ]
        if not candidates:
            raise ValueError(
                f"model has no activation module between the layers {name!r} and {leaves[following][0]!r}, so that the "
                f"features of {name!r} cannot be found; say where they are with features={{{name!r}: 'activation', ...}}, "
                "and write nn.ReLU() for F.relu."
            )
        pairs.append((name, layer, candidates[0]))
    return pairs


def _given_pairs(model: nn.Module, pairs: Pairs) -> list[tuple[str, nn.Module, nn.Module]]:
    given = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    names = {module: name for name, module in model.named_modules()}

    def resolve(which: Any) -> nn.Module:
        module = which if isinstance(which, nn.Module) else dict(model.named_modules()).get(which)
        if module is None or module not in names:
            raise ValueError(f"features names {which!r}, but the model has no such module; see model.named_modules().")
        return module

    found: list[tuple[str, nn.Module, nn.Module]] = []
    for layer, module in ((resolve(layer), resolve(module)) for layer, module in given):
        if not isinstance(layer, _LAYERS):
            raise ValueError(
                f"features must map Linear or Conv layers to activations, but {names[layer]!r} is a {type(layer).__name__}."
            )
        found.append((names[layer], layer, module))
    for kind, modules in (("layer", [layer for _, layer, _ in found]), ("activation", [m for *_, m in found])):
        twice = next((m for m in modules if modules.count(m) > 1), None)
        if twice is not None:
            raise ValueError(
                f"features names the {kind} {names[twice]!r} twice; each belongs to one pair: give each layer an activation "
                "module of its own."
            )
    if not found:
        raise ValueError("features must name one pair of layer and activation or more, but it is empty.")
    return found
