"""HesScale: an estimate of the Hessian's diagonal from the ordinary backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from upgd.curvature import activations, layers, losses
from upgd.curvature._backward import GradientWatch, add_as_grad, if_compiled
from upgd.curvature._hooks import remove_all, remove_with
from upgd.curvature._registry import LAYERS, LOSSES, find
from upgd.curvature._sweep import Follower, LossFollower, ReshapeFollower, in_place

# Importing them registers their rules.
__all__ = ["HesScale", "activations", "layers", "losses"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class HesScale:
    r"""The diagonal of the loss's Hessian, estimated at linear cost during the ordinary ``loss.backward()``.

    Second derivatives are swept back from the loss as gradients are, keeping in each layer the diagonal alone:

    .. math::
        \frac{\partial^2 L}{\partial a_{l,i}^2} \approx \sum_k \Big[ \frac{\partial^2 L}{\partial a_{l+1,k}^2}
        W_{l+1,ki}^2\, \sigma'(a_{l,i})^2 + \frac{\partial L}{\partial a_{l+1,k}} W_{l+1,ki}\, \sigma''(a_{l,i}) \Big],
        \qquad
        \frac{\partial^2 L}{\partial W_{l,ij}^2} \approx \frac{\partial^2 L}{\partial a_{l,i}^2}\, h_{l-1,j}^2

    beginning with the exact diagonal at the network's output, so that the last layer is exact. A batch counts as the
    criterion reduces it: with ``reduction="mean"``, the mean of per-sample values.

    Like gradients, diagonals add up over several backward passes; a parameter's begins anew with the first backward after
    ``zero_grad()``, that is when ``param.grad`` is None or zero everywhere. A backward pass that HesScale does not follow,
    such as one of a loss computed within :meth:`paused`, adds nothing; where it is the first after ``zero_grad()`` and no
    other comes, there is no diagonal, which is an error (or zero, if ``zero_grad(set_to_none=False)`` left zeros).

    What it cannot follow, it refuses with an error that names the module: it never guesses. Layers must be modules, called
    with gradients enabled; see :mod:`upgd.curvature` for what is known and how to add to it.

    Args:
        model: the network. Its modules get forward hooks, its parameters hooks; nothing else about it changes. The hooks are
            gone as soon as this object is.
        criterion: the loss module, called as ``criterion(model(x), y)``. What you call ``backward()`` on may be its
            result times any number, and sums of several results.
        features: modules, or their names, whose :meth:`feature_diagonal` you will want; see also :meth:`watch`.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does; diagonals are then those of the loss
            itself, as gradients are after ``scaler.unscale_(optimizer)``.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> criterion = nn.CrossEntropyLoss()
        >>> curvature = upgd.HesScale(model, criterion)
        >>> criterion(model(torch.ones(5, 3)), torch.zeros(5, dtype=torch.long)).backward()
        >>> curvature.diagonal(model[0].weight).shape
        torch.Size([4, 3])
        >>> curvature.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        features: Iterable[nn.Module | str] = (),
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        self.model = model
        self.criterion = criterion
        self.scaler = scaler
        self.is_paused = False
        # By identity, because a tensor's own hash is slow: the parameter or module, and what add_as_grad gave for it.
        self._values: dict[int, tuple[Tensor | nn.Module, tuple[int, Tensor]]] = {}
        # What is gone from there because the gradient began anew without us.
        self._forgotten: set[int] = set()
        self._watches: dict[int, GradientWatch] = {}
        self._reshapes = ReshapeFollower(self)
        self._followers = _followers(self, model)
        self._loss_follower = _loss_follower(self, criterion)
        self._handles: list[RemovableHandle] = []
        remove_with(self, self._handles)
        self.watch(*features)
        for module, follower in self._followers.items():
            # Before the hooks of others, which may replace the output: then it is not this layer's any more.
            self._handles.append(module.register_forward_hook(follower, prepend=True))
        self._handles.append(criterion.register_forward_hook(self._loss_follower, prepend=True, with_kwargs=True))

    def diagonal(self, param: Tensor) -> Tensor:
        """The estimate of ``∂²L/∂param²`` that the backward passes since ``zero_grad()`` have left.

        Args:
            param: a parameter of a layer of the model.

        Returns:
            A tensor of the parameter's shape, detached. A later backward makes a new one and does not change it.
        """
        if id(param) in self._values:
            return self._values[id(param)][1][1]
        raise RuntimeError(self._why_not(param))

    def feature_diagonal(self, module: nn.Module) -> Tensor:
        """The estimate of ``∂²L/∂gate²`` for a gate, constant 1, on each unit or channel of the module's output.

        That is the sum over the batch (and a channel's positions) of the output's curvature times the output squared.
        Watch the module before the backward pass: ``HesScale(..., features=[module])`` or :meth:`watch`.

        Returns:
            A vector with one entry for each unit or channel.
        """
        if id(module) in self._values:
            return self._values[id(module)][1][1]
        follower = self._followers.get(module)
        name = follower.name if follower else f"a {type(module).__name__}"
        if follower is None or not follower.watched:
            raise RuntimeError(
                f"HesScale did not watch the features of {name}; call curvature.watch(module) before the forward pass."
            )
        if id(module) in self._forgotten:
            raise RuntimeError(_not_followed(f"the features of {name}"))
        raise RuntimeError(f"HesScale has seen no backward through {name} yet; call loss.backward() first.")

    def watch(self, *modules: nn.Module | str) -> None:
        """Make :meth:`feature_diagonal` work for these modules, or modules of these names, from the next forward on."""
        for module in modules:
            if isinstance(module, str):
                module = self.model.get_submodule(module)
            if module not in self._followers:
                raise ValueError(
                    f"features must be layers of the model, but one is a {type(module).__name__} which is not or which "
                    "contains other modules; name the layer or the activation itself."
                )
            self._followers[module].watched = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not follow forward passes made within: for a second loss that HesScale is to have no part in."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def remove(self) -> None:
        """Take the hooks off again. Diagonals can still be read."""
        remove_all(self._handles)
        self._watches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy follows the copied model. It begins without diagonals.
        features = [module for module, follower in self._followers.items() if follower.watched]
        return _rebuild, (self.model, self.criterion, features, self.scaler, bool(self._handles))

    def _add(self, key: Tensor | nn.Module, value: Tensor, references: Sequence[Tensor]) -> None:
        """Add up as the gradients of ``references`` do, which this backward pass has not reached yet."""
        if self.scaler is not None:
            value = value / self.scaler.scale(torch.ones((), dtype=value.dtype, device=value.device))
        previous = self._values.get(id(key))
        self._values[id(key)] = key, add_as_grad(None if previous is None else previous[1], value, references)
        self._forgotten.discard(id(key))
        watched = next((reference for reference in references if reference.is_leaf), None)
        if watched is not None:
            if id(watched) not in self._watches:
                self._watches[id(watched)] = GradientWatch(watched, self._forget)
                self._handles.append(self._watches[id(watched)].handle)
            self._watches[id(watched)].follow(id(key))

    def _forget(self, keys: set[int], kept: bool | Tensor) -> None:
        """A backward pass that was not followed leaves diagonals as they are, unless it found no gradient: then they go."""
        for key in keys & self._values.keys():
            if isinstance(kept, Tensor):
                owner, (backward, total) = self._values[key]
                self._values[key] = owner, (backward, torch.where(kept, total, 0))
            else:
                del self._values[key]
                self._forgotten.add(key)

    def _drop_old(self, params: list[nn.Parameter], backward: int) -> None:
        """Free what the coming values will replace, so that they find its memory, which is still in the cache."""
        for param in params:
            if param.grad is None and id(param) in self._values and self._values[id(param)][1][0] != backward:
                del self._values[id(param)]

    def _lost(self, name: str) -> str:
        """What to say when gradient arrives at a module and no curvature has."""
        everyone = [*self._followers.values(), self._loss_follower]
        strangers = [f"{f.name} was called with the result of {f.stranger}" for f in everyone if f.stranger]
        seen = f" ({'; '.join(strangers)})" if strangers else ""
        return (
            f"HesScale cannot follow the output of {name} to the loss{seen}. Between the modules there may be nothing but "
            "reshapes and casts, and the loss must come from the criterion: write activations as modules (nn.ReLU() for "
            "F.relu), sums as upgd.curvature.Residual or Add, and call the criterion that HesScale was given. For another "
            "loss of the same model, run its forward pass within curvature.paused()."
        )

    def _why_not(self, param: Tensor) -> str:
        name = next((f"{n!r}" for n, p in self.model.named_parameters() if p is param), None)
        if name is None:
            return f"HesScale knows no such parameter (shape {tuple(param.shape)}); pass one of its model's parameters."
        if not param.requires_grad:
            return f"HesScale has no diagonal for {name}: it is frozen (requires_grad=False)."
        if not any(param is p for f in self._followers.values() for p in f.params):
            return f"HesScale has no diagonal for {name}: no layer it knows owns this parameter; put it into a module."
        if id(param) in self._forgotten:
            return _not_followed(name)
        return (
            f"HesScale has no diagonal for {name} yet; call criterion(model(x), y).backward() while it is attached, through "
            f"the module that owns the parameter.{if_compiled()}"
        )


def _not_followed(name: str) -> str:
    return (
        f"HesScale has no diagonal for {name}: since zero_grad() its gradient comes only from a backward pass that HesScale "
        "did not follow; call criterion(model(x), y).backward() outside of curvature.paused(), too, or set "
        "optimizer.curvature = None for steps with first-order utility."
    )


def _rebuild(
    model: nn.Module, criterion: nn.Module, features: list[nn.Module], scaler: Any, attached: bool
) -> HesScale:
    copy = HesScale(model, criterion, features=features, scaler=scaler)
    if not attached:
        copy.remove()
    return copy


def _followers(owner: HesScale, model: nn.Module) -> dict[nn.Module, Follower]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but it is a {type(model).__name__}.")
    followers: dict[nn.Module, Follower] = {}
    of_param: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        name = f"{path!r} ({kind})" if path else f"the model ({kind})"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"HesScale cannot look into {name}, which is compiled; give it the model without torch.compile."
            )
        layer = find(LAYERS, module)
        if layer is None:
            if next(module.children(), None) is None and not isinstance(module, _CONTAINERS):
                raise TypeError(
                    f"HesScale has no rule for {name}; take one of {_names(LAYERS)}, or add a rule with "
                    "@upgd.curvature.layer or @upgd.curvature.elementwise."
                )
            continue
        if getattr(module, "inplace", False):
            raise ValueError(in_place(name))
        if getattr(module, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"HesScale follows convolutions that pad with zeros, but {name} has {module.padding_mode!r}."
            )
        if hasattr(module, "parametrizations") or hasattr(module, "weight_orig") or hasattr(module, "weight_g"):
            raise TypeError(
                f"HesScale cannot follow {name}: its weight is computed from other parameters (weight or spectral norm, "
                "pruning, a parametrization); take that off first."
            )
        for param in module.parameters(recurse=False):
            if param in of_param:
                raise ValueError(
                    f"HesScale cannot follow {name}: it shares a parameter with {of_param[param]}, and mixed second "
                    "derivatives would be missing; give each layer its own."
                )
            of_param[param] = name
        followers[module] = Follower(owner, module, name, layer)
    return followers


def _loss_follower(owner: HesScale, criterion: nn.Module) -> LossFollower:
    rule = find(LOSSES, criterion) if isinstance(criterion, nn.Module) else None
    if rule is None:
        given = type(criterion).__name__ if isinstance(criterion, nn.Module) else repr(criterion)
        raise TypeError(
            f"criterion must be one of the modules {_names(LOSSES)}, but it is {given}; use the module instead of the "
            "function, or add a rule with @upgd.curvature.loss."
        )
    return LossFollower(owner, criterion, f"the criterion ({type(criterion).__name__})", rule)


def _names(registered: dict[type[nn.Module], Any]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in registered))
