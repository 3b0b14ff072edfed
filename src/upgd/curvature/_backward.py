"""Helpers for hooks that run during a backward pass: which pass is running, and how to accumulate values over passes."""

import sys
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

# torch has no public API for the number of the running backward pass, whether its graph is retained, or whether it is a
# torch.func transform.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def if_compiled() -> str:
    """Return an additional hint for error messages if something was compiled in this process, otherwise an empty string."""
    if "torch._dynamo" not in sys.modules:
        return ""
    return (
        " If the model is compiled and another model of the same shape was compiled before it, torch reuses that model's"
        " code, without hooks; call torch._dynamo.reset() in between."
    )


def adds_to_grad(param: Tensor) -> bool:
    """Return whether the running backward pass accumulates into ``param.grad``, unlike ``autograd.grad()``."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:  # raised by torch inside autograd.grad()
        return False


def add_as_grad(so_far: tuple[int, Tensor] | None, value: Tensor, references: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Accumulate a value over backward passes, and restart when the gradients of ``references`` do.

    Must be called during the backward pass, before it reaches the references. At that point, gradients that are None or
    entirely zero mean that ``zero_grad()`` was called since the previous pass.

    Args:
        so_far: the previous result of this function, or None.
        value: the value to add.
        references: parameters of one layer; if empty, every backward pass restarts.

    Returns:
        The number of the backward pass and the sum.
    """
    backward = current_backward()
    if so_far is not None:
        its_backward, total = so_far
        if its_backward == backward:  # several forward passes in one backward pass
            value = total + value
        elif gradients := [reference.grad for reference in references if reference.grad is not None]:
            value = torch.where(any_nonzero(gradients), total + value, value)
    return backward, value


def any_nonzero(gradients: Iterable[Tensor]) -> Tensor:
    """Return whether any gradient has a nonzero entry, as a tensor, without synchronizing with the device."""
    return torch.stack([gradient.any() for gradient in gradients]).any()


class GradientWatch:
    """Observes every backward pass that reaches a parameter, and reports those that were not followed.

    Values accumulated alongside the gradient become stale in such a pass: if it is the first after ``zero_grad()``, they
    belong to a gradient that no longer exists. They also become stale by ``zero_grad()`` itself; see
    :meth:`is_unchanged_since`.

    Args:
        param: the parameter, a leaf that requires a gradient.
        on_unfollowed: a bound method, called before such a pass accumulates into the gradient. Its arguments are the
            followed keys and whether the gradient is nonzero: False if it is None, otherwise a tensor, which avoids a
            synchronization with the device.

    Attributes:
        handles: remove the hooks.
    """

    def __init__(self, param: Tensor, on_unfollowed: Callable[[set[int], "bool | Tensor"], None]) -> None:
        self._param = param
        self._on_unfollowed = weakref.WeakMethod(on_unfollowed)
        self._keys: set[int] = set()
        self._followed = -1
        # The last pass that accumulated into the gradient, and which version of which tensor it left.
        self._accumulated = -1
        self._left: tuple[TensorWeakRef, int] | None = None
        looks: RemovableHandle = param.register_hook(self._look)  # type: ignore[no-untyped-call]
        # The garbage collector cannot see references in this kind of hook.
        marks: RemovableHandle = param.register_post_accumulate_grad_hook(_Mark(weakref.ref(self)))  # type: ignore[no-untyped-call]
        self.handles = looks, marks

    def follow(self, key: int) -> None:
        """Record that the running backward pass is followed and stored a value under this key."""
        self._keys.add(key)
        self._followed = current_backward()

    def is_unchanged_since(self, backward: int) -> bool:
        """Return whether nobody changed the gradient after this pass or a later one accumulated into it.

        Also True if none did, as in ``autograd.grad()``. The version of a tensor is known without a synchronization with the
        device.
        """
        if self._accumulated < backward:
            return True
        grad = self._param.grad
        if grad is None or self._left is None:
            return grad is None and self._left is None
        left, version = self._left
        return left() is grad and grad._version == version

    def mark(self, param: Tensor) -> None:
        """Record that the running backward pass accumulated into the gradient."""
        self._accumulated = current_backward()
        # The id of a tensor that no longer exists may be that of a new one.
        self._left = None if param.grad is None else (TensorWeakRef(param.grad), param.grad._version)

    def _look(self, grad: Tensor) -> None:
        if self._followed != current_backward() and adds_to_grad(self._param):
            so_far, tell = self._param.grad, self._on_unfollowed()
            if tell is not None:
                tell(self._keys, False if so_far is None else so_far.any())


class _Mark:
    """The hook that calls :meth:`GradientWatch.mark`."""

    def __init__(self, watch: "weakref.ref[GradientWatch]") -> None:
        self._watch = watch

    def __call__(self, param: Tensor) -> None:
        watch = self._watch()
        if watch is not None:
            watch.mark(param)


def sum_by_unit(values: Tensor, dim: int) -> Tensor:
    """Sum over the batch, if there is one, and all positions; ``dim`` is the dimension of the units or channels."""
    return values.movedim(dim, 0).reshape(values.shape[dim], -1).sum(1)
