"""What hooks need to know about the backward pass they run in, and how they add up what they see."""

import sys
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

# Which backward pass is running, will its graph be used again, and is this a pass of torch.func? There is no public way
# to ask.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def if_compiled() -> str:
    """What else may be the reason that hooks were not called, where something was compiled in this process; else nothing."""
    if "torch._dynamo" not in sys.modules:
        return ""
    return (
        " If the model is compiled: where another one of the same shape was compiled before it, torch takes that one's code,"
        " without hooks; call torch._dynamo.reset() in between."
    )


def adds_to_grad(param: Tensor) -> bool:
    """Whether the running backward pass will add to ``param.grad``: ``backward()`` does, ``autograd.grad()`` does not."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:  # torch's answer in autograd.grad()
        return False


def add_as_grad(so_far: tuple[int, Tensor] | None, value: Tensor, references: Iterable[Tensor]) -> tuple[int, Tensor]:
    """Add up over backward passes as the gradients of ``references`` do, and begin anew when those do.

    To be called in the backward pass, before it reaches them. Then gradients that are None or zero everywhere say that
    somebody called ``zero_grad()`` since the pass before.

    Args:
        so_far: what this function returned last; None at the beginning.
        value: what to add.
        references: parameters, of one layer; none to begin anew with every backward pass.

    Returns:
        The number of the backward pass, and the sum.
    """
    backward = current_backward()
    if so_far is not None:
        its_backward, total = so_far
        if its_backward == backward:  # another forward pass of the same backward pass
            value = total + value
        elif gradients := [reference.grad for reference in references if reference.grad is not None]:
            value = torch.where(any_nonzero(gradients), total + value, value)
    return backward, value


def any_nonzero(gradients: Iterable[Tensor]) -> Tensor:
    """Whether one of them holds something, without waiting for the device."""
    return torch.stack([gradient.any() for gradient in gradients]).any()


class GradientWatch:
    """Looks at every backward pass that reaches a parameter, and tells about those that nobody followed.

    What was added up as the parameter's gradient is then out of step: if that pass is the first after ``zero_grad()``, the
    sum belongs to a gradient that is no more.

    Args:
        param: the parameter; a leaf that requires a gradient.
        on_unfollowed: a method, called before such a pass adds to the gradient, with the keys that were followed and whether
            the gradient still holds something: False for None, else a tensor, so that nobody has to wait for the device.

    Attributes:
        handle: removes the hook.
    """

    def __init__(self, param: Tensor, on_unfollowed: Callable[[set[int], "bool | Tensor"], None]) -> None:
        self._param = param
        self._on_unfollowed = weakref.WeakMethod(on_unfollowed)
        self._keys: set[int] = set()
        self._followed = -1
        # No hook behind the accumulation, which would tell both cases apart: Python's garbage collector cannot see into it.
        self.handle: RemovableHandle = param.register_hook(self._look)  # type: ignore[no-untyped-call]

    def follow(self, key: int) -> None:
        """Say that the running backward pass is followed, and left something under this key."""
        self._keys.add(key)
        self._followed = current_backward()

    def _look(self, grad: Tensor) -> None:
        if self._followed != current_backward() and adds_to_grad(self._param):
            so_far, tell = self._param.grad, self._on_unfollowed()
            if tell is not None:
                tell(self._keys, False if so_far is None else so_far.any())


def sum_by_unit(values: Tensor, dim: int) -> Tensor:
    """For each unit or channel, which lie along ``dim``, the sum over the batch, if there is one, and all positions."""
    return values.movedim(dim, 0).reshape(values.shape[dim], -1).sum(1)
