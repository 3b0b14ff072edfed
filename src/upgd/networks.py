"""The networks of the paper, and initial weights that depend on a seed and nothing else.

PyTorch initialises Linear and convolution layers, weights and biases, from ``U(−1/√fan_in, 1/√fan_in)``. So do we, but
the numbers come from the counters of :mod:`upgd.noise`: parameter number ``k`` of a network (in the order of
``network.parameters()``) is drawn for (seed, ``Purpose.INITIAL_WEIGHTS``, step ``k``), in float64, then rounded to the
parameter's type. A learner therefore starts with the same bits alone (:func:`reset`) or among hundreds
(:func:`initial_parameters`), whatever ran before and on whatever device.

Other modules initialise themselves: a module's own ``reset_parameters`` is called with PyTorch's generator at the learner's
seed, in float64 on the CPU. That of a module with children is responsible for all of them. :func:`register` gives a network a
name, and its own function for initial weights if it needs one.

    >>> MLP((784, 300, 150, 10)).describe()
    'MLP 784-300-150-10, relu, 282,160 parameters'
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from upgd import plugins
from upgd.activations import CReLU
from upgd.noise import Purpose, uniforms

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "CReLU",
    "ConvNet",
    "Linear",
    "initial_bounds",
    "initial_parameters",
    "register",
    "registered",
    "reset",
]

#: The activations by name.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "crelu": CReLU,
}

#: What counts as an activation in anybody's network: behind it are the hidden features of the layer before.
ACTIVATION_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign),
    CReLU,
)

#: Activations that are called as functions, by the names of autograd, without "Backward0".
ACTIVATION_FUNCTIONS = frozenset(
    [
        *("Relu", "LeakyRelu", "RreluWithNoise", "Elu", "Celu", "Gelu", "Silu", "Mish", "Softplus"),
        *("Tanh", "Sigmoid", "Hardtanh", "Hardswish", "Hardsigmoid"),
    ]
)

#: What has weights that enter units or channels.
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)

#: What has weights and biases that begin with 1 and 0.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)

#: How many random words are in the making at once: what fits a core's cache, or what keeps a GPU busy.
_WORDS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}

AnyModule = TypeVar("AnyModule", bound=nn.Module)
#: A function of a stream (:class:`upgd.streams.Stream`) that makes the network for it.
Factory = Callable[[Any], nn.Module]
AnyFactory = TypeVar("AnyFactory", bound=Factory)
Init = Callable[[nn.Module, int], object]

#: What the networks that have no sizes in their names are called.
BUILT_IN = ("linear", "conv", "conv-authors")
_REGISTERED: dict[str, Factory] = {}


class MLP(nn.Module):
    """A fully connected network: Linear layers with an activation after each but the last.

    Args:
        sizes: the numbers of units from the inputs to the outputs, such as ``(784, 300, 150, 10)``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"tanh"``, ``"identity"`` (a deep linear network), or ``"crelu"``
            (:class:`upgd.activations.CReLU`), with which the next layer has twice as many inputs.
        layer_norm: whether an ``nn.LayerNorm`` stands before each activation.
        seed: what the initial weights are a function of.

    Images need no flattening beforehand: the trailing dimensions of an input are joined until they make ``sizes[0]``.
    An input may be a batch or a single sample.

    Attributes:
        sizes: as given, a tuple.
        activation: as given.
        layer_norm: as given.
        layers: the ``nn.Sequential`` of (Linear, activation) pairs and the last Linear.
    """

    def __init__(
        self, sizes: Sequence[int], activation: str = "relu", *, layer_norm: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        self.sizes = _checked_sizes(sizes)
        self.activation = _checked_activation(activation)
        self.layer_norm = layer_norm
        self.layers = nn.Sequential(*_dense_layers(self.sizes, activation, layer_norm=layer_norm))
        self.reset(seed)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(_flat(x, self.sizes[0]))
        return outputs

    def reset(self, seed: int) -> Self:
        """Draw the initial weights of ``seed``; the same as a new network with that seed."""
        return reset(self, seed)

    def describe(self) -> str:
        """The network in one line."""
        shape = "-".join(str(size) for size in self.sizes)
        parts = [f"{type(self).__name__} {shape}"]
        if len(self.sizes) > 2:
            parts.append(self.activation)
        if self.layer_norm:
            parts.append("LayerNorm")
        return ", ".join([*parts, _parameter_count(self)])


class Linear(MLP):
    """A single linear layer, the baseline of the toy problems: an :class:`MLP` without hidden units."""

    def __init__(self, inputs: int, outputs: int, *, seed: int = 0) -> None:
        super().__init__((inputs, outputs), "identity", seed=seed)


class ConvNet(nn.Module):
    """The convolutional network of the paper.

    ``conv 6@5×5 → pool 2 → conv 16@5×5 → pool 2 → 120 → 84 → outputs``, with an activation after each convolution and
    each hidden layer.

    Args:
        input_shape: ``(channels, height, width)``, or ``(height, width)`` for grey images.
        outputs: the number of outputs.
        activation: as for :class:`MLP`.
        conv_activation: whether the convolutions have an activation. The paper's text says yes; the authors' public
            code has none. Say which one a result used.
        seed: what the initial weights are a function of.

    Attributes:
        layers: one ``nn.Sequential`` from the first convolution to the outputs. Without ``conv_activation`` an
            ``nn.Identity`` stands where the activation would.
    """

    CHANNELS = (6, 16)
    KERNEL = 5
    POOL = 2
    HIDDEN = (120, 84)

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        outputs: int = 10,
        activation: str = "relu",
        *,
        conv_activation: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.input_shape = tuple(input_shape)
        self.activation = _checked_activation(activation)
        self.conv_activation = conv_activation
        channels, height, width = self._image = _checked_image(self.input_shape, self._smallest_side())
        after_convolution = activation if conv_activation else "identity"
        layers: list[nn.Module] = []
        for filters in self.CHANNELS:
            convolution = nn.Conv2d(channels, filters, self.KERNEL)
            layers += [convolution, _activation(after_convolution, dim=-3), nn.MaxPool2d(self.POOL)]
            channels = filters * _outputs_per_unit(after_convolution)
            height, width = self._after_pooling(height), self._after_pooling(width)
        #: The units of the fully connected part, from the flattened feature maps to the outputs.
        self.sizes = _checked_sizes((channels * height * width, *self.HIDDEN, outputs))
        self.layers = nn.Sequential(*layers, nn.Flatten(-3), *_dense_layers(self.sizes, activation))
        self.reset(seed)

    def forward(self, x: Tensor) -> Tensor:
        given = tuple(x.shape[-len(self.input_shape) :])
        if given != self.input_shape:
            raise ValueError(
                f"ConvNet for inputs of shape {self.input_shape} got {tuple(x.shape)}; give it input_shape={given}"
            )
        outputs: Tensor = self.layers(x.reshape(*x.shape[: -len(self.input_shape)], *self._image))
        return outputs

    def reset(self, seed: int) -> Self:
        """Draw the initial weights of ``seed``; the same as a new network with that seed."""
        return reset(self, seed)

    def describe(self) -> str:
        """The network in one line."""
        shape = "×".join(str(side) for side in self.input_shape)
        convolutions = "-".join(f"{filters}@{self.KERNEL}×{self.KERNEL}" for filters in self.CHANNELS)
        dense = "-".join(str(size) for size in self.sizes[1:])
        note = "" if self.conv_activation else " (none after convolutions)"
        return f"ConvNet {shape}-{convolutions}-{dense}, {self.activation}{note}, {_parameter_count(self)}"

    @classmethod
    def _after_pooling(cls, side: int) -> int:
        return (side - cls.KERNEL + 1) // cls.POOL

    @classmethod
    def _smallest_side(cls) -> int:
        side = 1
        for _ in cls.CHANNELS:
            side = side * cls.POOL + cls.KERNEL - 1
        return side


def is_leaf(module: nn.Module) -> bool:
    """Whether it computes something itself, and is not made of other modules.

    A parametrized layer has a child, which holds what its weight is computed from, and is a layer all the same.
    """
    return all(name == "parametrizations" for name, _ in module.named_children())


def register(name: str, *, init: Init | None = None) -> Callable[[AnyFactory], AnyFactory]:
    """Add a network: put ``@upgd.networks.register("my-network")`` before a function that makes the module for a stream.

    The stream's ``input_shape`` and ``outputs`` say what the network takes and gives. Initial weights are a function of the
    learner's seed (see :mod:`upgd.networks`), unless ``init`` makes them.

    Args:
        name: what experiments call it, in lower-case letters, digits, ``-`` and ``_``.
        init: a function of (module, seed) that initialises the module in place. PyTorch's generator is at the seed when it
            is called, and nothing else may influence the result.

    Example:
        >>> @register("example-residual")
        ... class Residual(nn.Module):
        ...     def __init__(self, stream):
        ...         super().__init__()
        ...         self.first, self.norm = nn.Linear(math.prod(stream.input_shape), 32), nn.LayerNorm(32)
        ...         self.second, self.last = nn.Linear(32, 32), nn.Linear(32, stream.outputs)
        ...
        ...     def forward(self, x):
        ...         h = torch.relu(self.norm(self.first(x.flatten(1))))
        ...         return self.last(h + torch.relu(self.second(h)))
    """
    if name in BUILT_IN or not re.fullmatch(r"[a-z][\w-]*", name):
        raise ValueError(f"{name!r} cannot be the name of a new network: it is taken, or no plain lower-case name")

    def remember(factory: AnyFactory) -> AnyFactory:
        plugins.add(_REGISTERED, "network", name, _initialised_by(init, factory) if init is not None else factory)
        return factory

    return remember


def _initialised_by(init: Init, factory: Factory) -> Factory:
    @wraps(factory, updated=())
    def make(stream: Any) -> nn.Module:
        network = factory(stream)
        network._upgd_init = init  # type: ignore[assignment]
        return network

    return make


def registered(name: str) -> Factory | None:
    """The function that makes the registered network of that name; None if there is none."""
    return plugins.find(_REGISTERED, name)


def initial_parameters(network: nn.Module, seeds: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """The initial parameters of one learner per seed, stacked.

    Args:
        network: any module, ours or anybody's; it is not changed. The module documentation says how each of its parts is
            initialised.
        seeds: one integer for each learner.

    Returns:
        For each name of ``network.named_parameters()`` a tensor ``(len(seeds), *shape)``, of the parameter's type and
        on its device; entry ``s`` has the bits that ``reset(network, seeds[s])`` would give.

    Example:
        >>> stacked = initial_parameters(MLP((4, 3, 2)), seeds=[0, 1, 2])
        >>> stacked["layers.0.weight"].shape
        torch.Size([3, 3, 4])
    """
    fan_ins, own = _fan_ins(network)
    given = _by_modules(network, own, seeds) if own else {}
    return {
        name: given[name] if name in given else _initial(parameter, number, fan_ins[name], seeds)
        for number, (name, parameter) in enumerate(network.named_parameters())
    }


@torch.no_grad()
def reset(network: AnyModule, seed: int) -> AnyModule:
    """Give every parameter of ``network`` its initial value for ``seed``.

    Returns:
        The network itself.
    """
    initial = initial_parameters(network, [seed])
    for name, parameter in network.named_parameters():
        parameter.copy_(initial[name][0])
    return network


def _by_modules(network: nn.Module, own: Sequence[str], seeds: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """The parameters that these modules initialise themselves, for each seed."""
    model = copy.deepcopy(network)
    model = (model.to_empty(device="cpu") if any(p.is_meta for p in network.parameters()) else model.cpu()).double()
    modules = {path: model.get_submodule(path) for path in own}
    like = dict(network.named_parameters())
    inside = (f"{path}.{name}".lstrip(".") for path in own for name, _ in modules[path].named_parameters())
    names = [name for name in inside if name in like]  # a parameter that two modules share has one name
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for seed in torch.as_tensor(seeds, dtype=torch.long).tolist():
        with _generator_at(seed), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)  # what a module forgets shall be noticed, and not be the last learner's
            module: Any
            for module in modules.values():
                if hasattr(module, "_upgd_init"):
                    module._upgd_init(module, seed)
                else:
                    module.reset_parameters()
        values = dict(model.named_parameters())
        for name in names:
            if values[name].isnan().any():
                raise ValueError(
                    f"the initial values of the parameter {name!r} are not all set; let reset_parameters of the "
                    f"{type(network).__name__} (or init) set every parameter of it"
                )
            rows[name].append(values[name].detach().clone())
    return {
        name: torch.stack(values).to(None if like[name].is_meta else like[name].device, like[name].dtype)
        for name, values in rows.items()
    }


@contextmanager
def _generator_at(seed: int) -> Iterator[None]:
    """PyTorch's generator at a seed, and afterwards where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def initial_bounds(network: nn.Module) -> dict[str, float | None]:
    """The bound b of each parameter's initial distribution, which is uniform on [−b, b]: 1/√fan-in. None for the parameters
    of normalization layers, which begin with a constant.

    Example:
        >>> initial_bounds(MLP((4, 3, 2)))["layers.0.bias"]
        0.5
    """
    fan_ins, _ = _fan_ins(network)
    bounds: dict[str, float | None] = {}
    for name, _ in network.named_parameters():
        module = network.get_submodule(name.rpartition(".")[0])
        if name not in fan_ins and not isinstance(module, NORMS):
            raise TypeError(
                f"the initial distribution of {name!r}, of a {type(module).__name__}, has no bound that is known"
            )
        bounds[name] = 1 / math.sqrt(fan_ins[name]) if name in fan_ins else None
    return bounds


def _initial(parameter: Tensor, number: int, fan_in: int, seeds: Sequence[int] | Tensor) -> Tensor:
    device = None if parameter.is_meta else parameter.device
    all_seeds = torch.as_tensor(seeds, dtype=torch.long, device=device)
    out = torch.empty(len(all_seeds), parameter.numel(), dtype=parameter.dtype, device=device)
    at_once = _WORDS_AT_ONCE.get(out.device.type, _WORDS_AT_ONCE["cpu"])
    learners = max(1, at_once // max(1, parameter.numel()))
    for first in range(0, len(all_seeds), learners):
        some = slice(first, first + learners)
        uniform = uniforms(all_seeds[some], Purpose.INITIAL_WEIGHTS, number, parameter.numel(), device=all_seeds.device)
        # 2u − 1 is exact in float64, so that the only rounding is the product's: the same on every device.
        out[some] = (2 * uniform - 1) * (1 / math.sqrt(fan_in))
    return out.view(len(all_seeds), *parameter.shape)


def _fan_ins(network: nn.Module) -> tuple[dict[str, int], list[str]]:
    """How many inputs a unit has, for the parameters of Linear and convolution layers (a bias has the fan-in of its weight);
    and the paths of the modules that initialise themselves and all below them."""
    of_parameter: dict[Tensor, int] = {}
    own: list[str] = []
    for path, module in network.named_modules():
        if any(path == other or path.startswith(f"{other}.") or not other for other in own):
            continue
        if _initialises_itself(module):
            own.append(path)
            continue
        parameters = list(module.parameters(recurse=False))
        if parameters and not isinstance(module, LAYERS):
            raise TypeError(
                f"the layer {path or 'network'!r}, a {type(module).__name__}, has parameters and no reset_parameters() to"
                " initialise them; give it that method, register the network with init=..., or give initial weights to"
                " Population(..., parameters={...})"
            )
        for parameter in parameters:
            of_parameter.setdefault(parameter, module.weight[0].numel())
    return {name: of_parameter[p] for name, p in network.named_parameters() if p in of_parameter}, own


def _initialises_itself(module: nn.Module) -> bool:
    if hasattr(module, "_upgd_init"):
        return True
    method = getattr(type(module), "reset_parameters", None)
    return method not in (None, nn.Linear.reset_parameters, nn.modules.conv._ConvNd.reset_parameters) and any(
        True for _ in module.parameters()
    )


def _dense_layers(sizes: Sequence[int], activation: str, *, layer_norm: bool = False) -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs, *hidden, outputs = sizes
    for units in hidden:
        norm = [nn.LayerNorm(units)] if layer_norm else []
        layers += [nn.Linear(inputs, units), *norm, _activation(activation, dim=-1)]
        inputs = units * _outputs_per_unit(activation)
    return [*layers, nn.Linear(inputs, outputs)]


def _activation(name: str, dim: int) -> nn.Module:
    return CReLU(dim) if name == "crelu" else ACTIVATIONS[name]()


def _outputs_per_unit(activation: str) -> int:
    return 2 if activation == "crelu" else 1


def _flat(x: Tensor, inputs: int) -> Tensor:
    """Join trailing dimensions until they make ``inputs``."""
    for first in reversed(range(x.ndim)):
        if math.prod(x.shape[first:]) == inputs:
            return x.flatten(first)
    raise ValueError(
        f"MLP with {inputs} inputs got a tensor of shape {tuple(x.shape)}; let sizes[0] be a sample's size"
    )


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(sizes)
    if len(checked) < 2 or not all(isinstance(size, int) and size > 0 for size in checked):
        raise ValueError(f"sizes must be two or more positive integers, such as (784, 300, 150, 10), not {sizes!r}")
    return checked


def _checked_activation(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return activation


def _checked_image(shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    image = (1, *shape) if len(shape) == 2 else shape
    if len(image) != 3 or not all(isinstance(side, int) for side in image) or image[0] < 1 or min(image[1:]) < smallest:
        raise ValueError(
            "input_shape must be (channels, height, width) or (height, width) with sides of at least "
            f"{smallest} pixels, not {shape!r}; an MLP takes smaller images"
        )
    return image


def _parameter_count(network: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters"
