"""The networks of the paper, and initial weights that depend only on a seed.

PyTorch initializes the weights and biases of Linear and convolution layers from ``U(−1/√fan_in, 1/√fan_in)``. This module
uses the same distribution, but draws from the counter-based generator of :mod:`upgd.noise`: parameter ``k`` of a network (in
the order of ``network.parameters()``) is drawn for (seed, ``Purpose.INITIAL_WEIGHTS``, step ``k``) in float64, then rounded
to the parameter's type. Initial weights are therefore bitwise identical for a single learner (:func:`reset`) and in a
population (:func:`initial_parameters`), and do not depend on earlier draws or the device.

Other modules initialize themselves: their ``reset_parameters`` is called with PyTorch's generator set to the learner's seed,
in float64 on the CPU. The method of a module with children must initialize all of them. :func:`register` gives a network a
name and, optionally, an initialization function.

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

#: Activations by name.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "crelu": CReLU,
}

#: Modules that count as activations in any network; their outputs are the hidden features of the preceding layer.
ACTIVATION_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign),
    CReLU,
)

#: Functional activations, by their autograd node names without "Backward0".
ACTIVATION_FUNCTIONS = frozenset(
    [
        *("Relu", "LeakyRelu", "RreluWithNoise", "Elu", "Celu", "Gelu", "Silu", "Mish", "Softplus"),
        *("Tanh", "Sigmoid", "Hardtanh", "Hardswish", "Hardsigmoid"),
    ]
)

#: Layers whose weights belong to units or channels.
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)

#: Layers whose weights and biases are initialized to 1 and 0.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)

#: Number of random words to generate at once: few enough for a core's cache, or enough to keep a GPU busy.
_WORDS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}

AnyModule = TypeVar("AnyModule", bound=nn.Module)
#: A function that creates the network for a stream (:class:`upgd.streams.Stream`).
Factory = Callable[[Any], nn.Module]
AnyFactory = TypeVar("AnyFactory", bound=Factory)
Init = Callable[[nn.Module, int], object]

#: Names of the networks that have no sizes in their names.
BUILT_IN = ("linear", "conv", "conv-authors")
_REGISTERED: dict[str, Factory] = {}


class MLP(nn.Module):
    """A fully connected network: Linear layers with an activation after each but the last.

    Args:
        sizes: Numbers of units from the inputs to the outputs, such as ``(784, 300, 150, 10)``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"tanh"``, ``"identity"`` (a deep linear network), or ``"crelu"``
            (:class:`upgd.activations.CReLU`), which doubles the number of inputs of the next layer. Default: "relu".
        layer_norm: Whether to insert an ``nn.LayerNorm`` before each activation. Default: False.
        seed: Seed of the initial weights. Default: 0.

    Images need not be flattened: the trailing dimensions of an input are merged until their size is ``sizes[0]``. The
    input may be a batch or a single sample.

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
        """Reinitialize the weights with ``seed``, as in a new network with that seed, and return the network."""
        return reset(self, seed)

    def describe(self) -> str:
        """Return a one-line description of the network."""
        shape = "-".join(str(size) for size in self.sizes)
        parts = [f"{type(self).__name__} {shape}"]
        if len(self.sizes) > 2:
            parts.append(self.activation)
        if self.layer_norm:
            parts.append("LayerNorm")
        return ", ".join([*parts, _parameter_count(self)])


class Linear(MLP):
    """A single linear layer, the baseline for the toy problems: an :class:`MLP` without hidden units."""

    def __init__(self, inputs: int, outputs: int, *, seed: int = 0) -> None:
        super().__init__((inputs, outputs), "identity", seed=seed)


class ConvNet(nn.Module):
    """The convolutional network of the paper.

    ``conv 6@5×5 → pool 2 → conv 16@5×5 → pool 2 → 120 → 84 → outputs``, with an activation after each convolution and
    each hidden layer.

    Args:
        input_shape: ``(channels, height, width)``, or ``(height, width)`` for grey images.
        outputs: Number of outputs.
        activation: See :class:`MLP`.
        conv_activation: Whether an activation follows each convolution. The paper's text has one, the authors' public
            code does not; report which variant was used. Default: True.
        seed: Seed of the initial weights. Default: 0.

    Attributes:
        layers: One ``nn.Sequential`` from the first convolution to the outputs. Without ``conv_activation``, an
            ``nn.Identity`` replaces the activation.
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
        #: Layer sizes of the fully connected part, from the flattened feature maps to the outputs.
        self.sizes = _checked_sizes((channels * height * width, *self.HIDDEN, outputs))
        self.layers = nn.Sequential(*layers, nn.Flatten(-3), *_dense_layers(self.sizes, activation))
        self.reset(seed)

    def forward(self, x: Tensor) -> Tensor:
        given = tuple(x.shape[-len(self.input_shape) :])
        if given != self.input_shape:
            raise ValueError(
                f"ConvNet for inputs of shape {self.input_shape} got {tuple(x.shape)}; create it with input_shape={given}"
            )
        outputs: Tensor = self.layers(x.reshape(*x.shape[: -len(self.input_shape)], *self._image))
        return outputs

    def reset(self, seed: int) -> Self:
        """Reinitialize the weights with ``seed``, as in a new network with that seed, and return the network."""
        return reset(self, seed)

    def describe(self) -> str:
        """Return a one-line description of the network."""
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
    """Return whether the module computes something itself rather than being composed of other modules.

    A parametrized layer counts as a leaf, although it has a child that holds the original parameters.
    """
    return all(name == "parametrizations" for name, _ in module.named_children())


def register(name: str, *, init: Init | None = None) -> Callable[[AnyFactory], AnyFactory]:
    """Register a network under a name; use it as a decorator on a function that creates the module for a stream.

    The stream's ``input_shape`` and ``outputs`` determine the shapes of the network's inputs and outputs. Initial weights
    are a function of the learner's seed (see :mod:`upgd.networks`) unless ``init`` is given.

    Args:
        name: The name in experiments, of lower-case letters, digits, ``-`` and ``_``.
        init: A function of (module, seed) that initializes the module in place. PyTorch's generator is set to the seed
            when it is called, and the result must depend on nothing else.

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
        raise ValueError(f"{name!r} is not a valid name for a new network: it is taken, or not a plain lower-case name")

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
    """Return the factory of the registered network of that name, or None."""
    return plugins.find(_REGISTERED, name)


def initial_parameters(network: nn.Module, seeds: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """Return the initial parameters of one learner per seed, stacked.

    Args:
        network: Any module; it is not modified. See :mod:`upgd.networks` for how its parts are initialized.
        seeds: One integer per learner.

    Returns:
        A tensor of shape ``(len(seeds), *shape)`` for each name of ``network.named_parameters()``, with the parameter's
        type and device. Entry ``s`` is bitwise equal to the result of ``reset(network, seeds[s])``.

    Example:
        >>> stacked = initial_parameters(MLP((4, 3, 2)), seeds=[0, 1, 2])
        >>> stacked["layers.0.weight"].shape
        torch.Size([3, 3, 4])
    """
    fan_ins, own = _fan_ins(network)
    every = seeds.tolist() if isinstance(seeds, Tensor) else list(seeds)
    rows = {seed: row for row, seed in enumerate(dict.fromkeys(every))}  # in a search, all learners have the same seed
    distinct, places = list(rows), [rows[seed] for seed in every]
    given = _by_modules(network, own, distinct) if own else {}
    drawn = {
        name: given[name] if name in given else _initial(parameter, number, fan_ins[name], distinct)
        for number, (name, parameter) in enumerate(network.named_parameters())
    }
    return {name: values[places] for name, values in drawn.items()}


@torch.no_grad()
def reset(network: AnyModule, seed: int) -> AnyModule:
    """Set every parameter of ``network`` to its initial value for ``seed``.

    Returns:
        The network.
    """
    initial = initial_parameters(network, [seed])
    for name, parameter in network.named_parameters():
        parameter.copy_(initial[name][0])
    return network


def _by_modules(network: nn.Module, own: Sequence[str], seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return the parameters that these modules initialize themselves, for each seed."""
    model = copy.deepcopy(network)
    model = (model.to_empty(device="cpu") if any(p.is_meta for p in network.parameters()) else model.cpu()).double()
    modules = {path: model.get_submodule(path) for path in own}
    like = dict(network.named_parameters())
    inside = (f"{path}.{name}".lstrip(".") for path in own for name, _ in modules[path].named_parameters())
    names = [name for name in inside if name in like]  # shared parameters have one name
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for seed in seeds:
        with _generator_at(seed), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)  # detects parameters that the module does not set
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
                    f"the initial values of the parameter {name!r} are not all set; reset_parameters of the "
                    f"{type(network).__name__} (or init) must set all of its parameters"
                )
            rows[name].append(values[name].detach().clone())
    return {
        name: torch.stack(values).to(None if like[name].is_meta else like[name].device, like[name].dtype)
        for name, values in rows.items()
    }


@contextmanager
def _generator_at(seed: int) -> Iterator[None]:
    """Context manager that sets PyTorch's generator to a seed and restores its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def initial_bounds(network: nn.Module) -> dict[str, float | None]:
    """Return the bound b of each parameter's initial distribution, which is uniform on [−b, b]: 1/√fan-in. None for the
    parameters of normalization layers, which are initialized to a constant.

    Example:
        >>> initial_bounds(MLP((4, 3, 2)))["layers.0.bias"]
        0.5
    """
    fan_ins, _ = _fan_ins(network)
    bounds: dict[str, float | None] = {}
    for name, _ in network.named_parameters():
        module = network.get_submodule(name.rpartition(".")[0])
        if name not in fan_ins and not isinstance(module, NORMS):
            raise TypeError(f"the initial distribution of {name!r}, of a {type(module).__name__}, has no known bound")
        bounds[name] = 1 / math.sqrt(fan_ins[name]) if name in fan_ins else None
    return bounds


def _initial(parameter: Tensor, number: int, fan_in: int, seeds: Sequence[int]) -> Tensor:
    device = None if parameter.is_meta else parameter.device
    all_seeds = torch.as_tensor(seeds, dtype=torch.long, device=device)
    out = torch.empty(len(all_seeds), parameter.numel(), dtype=parameter.dtype, device=device)
    at_once = _WORDS_AT_ONCE.get(out.device.type, _WORDS_AT_ONCE["cpu"])
    learners = max(1, at_once // max(1, parameter.numel()))
    for first in range(0, len(all_seeds), learners):
        some = slice(first, first + learners)
        uniform = uniforms(all_seeds[some], Purpose.INITIAL_WEIGHTS, number, parameter.numel(), device=all_seeds.device)
        # 2u − 1 is exact in float64, so the product is the only rounding, with the same result on every device.
        out[some] = (2 * uniform - 1) * (1 / math.sqrt(fan_in))
    return out.view(len(all_seeds), *parameter.shape)


def _fan_ins(network: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return the fan-in of each parameter of Linear and convolution layers (a bias has the fan-in of its weight), and the
    paths of the modules that initialize themselves and their children."""
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
                f"the layer {path or 'network'!r}, a {type(module).__name__}, has parameters but no reset_parameters() to"
                " initialize them; add that method, register the network with init=..., or pass initial weights to"
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
    """Merge trailing dimensions until their size is ``inputs``."""
    for first in reversed(range(x.ndim)):
        if math.prod(x.shape[first:]) == inputs:
            return x.flatten(first)
    raise ValueError(
        f"MLP with {inputs} inputs got a tensor of shape {tuple(x.shape)}; sizes[0] must be the size of a sample"
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
            f"{smallest} pixels, not {shape!r}; use an MLP for smaller images"
        )
    return image


def _parameter_count(network: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters"
