"""What hooks need to know about the backward pass they run in, and how they add up what they see."""

from collections.abc import Callable

import torch
from torch import Tensor

# Which backward pass is running, will its graph be used again, and is this a pass of torch.func? There is no public way
# to ask.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def add_as_grad(so_far: tuple[int, Tensor] | None, value: Tensor, reference: Tensor | None) -> tuple[int, Tensor]:
    """Add up over backward passes as the gradient of ``reference`` does, and begin anew when that does.

    To be called in the backward pass, before it reaches ``reference``. Then a gradient that is None or zero everywhere
    says that somebody called ``zero_grad()`` since the pass before.

    Args:
        so_far: what this function returned last; None at the beginning.
        value: what to add.
        reference: a parameter; None to begin anew with every backward pass.

    Returns:
        The number of the backward pass, and the sum.
    """
    backward = current_backward()
    if so_far is not None:
        its_backward, total = so_far
        if its_backward == backward:  # another forward pass of the same backward pass
            value = total + value
        elif reference is not None and reference.grad is not None:
            value = torch.where(reference.grad.any(), total + value, value)
    return backward, value


def sum_by_unit(values: Tensor, dim: int) -> Tensor:
    """For each unit or channel, which lie along ``dim``, the sum over the batch, if there is one, and all positions."""
    return values.movedim(dim, 0).reshape(values.shape[dim], -1).sum(1)
