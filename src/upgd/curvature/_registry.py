"""Registry of layer and loss rules.

A *layer rule* maps the curvature ``h`` (second derivatives of the loss with respect to each entry of the layer's output)
and the gradient ``g`` (first derivatives, same shape) to the curvature of the layer's input. It also adds the diagonals of
the layer's parameters. A *loss rule* starts the sweep: it returns the curvature of the loss's input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

#: ``rule(module, call, h, g) -> curvature of the input``; see :class:`upgd.curvature.Call`.
LayerRule = Callable[[Any, Any, Tensor, Tensor], Tensor | None]
#: ``rule(criterion, input, target, factor) -> curvature of the input``; ``factor`` is the gradient at the loss.
LossRule = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
#: ``derivatives(module, x) -> (σ'(x), σ''(x))``; None instead of σ'' if it is zero.
Derivatives = Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]
#: ``capture(module, input, output) -> value``, which the rule finds in ``call.captured``
Capture = Callable[[Any, Tensor, Tensor], Any]

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])


@dataclass(frozen=True)
class Layer:
    """The rule and options of a layer type; the fields are the arguments of :func:`layer`."""

    rule: LayerRule
    capture: Capture | None = None
    unit_dim: int | None = None


LAYERS: dict[type[nn.Module], Layer] = {}
LOSSES: dict[type[nn.Module], LossRule] = {}


def layer(
    *types: type[nn.Module], capture: Capture | None = None, unit_dim: int | None = None
) -> Callable[[AnyRule], AnyRule]:
    """Register the rule for one or more layer types.

    Args:
        types: Module classes with one input tensor and one output tensor, without interaction between samples.
        capture: Called as ``capture(module, input, output)`` in the forward pass; its result is available to the rule as
            ``call.captured``. It can also raise an error for calls that the rule does not support. It must not return the
            output itself, which would keep the graph alive; ``output.detach()`` is fine.
        unit_dim: The output dimension of the units or channels, counted from the end. Default: None, the same dimension as
            in the input.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self, units):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(units))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @upgd.curvature.layer(Scale)
        ... def scale(module, call, h, g):
        ...     call.add(module.weight, (h * call.input**2).sum(0))
        ...     return h * module.weight**2
    """

    def register(rule: AnyRule) -> AnyRule:
        for kind in types:
            LAYERS[kind] = Layer(rule, capture, unit_dim)
        return rule

    return register


def elementwise(*types: type[nn.Module]) -> Callable[[Derivatives], Derivatives]:
    """Register an activation by its first and second derivative. The curvature of its input is ``h·σ'² + g·σ''``.

    Example:
        >>> class Sine(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sin(x)
        >>> @upgd.curvature.elementwise(Sine)
        ... def sine(module, x):
        ...     return torch.cos(x), -torch.sin(x)
    """

    def register(derivatives: Derivatives) -> Derivatives:
        def rule(module: Any, call: Any, h: Tensor, g: Tensor) -> Tensor | None:
            if not call.needs_input:
                return None
            first, second = derivatives(module, call.input)
            h = h * first.square()
            return h if second is None else h.addcmul_(g, second)

        layer(*types)(rule)
        return derivatives

    return register


def loss(*types: type[nn.Module]) -> Callable[[AnyRule], AnyRule]:
    """Register the rule for one or more loss modules, called as ``criterion(input, target)``.

    The rule is called as ``rule(criterion, input, target, factor)`` and returns the second derivative of
    ``(factor * criterion(input, target)).sum()`` with respect to each entry of ``input``. ``factor`` has the shape of the
    criterion's output: a scalar, or one number per entry with ``reduction="none"``.
    """

    def register(rule: AnyRule) -> AnyRule:
        for kind in types:
            LOSSES[kind] = rule
        return rule

    return register


def find(registered: dict[type[nn.Module], Any], module: nn.Module) -> Any | None:
    """Return the entry for the module's type, or for a base class whose ``forward`` the type does not override."""
    for kind in type(module).__mro__:
        if kind in registered:
            return registered[kind] if type(module).forward is kind.forward else None
    return None
