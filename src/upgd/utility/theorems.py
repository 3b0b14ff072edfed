"""The paper's two theorems about approximate utilities: propagation (Appendix A) and conservation (Appendix B).

Both concern chains ``a_l = W_l·h_{l−1} + b_l``, ``h_l = σ(a_l)``. The *contribution* of the weight ``W_l[i, j]`` to its
pre-activation is ``c = W_l[i, j]·h_{l−1}[j]``; that of a bias is the bias. The two terms of the second-order utility are
then one number per unit and sample times a power of the contribution::

    first    f_l[i, j] = ρ_l[i]·c        ρ = −∂L/∂a
    second   s_l[i, j] = κ_l[i]·c²       κ = ½·∂²L/∂a²   (HesScale's estimate)

``docs/utility.md`` derives the formulas and points out errors in the printed theorems.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from upgd.networks import ACTIVATION_MODULES, CReLU
from upgd.utility._derivatives import hessian_diagonal
from upgd.utility._model import Call, Criterion, calls

__all__ = ["Balance", "Terms", "conservation", "propagate"]

Function = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """The two terms of a second-order utility; their sum is the utility."""

    first: Tensor
    second: Tensor

    def total(self) -> Tensor:
        """The second-order utility."""
        return self.first + self.second


class Balance(NamedTuple):
    """The utilities around each unit of a hidden layer: one entry per unit, summed over the batch."""

    #: The sum over the incoming weights of the unit, including its bias.
    incoming: Terms
    #: The sum over the outgoing weights of the unit.
    outgoing: Terms
    #: The second-order utility of the incoming weights together, beyond the sum of their utilities: ``κ·(a² − Σ c²)``. The
    #: theorem assumes that it is zero.
    interaction: Tensor


class _Layer(NamedTuple):
    """A Linear layer of a chain and the activation after it, with the tensors they computed, ``(samples, units)``."""

    name: str
    linear: nn.Linear
    #: The name of the module that outputs ``hidden``.
    feature: str
    inputs: Tensor
    preactivation: Tensor
    hidden: Tensor
    slope: Tensor
    bend: Tensor

    def contributions(self) -> Tensor:
        """Return ``W[i, j]·h[j]``: ``(samples, units, inputs)``."""
        return self.linear.weight.detach() * self.inputs.unsqueeze(1)


def propagate(model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> dict[str, Terms]:
    """Propagate utility: compute the utilities of a layer's weights from those of the next layer's weights.

    Per sample, from the last layer, where ``ρ = −∂L/∂a`` and ``κ = ½·∂²L/∂a²`` are computed from the loss, to the first,
    with σ' and σ'' at ``a_l[i]`` and ``h = h_l[i]``::

        ρ_l[i] = σ'/h · Σ_k f_{l+1}[k, i]
        κ_l[i] = σ'²/h² · Σ_k s_{l+1}[k, i] − σ''/(2h) · Σ_k f_{l+1}[k, i]

    Args:
        model: A chain of Linear layers and activations, such as ``upgd.networks.MLP``.
        criterion: The loss, called as ``criterion(model(x), y)``.
        x: The inputs.
        y: The targets.

    Returns:
        The two terms for each name of ``model.named_parameters()``, equal to those of :func:`first_order` and
        :func:`second_order`. NaN where the information is lost: if nonzero contributions cancel exactly, a unit outputs
        ``h = 0`` with ``σ' ≠ 0``. Its outgoing utilities are then zero and do not determine its incoming ones.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> terms = propagate(model, nn.MSELoss(), torch.ones(1, 3), torch.zeros(1, 1))
        >>> terms["0.weight"].total().shape
        torch.Size([4, 3])
    """
    layers, rho, kappa = _chain(model, criterion, x, y)
    terms: dict[str, Terms] = {}
    for layer, previous in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
        prefix = f"{layer.name}." if layer.name else ""
        of_weight = _terms(rho.unsqueeze(2), kappa.unsqueeze(2), layer.contributions())
        terms[f"{prefix}weight"] = Terms(of_weight.first.sum(0), of_weight.second.sum(0))
        if layer.linear.bias is not None:
            of_bias = _terms(rho, kappa, layer.linear.bias.detach())
            terms[f"{prefix}bias"] = Terms(of_bias.first.sum(0), of_bias.second.sum(0))
        if previous is not None:
            rho, kappa = _from_outgoing(of_weight.first.sum(1), of_weight.second.sum(1), previous)
    return {name: terms[name] for name, _ in model.named_parameters()}


def conservation(model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> dict[str, Balance]:
    """Return the utilities of the incoming and the outgoing weights of each hidden unit.

    Utility is conserved if the activation is linear on each side of the origin (ReLU, LeakyReLU, identity)::

        incoming.first                = outgoing.first
        incoming.second + interaction = outgoing.second

    Args:
        model: See :func:`propagate`.
        criterion: See :func:`propagate`.
        x: The inputs.
        y: The targets.

    Returns:
        The balance of the units, for the name of each module that outputs hidden features. ``outgoing.total()`` is the
        second-order utility of the features.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> balance = conservation(model, nn.MSELoss(), torch.randn(1, 3), torch.zeros(1, 1))["1"]
        >>> torch.allclose(balance.incoming.first, balance.outgoing.first, atol=1e-6)
        True
    """
    layers, rho, kappa = _chain(model, criterion, x, y)
    balances: dict[str, Balance] = {}
    for layer, previous in reversed(list(zip(layers[1:], layers, strict=False))):
        of_weights = _terms(rho.unsqueeze(2), kappa.unsqueeze(2), layer.contributions())
        outgoing = Terms(of_weights.first.sum((0, 1)), of_weights.second.sum((0, 1)))
        rho, kappa = _from_derivatives(rho, kappa, layer.linear.weight.detach(), previous)
        # The sum of squared contributions to a unit, including its bias, without a tensor of all contributions.
        squares = previous.inputs**2 @ previous.linear.weight.detach().T ** 2 + _bias(previous.linear) ** 2
        incoming = Terms((rho * previous.preactivation).sum(0), (kappa * squares).sum(0))
        interaction = (kappa * (previous.preactivation**2 - squares)).sum(0)
        balances[previous.feature] = Balance(incoming, outgoing, interaction)
    return dict(reversed(balances.items()))


def _terms(rho: Tensor, kappa: Tensor, contributions: Tensor) -> Terms:
    """Return ``ρ·c`` and ``κ·c²``. A zero contribution has zero utility, even if ρ and κ are undefined."""
    nothing = contributions == 0
    return Terms(torch.where(nothing, 0, rho * contributions), torch.where(nothing, 0, kappa * contributions**2))


def _from_outgoing(first: Tensor, second: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
    """Return ρ and κ of a layer from the summed outgoing utilities of its units: the propagation theorem."""
    silent, dead = layer.hidden == 0, (layer.slope == 0) & (layer.bend == 0)
    hidden = torch.where(silent, torch.nan, layer.hidden)
    rho = layer.slope / hidden * first
    kappa = (layer.slope / hidden) ** 2 * second - layer.bend / (2 * hidden) * first
    return torch.where(dead, 0, rho), torch.where(dead, 0, kappa)


def _from_derivatives(rho: Tensor, kappa: Tensor, weight: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
    """Return ρ and κ of a layer from those of the next layer: backpropagation and HesScale."""
    below = rho @ weight
    return below * layer.slope, (kappa @ weight**2) * layer.slope**2 - below * layer.bend / 2


def _chain(model: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> tuple[list[_Layer], Tensor, Tensor]:
    """Return the layers of a chain, and ρ and κ of the last layer, ``(samples, outputs)``, computed from the loss."""
    order = calls(model, x)
    starts = [place for place, call in enumerate(order) if type(call.module) is nn.Linear]
    if not starts:
        raise ValueError("model has no Linear layer, so there is no utility to propagate")
    order = order[starts[0] :]
    _check_chain(order, model(x))
    starts = [start - starts[0] for start in starts]
    layers = [_layer(order[start:end]) for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]
    outputs = order[starts[-1]].output
    after_last = _composed(order[starts[-1] + 1 :])

    def loss(a: Tensor) -> Tensor:
        return criterion(after_last(a), y)

    rho, kappa = -grad(loss)(outputs), hessian_diagonal(loss, outputs) / 2
    return layers, rho.reshape(-1, outputs.shape[-1]), kappa.reshape(-1, outputs.shape[-1])


def _check_chain(order: list[Call], outputs: Tensor) -> None:
    allowed = (nn.Linear, nn.Identity, nn.Flatten, *ACTIVATION_MODULES)
    for call, following in zip(order, [*order[1:], None], strict=True):
        if not isinstance(call.module, allowed) or isinstance(call.module, nn.PReLU | CReLU):
            raise ValueError(
                f"the module {call.name!r} is a {type(call.module).__name__}, but utility is propagated through Linear"
                " layers and element-wise activations only"
            )
        if not torch.equal(call.output, outputs if following is None else following.input):
            raise ValueError(
                f"the output of the module {call.name!r} is not the input of the next one; the model must be a chain of"
                " modules, with its activations as modules"
            )


def _layer(block: list[Call]) -> _Layer:
    linear, activation = block[0], _composed(block[1:])
    preactivation = linear.output.reshape(-1, linear.output.shape[-1])
    slope_at = grad(lambda a: activation(a).sum())
    slope, bend = slope_at(preactivation), grad(lambda a: slope_at(a).sum())(preactivation)
    hidden = activation(preactivation)
    inputs = linear.input.reshape(-1, linear.input.shape[-1])
    assert isinstance(linear.module, nn.Linear)
    return _Layer(linear.name, linear.module, block[-1].name, inputs, preactivation, hidden, slope, bend)


def _composed(block: list[Call]) -> Function:
    def apply(a: Tensor) -> Tensor:
        for call in block:
            a = call.module(a.clone())  # the module may work in place
        return a

    return apply


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(()) if linear.bias is None else linear.bias.detach()
