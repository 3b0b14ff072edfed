"""Hidden features: the layer and activation of each, and the gradient of a gate on it.

Every hidden unit (or channel of a convolution) has a gate with the constant value 1 after its activation. The gate is not
part of the network: its gradient is ``Σ ∂L/∂h·h`` over the batch and a channel's positions for the output h, and a hook on
the activation computes it in the ordinary backward pass.

The features of a layer are the output of the first activation module after it in the forward pass. Hooks mark the nodes
that layers and activations create in the autograd graph. From the output of an activation, the graph is searched backward
for the nearest marks; marked layers own the features. One activation module may therefore serve several layers, and layers
without an activation, such as heads, have no features.
"""

import warnings
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from upgd.curvature._backward import add_as_grad, any_nonzero, sum_by_unit, transform_level
from upgd.curvature._hooks import Hooks
from upgd.networks import ACTIVATION_FUNCTIONS, ACTIVATION_MODULES, CReLU, is_leaf
from upgd.optim._sharded import is_flattened, is_sharded

#: Type of ``features``: for each layer, by name or module, its activation.
Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Operations that keep every unit in place, by their name in autograd without "Backward0".
_KEEP_UNITS = frozenset(
    [
        *("Add", "Sub", "Mul", "Div", "NativeDropout", "ToCopy", "Clone", "Alias"),
        *("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"),
        *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeGroupNorm", "NativeLayerNorm"),
        *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D", "AvgPool3D", "MkldnnMaxPool2D", "Mean"),
        *("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    ]
)


class Feature:
    """The features of one layer.

    Attributes:
        name: the layer's name.
        layer: the layer whose weights and bias are gated.
        module: the activation whose output the features are; None while unknown.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        module: nn.Module | None,
        scaler: "torch.amp.GradScaler | None",
        keeps_outputs: bool = False,
    ) -> None:
        self.name = name
        self.layer = layer
        self.module = module
        self.module_name = ""
        #: Whether the module was called after the layer.
        self.is_seen = False
        #: Whether the module was also called with other inputs.
        self.is_shared = False
        self._scaler = scaler
        self._sum: tuple[int, Tensor] | None = None
        self._is_used = False  # since the last backward pass
        self._channel_dim = 1  # of the layer's output, if it is a convolution
        #: The layers that take the features as input, with the operations in between.
        self.followers: dict[nn.Module, frozenset[str]] = {}
        self._keeps_outputs = keeps_outputs
        self._outputs: list[tuple[Tensor, Tensor]] = []  # since the last step

    def __repr__(self) -> str:
        module = "unknown" if self.module is None else f"{type(self.module).__name__} {self.module_name!r}"
        kind = "units" if isinstance(self.layer, nn.Linear) else "channels"
        return f"Feature({self.units} {kind} of {type(self.layer).__name__} {self.name!r}, output of {module})"

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the gates, one entry per unit or channel; None before the first backward pass."""
        return None if self._sum is None else self._sum[1]

    @property
    def params(self) -> list[nn.Parameter]:
        """The incoming weights and the bias, if the layer has one."""
        return list(self.layer.parameters(recurse=False))

    @property
    def units(self) -> int:
        """The number of units or channels."""
        layer: Any = self.layer
        return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)

    def use_grad(self) -> Tensor | None:
        """Return the gradient of the gates for a step; None before the first backward pass.

        Without a backward pass since the last step, the layer was not used, and the gates' gradient is zero if that of the
        layer's parameters is.
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

    @property
    def follower(self) -> Any:
        """Return the layer that takes the features as input; its weights are the outgoing weights."""
        found = list(self.followers.items())
        if len(found) == 1:
            layer: Any = found[0][0]
            if found[0][1] <= _KEEP_UNITS and layer.weight.shape[1] % (self.units * self.outputs_per_unit) == 0:
                return layer
        why = {0: "no Linear or Conv layer takes them", 1: "they are rearranged before the next layer takes them"}
        raise RuntimeError(
            f"the outgoing weights of the features of {self.name!r} cannot be found, because "
            f"{why.get(len(found), f'{len(found)} layers take them')}; leave the layer out with features={{...}}, or use a "
            "method that works on weights"
        )

    def curvature_by(self, curvature: Any) -> Tensor:
        """Return HesScale's curvature of the gates, one entry per unit."""
        by_output: Tensor = curvature.feature_diagonal(self.module)
        return by_output.view(self.outputs_per_unit, -1).sum(0)

    def take_outputs(self) -> tuple[Tensor, Tensor] | None:
        """Return the features and the gradient of the loss with respect to them, each ``(units, samples · positions)``, of
        all backward passes since the last call; None if there were none."""
        taken, self._outputs = self._outputs, []
        if not taken:
            return None
        return torch.cat([one for one, _ in taken], 1), torch.cat([gradient for _, gradient in taken], 1)

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradient of the gates."""
        self._outputs = []
        if self._sum is not None:
            self._sum = None if set_to_none else (-1, torch.zeros_like(self._sum[1]))

    def note_channel_dim(self, output: Tensor) -> None:
        """Record the channel dimension of the layer's output, with or without a batch; it cannot be inferred after pooling
        and Flatten."""
        if not isinstance(self.layer, nn.Linear):
            self._channel_dim = output.ndim - 1 - len(self.layer.kernel_size)  # type: ignore[arg-type]

    @property
    def outputs_per_unit(self) -> int:
        """Number of outputs per unit: 2 after CReLU."""
        return 2 if isinstance(self.module, CReLU) else 1

    def unit_dim(self, output: Tensor, each: int = 1) -> int | None:
        """Return the dimension of units or channels in an activation's output; None if they cannot be distinguished."""
        dim = output.ndim - 1 if isinstance(self.layer, nn.Linear) else self._channel_dim
        return dim if dim < output.ndim and output.shape[dim] == each * self.units else None

    def capture(self, output: Tensor) -> None:
        """Make the backward pass through this output of the activation accumulate the gates' gradient."""
        self.is_seen = True
        trainable = [param for param in self.params if param.requires_grad]
        if not trainable:
            return  # a frozen layer needs no gates
        features, version, each = output.detach(), output._version, self.outputs_per_unit
        dim = self.unit_dim(output, each)
        if dim is None:
            raise RuntimeError(
                f"the features of {self.name!r} are its {self.units} units or channels, but its {type(self.module).__name__} "
                f"returns the shape {tuple(output.shape)}, in which they cannot be distinguished; put the activation before "
                "the module that merges them, such as nn.Flatten()"
            )

        def add(grad: Tensor) -> None:
            if features._version != version:
                raise RuntimeError(
                    f"the features of {self.name!r} were changed in place after the forward pass, but their utility needs "
                    "the original values; use inplace=False in the modules after the activation"
                )
            with torch.no_grad():
                wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
                grad = grad.to(wide)
                if self._scaler is not None:
                    grad = grad / self._scaler.scale(grad.new_ones(()))
                if self._keeps_outputs:
                    self._outputs.append((_by_unit(features.to(wide), dim, each), _by_unit(grad, dim, each)))
                by_unit = sum_by_unit(grad * features, dim).view(each, -1).sum(0)
                self._sum = add_as_grad(self._sum, by_unit, trainable)
                self._is_used = False

        output.register_hook(add)  # type: ignore[no-untyped-call]


class Features:
    """All features of a model, and the hooks that detect them.

    It refers to modules only, so that a model and its optimizer can be copied or pickled together.

    Args:
        model: the network.
        pairs: the layers and their activation modules; None to detect them.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if any.
        keeps_outputs: whether features keep the outputs of activations and find the layers that take them as input.

    Attributes:
        all: one per layer that may have features.
        modules: the activations that may produce them.
    """

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs | None,
        scaler: "torch.amp.GradScaler | None",
        *,
        keeps_outputs: bool = False,
    ) -> None:
        self._finds = pairs is None
        self._keeps_outputs = keeps_outputs
        found = _guessed_pairs(model) if pairs is None else _given_pairs(model, pairs)
        self.all = [Feature(name, layer, module, scaler, keeps_outputs) for name, layer, module in found]
        self._of_layer = {feature.layer: feature for feature in self.all}
        self._names = {module: name for name, module in model.named_modules()}
        self.modules = list(dict.fromkeys(feature.module for feature in self.all if feature.module is not None))
        if self._finds:
            activations = (module for module in self._names if isinstance(module, ACTIVATION_MODULES))
            self.modules = list(dict.fromkeys([*self.modules, *activations]))
        for feature in self.all:
            _check_own_weight(feature)
            feature.module_name = self._names.get(feature.module, "")
        _check_own_parameters(self.all)
        self._key = object()  # the mark of nodes
        self._features_key = object()  # … and the layers that own the features of activations
        self._looked: set[nn.Module] = set()  # layers whose input is known
        self._hooks = Hooks(self)
        for module in self._names:
            if isinstance(module, _LAYERS):
                self._hooks.add(module.register_forward_hook, "_after_layer")
        for module in self.modules:
            self._hooks.add(module.register_forward_hook, "_after_activation")

    @property
    def known(self) -> list[Feature]:
        """The features with a known activation. Before the first forward pass this is a guess from the order of modules."""
        return [feature for feature in self.all if self.expects(feature)]

    def expects(self, feature: Feature) -> bool:
        """Whether the features must receive a gradient in a backward pass: not without an activation, or after a wrong
        guess."""
        is_wrong = self._finds and feature.is_shared and not feature.is_seen
        return feature.module is not None and not is_wrong

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hooks.adopt(self)

    def _after_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.grad_fn is None or transform_level() is not None:
            return
        if layer in self._of_layer:
            self._of_layer[layer].note_channel_dim(output)
        if self._finds and layer not in self._looked:
            self._look_for_functions(layer, args)
        if self._keeps_outputs and args and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
            self._follow(layer, args[0].grad_fn)
        node: Any = output.grad_fn  # whose annotations are wrong
        node.metadata[self._key] = layer

    def _after_activation(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.grad_fn is None or transform_level() is not None:
            return
        node: Any = output.grad_fn
        origins = self._origins(node)
        for layer, path in origins.items():
            feature = self._of_layer.get(layer)
            if feature is None:
                continue
            if feature.module is not module and self._finds and not feature.is_seen and path <= _KEEP_UNITS:
                # A better guess than the order of modules, or the first one.
                if feature.unit_dim(output, 2 if isinstance(module, CReLU) else 1) is None:
                    continue
                feature.module, feature.module_name, feature.is_shared = module, self._names[module], False
            if feature.module is module:
                feature.capture(output)
                node.metadata.setdefault(self._features_key, []).append(feature)
        for feature in self.all:
            if feature.module is module and feature.layer not in origins:
                feature.is_shared = True
        node.metadata.setdefault(self._key, module)

    def _follow(self, layer: nn.Module, node: Any) -> None:
        """Record which features enter a layer, given the node of its input."""
        for signed, path in self._signed(node):
            operations = path if signed is node else path | {_operation(node)}
            for feature in signed.metadata.get(self._features_key, ()):
                feature.followers[layer] = operations

    def _origins(self, node: Any) -> dict[nn.Module, frozenset[str]]:
        """Return the nearest layers on the paths back from a node, and the operations in between, except the node's own."""
        origins: dict[nn.Module, frozenset[str]] = {}
        for signed, path in self._signed(node):
            layer = signed.metadata[self._key]
            if isinstance(layer, _LAYERS):
                origins[layer] = origins.get(layer, frozenset()) | path
        return origins

    def _signed(self, node: Any) -> list[tuple[Any, frozenset[str]]]:
        """Return the nearest marked nodes on the paths back from a node, and the operations in between, except the node's
        own."""
        found: list[tuple[Any, frozenset[str]]] = []
        known = {node}
        todo: list[tuple[Any, frozenset[str]]] = [(node, frozenset())]
        for current, path in todo:
            if current.metadata.get(self._key) is not None:
                found.append((current, path))
                continue
            longer = path if current is node else path | {_operation(current)}
            for before, _ in current.next_functions:
                if before is not None and before not in known:
                    known.add(before)
                    todo.append((before, longer))
        return found

    def _look_for_functions(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Warn about activation functions between a layer and this one, because hooks do not see them."""
        self._looked.add(layer)
        node = args[0].grad_fn if args and isinstance(args[0], Tensor) else None
        for origin, path in self._origins(node).items() if node is not None else ():
            feature = self._of_layer.get(origin)
            operations = path | {_operation(node)}
            function = next(iter(operations & ACTIVATION_FUNCTIONS), None)
            if feature is not None and not feature.is_seen and function is not None:
                warnings.warn(
                    f"the output of {feature.name!r} goes through {function.lower()} as a function, which hooks do not see: "
                    "the layer gets plain gradient descent; write activations as modules, such as nn.ReLU() for F.relu",
                    stacklevel=2,
                )


class SeesFeatures(Optimizer):
    """Mixin for optimizers that know the hidden features of a model."""

    _hidden: Features

    @property
    def features(self) -> list[Feature]:
        """The hidden features; before the first forward pass, a guess from the order of modules.

        Example:
            >>> upgd.FeatureUPGD(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))).features
            [Feature(5 units of Linear '0', output of ReLU '1')]
        """
        return self._hidden.known

    def remove(self) -> None:
        """Remove the hooks from the model before the optimizer is deleted, which also removes them."""
        self._hidden.remove()

    def __repr__(self) -> str:
        return super().__repr__().removesuffix(")") + "".join(f"{feature}\n" for feature in self.features) + ")"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose units are not known; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict) and self.param_groups:
            # The model's parameters have names, and torch requires names for all or none.
            given = param_group.get("params")
            params = [given] if isinstance(given, Tensor) else list(given or ())
            known = sum(len(group["params"]) for group in self.param_groups)
            names = (f"added.{number}" for number in range(known, known + len(params)))
            named = [one if isinstance(one, tuple) else (next(names), one) for one in params]
            param_group = {**param_group, "params": named}
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of parameters and gates."""
        super().zero_grad(set_to_none)
        for feature in self._hidden.all:
            feature.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hidden": self._hidden}


def check_model(model: Any) -> None:
    """Raise an error if this is not a module, or if its parameters are sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, but it is a {type(model).__name__}; features belong to a network, so pass "
            "the model instead of its parameters"
        )
    name = next((name for name, param in model.named_parameters() if is_sharded(param) or is_flattened(param)), None)
    if name is not None:
        raise TypeError(
            f"model must not be sharded, but its parameter {name!r} is sharded over processes, and the utility of units "
            "is not known across them; use the weight-wise optimizer"
        )


def _by_unit(values: Tensor, dim: int, each: int) -> Tensor:
    """Reshape to ``(units, …)``; the ``each`` outputs of a unit count as positions."""
    units = values.shape[dim] // each
    return values.movedim(dim, 0).reshape(each, units, -1).transpose(0, 1).reshape(units, -1)


def _operation(node: Any) -> str:
    """Return the name of the operation of a node."""
    return str(node.name()).split("Backward")[0]


def _check_own_weight(feature: Feature) -> None:
    if is_parametrized(feature.layer):
        raise TypeError(
            f"the incoming weights of the features of {feature.name!r} are computed from other parameters (weight or "
            "spectral norm, another parametrization), which need not belong to a unit; remove it with "
            "torch.nn.utils.parametrize.remove_parametrizations, or leave the layer out with features={...}"
        )


def _check_own_parameters(features: list[Feature]) -> None:
    owners: dict[Tensor, str] = {}
    for feature in features:
        for param in feature.params:
            if param in owners:
                raise ValueError(
                    f"the layers {owners[param]!r} and {feature.name!r} share a parameter, so the utilities of their "
                    "features would be mixed; give each layer its own parameters, or leave one of them out with "
                    "features={...}"
                )
            owners[param] = feature.name


def _guessed_pairs(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """Return all layers except the last, each with the activation module defined between it and the next, if any."""
    leaves = [(name, module) for name, module in model.named_modules() if is_leaf(module)]
    layers = [place for place, (_, module) in enumerate(leaves) if isinstance(module, _LAYERS)]
    if len(layers) < 2:
        raise ValueError(
            f"model must have two or more Linear or Conv layers, but this {type(model).__name__} has {len(layers)} and so no "
            "hidden features; use the weight-wise optimizer"
        )
    pairs: list[tuple[str, nn.Module, nn.Module | None]] = []
    for here, following in pairwise(layers):
        name, layer = leaves[here]
        between = [module for _, module in leaves[here + 1 : following]]
        candidates = [
            module for kind in (ACTIVATION_MODULES, nn.Identity) for module in between if isinstance(module, kind)
        ]
        if candidates or not is_parametrized(layer):
            pairs.append((name, layer, candidates[0] if candidates else None))
    if not any(module for *_, module in pairs) and not any(isinstance(m, ACTIVATION_MODULES) for _, m in leaves):
        raise ValueError(
            f"model has no activation module, so the features of {leaves[layers[0]][0]!r} and other layers cannot be "
            "found; write activations as modules, such as nn.ReLU() for F.relu, or specify the features with "
            f"features={{{leaves[layers[0]][0]!r}: 'module', ...}}"
        )
    return pairs


def _given_pairs(model: nn.Module, pairs: Pairs) -> list[tuple[str, nn.Module, nn.Module | None]]:
    given = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    names = {module: name for name, module in model.named_modules()}

    def resolve(which: Any) -> nn.Module:
        module = which if isinstance(which, nn.Module) else dict(model.named_modules()).get(which)
        if module is None or module not in names:
            raise ValueError(f"features names {which!r}, but the model has no such module; see model.named_modules()")
        return module

    found: list[tuple[str, nn.Module, nn.Module | None]] = []
    for layer, module in ((resolve(layer), resolve(module)) for layer, module in given):
        if not isinstance(layer, _LAYERS):
            raise ValueError(
                f"features must map Linear or Conv layers to activations, but {names[layer]!r} is a {type(layer).__name__}"
            )
        found.append((names[layer], layer, module))
    layers = [name for name, *_ in found]
    twice = next((name for name in layers if layers.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"features names the layer {twice!r} twice; name the one module whose output its features are")
    if not found:
        raise ValueError("features must name one pair of layer and activation or more, but it is empty")
    return found
