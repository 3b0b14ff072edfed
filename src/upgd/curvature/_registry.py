"""Which module is swept by which rule.

A *layer rule* takes the curvature ``h`` (second derivatives of the loss, one per entry of the layer's output) and the
gradient ``g`` (first derivatives, same shape) to the curvature of the layer's input, and leaves the diagonal of the
layer's parameters on the way. A *loss rule* begins the sweep: it gives the curvature of the loss's input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

#: ``rule(module, call, h, g) -> curvature of the input``; see :class:`upgd.curvature.Call`.
LayerRule = Callable[[Any, Any, Tensor, Tensor], Tensor | None]
#: ``rule(criterion, input, target, factor) -> curvature of the input``; ``factor`` is the gradient at the loss.
LossRule = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
#: ``derivatives(module, x) -> (σ'(x), σ''(x))``, with None for a σ'' that is zero.
Derivatives = Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]
#: ``capture(module, input, output) -> whatever the rule wants to find in call.captured``
Capture = Callable[[Any, Tensor, Tensor], Any]

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])


@dataclass(frozen=True)
class Layer:
    """What is known of a type of layers; the fields are the arguments of :func:`layer`."""

    rule: LayerRule
    capture: Capture | None = None
    unit_dim: int | None = None


LAYERS: dict[type[nn.Module], Layer] = {}
LOSSES: dict[type[nn.Module], LossRule] = {}


def layer(
    *types: type[nn.Module], capture: Capture | None = None, unit_dim: int | None = None
) -> Callable[[AnyRule], AnyRule]:
    """Register the rule of one or more types of layers.

    Args:
        types: modules with one input tensor and one output tensor, without interaction between samples.
        capture: what to keep from the forward pass beside the input, as ``capture(module, input, output)``, or the place
            to raise an error about a call that the rule does not cover. It must not keep the output itself, which would
            keep the whole graph alive; ``output.detach()`` is fine.
        unit_dim: the dimension of the output that counts units or channels, from the end; None if it is where the input
            has it.

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
    """Register an activation by its first and second derivative: the curvature of its input is ``h·σ'² + g·σ''``.

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
    """Register the rule of one or more types of loss modules, called as ``criterion(input, target)``.

    The rule is called as ``rule(criterion, input, target, factor)`` and returns the second derivative of
    ``(factor * criterion(input, target)).sum()`` by each entry of ``input``. ``factor`` has the shape of the criterion's
    output: a number, or one for each entry with ``reduction="none"``.
    """

    def register(rule: AnyRule) -> AnyRule:
        for kind in types:
            LOSSES[kind] = rule
        return rule

    return register


def find(registered: dict[type[nn.Module], Any], module: nn.Module) -> Any | None:
    """What is registered for the module's type, or for a base class whose ``forward`` the type has not replaced."""
    for kind in type(module).__mro__:
        if kind in registered:
            return registered[kind] if type(module).forward is kind.forward else None
    return None
