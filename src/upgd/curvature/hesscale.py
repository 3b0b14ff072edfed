"""HesScale: an estimate of the diagonal of the Hessian from the ordinary backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from upgd.curvature import activations, layers, losses
from upgd.curvature._backward import GradientWatch, add_as_grad, any_nonzero, if_compiled
from upgd.curvature._hooks import remove_all, remove_with
from upgd.curvature._registry import LAYERS, LOSSES, find
from upgd.curvature._sweep import Follower, LossFollower, ReshapeFollower, in_place

# Imported for their side effect of registering rules.
__all__ = ["HesScale", "activations", "layers", "losses"]

#: A parameter or module, the result of add_as_grad, and the parameters with whose gradients it accumulates.
_Value = tuple[Tensor | nn.Module, tuple[int, Tensor], Sequence[Tensor]]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class HesScale:
    """Estimate the diagonal of the loss's Hessian at linear cost during the ordinary ``loss.backward()``.

    Second derivatives are propagated backward from the loss, like gradients, keeping only the diagonal in each layer::

        ∂²L/∂a_l[i]²    ≈ Σ_k [ ∂²L/∂a_{l+1}[k]²·W_{l+1}[k, i]²·σ'(a_l[i])²
                                + ∂L/∂a_{l+1}[k]·W_{l+1}[k, i]·σ''(a_l[i]) ]
        ∂²L/∂W_l[i, j]² ≈ ∂²L/∂a_l[i]²·h_{l−1}[j]²

    The sweep starts with the exact diagonal at the network's output, so the last layer is exact. Batches are reduced as the
    criterion reduces them: with ``reduction="mean"``, the diagonal is the mean of per-sample values.

    Like gradients, diagonals accumulate over backward passes. A parameter's diagonal restarts with the first backward pass
    after ``zero_grad()``, that is, when ``param.grad`` is None or entirely zero. A backward pass that HesScale does not
    follow, such as that of a loss computed within :meth:`paused`, adds nothing. If it is the only one since
    ``zero_grad()``, there is no diagonal, which is an error (or zero, if ``zero_grad(set_to_none=False)`` left zeros).

    HesScale never guesses: if it cannot follow the computation, it raises an error that names the module. Layers must be
    modules, called with gradients enabled. See :mod:`upgd.curvature` for the supported layers and how to add more.

    Args:
        model: The network. HesScale adds forward hooks to its modules and hooks to its parameters, and changes nothing
            else. The hooks are removed when the HesScale object is deleted.
        criterion: The loss module, called as ``criterion(model(x), y)``. You may call ``backward()`` on its result
            multiplied by a number, or on a sum of several results.
        features: Modules, or their names, for which :meth:`feature_diagonal` is needed; see also :meth:`watch`.
        scaler: The ``torch.amp.GradScaler`` that scales the loss, if any. Diagonals are then those of the unscaled loss,
            as gradients are after ``scaler.unscale_(optimizer)``.

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
        # Keyed by id, because hashing a tensor is slow.
        self._values: dict[int, _Value] = {}
        # Keys whose values were discarded because the gradient restarted in an unfollowed pass.
        self._forgotten: set[int] = set()
        self._watches: dict[int, GradientWatch] = {}
        self._reshapes = ReshapeFollower(self)
        self._followers = _followers(self, model)
        self._loss_follower = _loss_follower(self, criterion)
        self._handles: list[RemovableHandle] = []
        remove_with(self, self._handles)
        self.watch(*features)
        for module, follower in self._followers.items():
            # First, because other hooks may replace the output, which is then no longer the output of this layer.
            self._handles.append(module.register_forward_hook(follower, prepend=True))
        self._handles.append(criterion.register_forward_hook(self._loss_follower, prepend=True, with_kwargs=True))

    def diagonal(self, param: Tensor) -> Tensor:
        """Return the estimate of ``∂²L/∂param²``, accumulated over the backward passes since ``zero_grad()``.

        Args:
            param: A parameter of a layer of the model.

        Returns:
            A detached tensor of the parameter's shape. Later backward passes create a new tensor and do not modify it.
        """
        value = self._current(param)
        if value is None:
            raise RuntimeError(self._why_not(param))
        return value

    def feature_diagonal(self, module: nn.Module) -> Tensor:
        """Return the estimate of ``∂²L/∂gate²`` for a gate of constant value 1 on each unit or channel of the output.

        This is the curvature of the output times the squared output, summed over the batch (and a channel's positions).
        Watch the module before the backward pass with ``HesScale(..., features=[module])`` or :meth:`watch`.

        Returns:
            A vector with one entry per unit or channel.
        """
        value = self._current(module)
        if value is not None:
            return value
        follower = self._followers.get(module)
        name = follower.name if follower else f"a {type(module).__name__}"
        if follower is None or not follower.watched:
            raise RuntimeError(
                f"HesScale did not watch the features of {name}; call curvature.watch(module) before the forward pass"
            )
        if id(module) in self._forgotten:
            raise RuntimeError(_not_followed(f"the features of {name}"))
        if id(module) in self._values:
            raise RuntimeError(_reset(f"the features of {name}"))
        raise RuntimeError(f"HesScale has seen no backward through {name} yet; call loss.backward() first")

    def watch(self, *modules: nn.Module | str) -> None:
        """Enable :meth:`feature_diagonal` for these modules, or modules of these names, from the next forward pass on."""
        for module in modules:
            if isinstance(module, str):
                module = self.model.get_submodule(module)
            if module not in self._followers:
                raise ValueError(
                    f"features must be layers of the model, but one is a {type(module).__name__} that is not in the model or "
                    "contains other modules; pass the layer or the activation itself"
                )
            self._followers[module].watched = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that disables HesScale for forward passes, for example to compute a second loss."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def remove(self) -> None:
        """Remove the hooks. Diagonals can still be read."""
        remove_all(self._handles)
        self._watches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy follows the copied model and starts without diagonals.
        features = [module for module, follower in self._followers.items() if follower.watched]
        return _rebuild, (self.model, self.criterion, features, self.scaler, bool(self._handles))

    def _current(self, key: Tensor | nn.Module) -> Tensor | None:
        """Return the accumulated value; None if there is none, or if the gradient was reset afterwards."""
        if id(key) not in self._values:
            return None
        owner, (backward, total), references = self._values[id(key)]
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:  # the compiler would compile every version of a gradient anew
            watches = [self._watches[id(one)] for one in references if id(one) in self._watches]
            # zero_grad() changes the gradients of all references.
            if not watches or any(watch.is_unchanged_since(backward) for watch in watches):
                return total
        # Clipping and DistributedDataParallel change them as well. Only their values show whether they were set to zero.
        gradients = [reference.grad for reference in references if reference.grad is not None]
        if not gradients:
            return None
        current = torch.where(any_nonzero(gradients), total, 0)
        if not is_compiling:  # kept, because users may change it in place, to average it over processes
            self._values[id(key)] = owner, (backward, current), references
        return current

    def _add(self, key: Tensor | nn.Module, value: Tensor, references: Sequence[Tensor]) -> None:
        """Accumulate a value like the gradients of ``references``, which this backward pass has not reached yet."""
        if self.scaler is not None:
            value = value / self.scaler.scale(torch.ones((), dtype=value.dtype, device=value.device))
        previous = self._values.get(id(key))
        total = add_as_grad(None if previous is None else previous[1], value, references)
        self._values[id(key)] = key, total, references
        self._forgotten.discard(id(key))
        watched = next((reference for reference in references if reference.is_leaf), None)
        if watched is not None:
            if id(watched) not in self._watches:
                self._watches[id(watched)] = GradientWatch(watched, self._forget)
                self._handles.extend(self._watches[id(watched)].handles)
            self._watches[id(watched)].follow(id(key))

    def _forget(self, keys: set[int], kept: bool | Tensor) -> None:
        """Handle an unfollowed backward pass: diagonals are kept if the gradient was nonzero, and discarded otherwise."""
        for key in keys & self._values.keys():
            if isinstance(kept, Tensor):
                owner, (backward, total), references = self._values[key]
                self._values[key] = owner, (backward, torch.where(kept, total, 0)), references
            else:
                del self._values[key]
                self._forgotten.add(key)

    def _drop_old(self, params: list[nn.Parameter], backward: int) -> None:
        """Free diagonals that are about to be replaced, so that the allocator can reuse their memory."""
        for param in params:
            if param.grad is None and id(param) in self._values and self._values[id(param)][1][0] != backward:
                del self._values[id(param)]

    def _lost(self, name: str) -> str:
        """Return the error message for a module that receives a gradient but no curvature."""
        everyone = [*self._followers.values(), self._loss_follower]
        strangers = [f"{f.name} was called with the result of {f.stranger}" for f in everyone if f.stranger]
        seen = f" ({'; '.join(strangers)})" if strangers else ""
        if any(f.stranger == "BackwardHookFunctionBackward" for f in everyone):
            return (
                f"HesScale cannot follow the output of {name} to the loss{seen}, because a module has a backward hook, which "
                "wraps its input and output; remove it (register_full_backward_hook, register_full_backward_pre_hook), or "
                "use a hook on a tensor or a parameter"
            )
        return (
            f"HesScale cannot follow the output of {name} to the loss{seen}. Between modules, only reshapes and casts are "
            "allowed, and the loss must come from the criterion: write activations as modules (nn.ReLU() instead of "
            "F.relu), sums as upgd.curvature.Residual or Add, and call the criterion that was passed to HesScale. For "
            "another loss of the same model, run its forward pass within curvature.paused()."
        )

    def _why_not(self, param: Tensor) -> str:
        name = next((f"{n!r}" for n, p in self.model.named_parameters() if p is param), None)
        if name is None:
            return f"HesScale does not know this parameter (shape {tuple(param.shape)}); pass a parameter of its model."
        if not param.requires_grad:
            return f"HesScale has no diagonal for {name}: it is frozen (requires_grad=False)."
        if not any(param is p for f in self._followers.values() for p in f.params):
            return f"HesScale has no diagonal for {name}: no known layer owns this parameter; put it into a module."
        if id(param) in self._forgotten:
            return _not_followed(name)
        if id(param) in self._values:
            return _reset(name)
        return (
            f"HesScale has no diagonal for {name} yet; call criterion(model(x), y).backward() while HesScale is attached, "
            f"through the module that owns the parameter.{if_compiled()}"
        )


def _not_followed(name: str) -> str:
    return (
        f"HesScale has no diagonal for {name}: since zero_grad(), its gradient comes only from a backward pass that "
        "HesScale did not follow; call criterion(model(x), y).backward() outside curvature.paused() as well, or set "
        "optimizer.curvature = None to use first-order utility."
    )


def _reset(name: str) -> str:
    return (
        f"HesScale has no diagonal for {name}: its gradient was reset after the last backward pass; call "
        "criterion(model(x), y).backward() after zero_grad(), and read the diagonal before the next zero_grad()"
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
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    followers: dict[nn.Module, Follower] = {}
    of_param: dict[Tensor, str] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        name = f"{path!r} ({kind})" if path else f"the model ({kind})"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(f"HesScale cannot follow {name}, which is compiled; pass the model without torch.compile")
        layer = find(LAYERS, module)
        if layer is None:
            if next(module.children(), None) is None and not isinstance(module, _CONTAINERS):
                raise TypeError(
                    f"HesScale has no rule for {name}; use one of {_names(LAYERS)}, or add a rule with "
                    "@upgd.curvature.layer or @upgd.curvature.elementwise"
                )
            continue
        if getattr(module, "inplace", False):
            raise ValueError(in_place(name))
        if getattr(module, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"HesScale supports convolutions with zero padding only, but {name} has {module.padding_mode!r}"
            )
        if hasattr(module, "parametrizations") or hasattr(module, "weight_orig") or hasattr(module, "weight_g"):
            raise TypeError(
                f"HesScale cannot follow {name}: its weight is computed from other parameters (weight or spectral norm, "
                "pruning, a parametrization); remove that first"
            )
        for param in module.parameters(recurse=False):
            if hasattr(param, "full_tensor"):
                raise TypeError(
                    f"HesScale cannot follow {name}: its parameters are sharded over processes, and it needs whole layers; "
                    "leave curvature out for first-order utility"
                )
            if param in of_param:
                raise ValueError(
                    f"HesScale cannot follow {name}: it shares a parameter with {of_param[param]}, so mixed second "
                    "derivatives would be missing; give each layer its own parameters"
                )
            of_param[param] = name
        followers[module] = Follower(owner, module, name, layer)
    return followers


def _loss_follower(owner: HesScale, criterion: nn.Module) -> LossFollower:
    rule = find(LOSSES, criterion) if isinstance(criterion, nn.Module) else None
    if rule is None:
        given = type(criterion).__name__ if isinstance(criterion, nn.Module) else repr(criterion)
        raise TypeError(
            f"criterion must be one of the modules {_names(LOSSES)}, not {given}; use the module instead of the "
            "function, or add a rule with @upgd.curvature.loss"
        )
    return LossFollower(owner, criterion, f"the criterion ({type(criterion).__name__})", rule)


def _names(registered: dict[type[nn.Module], Any]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in registered))
