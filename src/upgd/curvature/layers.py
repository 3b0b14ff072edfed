"""Propagation of curvature through layers.

For a layer that maps an input x to an output y, the general rule keeps only the diagonal h of the Hessian with respect to
y::

    ∂²L/∂x_i² ≈ Σ_k h_k·(∂y_k/∂x_i)² + g_k·∂²y_k/∂x_i²

Every rule in this module is this sum in closed form, at linear cost. For a linear map, the second term is zero, and the
first is the ordinary backward pass with squared weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upgd.curvature._registry import layer
from upgd.curvature._sweep import Call
from upgd.curvature.modules import Add, Fork, Gate


@layer(nn.Identity, nn.Flatten, nn.Unflatten, Fork, Add)
def unchanged(module: nn.Module, call: Call, h: Tensor, g: Tensor) -> Tensor:
    """Pass curvature unchanged: entries of the input and output correspond; the sweep reshapes and sums branches."""
    return h


@layer(nn.Linear, unit_dim=-1)
def linear(module: nn.Linear, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    weight, bias, x = module.weight, module.bias, call.input
    rows = h
    if h.ndim != 2:  # a single sample, or sequences
        rows, x = h.reshape(-1, module.out_features), x.reshape(-1, module.in_features)
    if call.wants(weight):
        call.add(weight, rows.t() @ (x * x))
    if call.wants(bias):
        call.add(bias, rows.sum(0))
    return h @ (weight * weight) if call.needs_input else None


@layer(nn.Conv1d, unit_dim=-2)
@layer(nn.Conv2d, unit_dim=-3)
def convolution(module: nn.Conv1d | nn.Conv2d, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    weight, bias = module.weight, module.bias
    x = call.input if call.input.ndim == weight.ndim else call.input.unsqueeze(0)
    padded, padding, unpad = _pad(module, x)
    by_input, by_weight, by_bias = torch.ops.aten.convolution_backward(
        h if h.ndim == weight.ndim else h.unsqueeze(0),
        padded.square(),
        weight.square(),
        [module.out_channels],
        module.stride,
        padding,
        module.dilation,
        False,
        [0] * len(module.stride),
        module.groups,
        [call.needs_input, call.wants(weight), call.wants(bias)],
    )
    call.add(weight, by_weight)
    call.add(bias, by_bias)
    return unpad(by_input) if call.needs_input else None


@layer(nn.MaxPool1d, nn.MaxPool2d)
def max_pool(module: nn.MaxPool1d | nn.MaxPool2d, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    if not call.needs_input:
        return None
    dims = 1 if isinstance(module, nn.MaxPool1d) else 2
    pool = F.max_pool1d if dims == 1 else F.max_pool2d
    _, winners = pool(
        call.input,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        ceil_mode=module.ceil_mode,
        return_indices=True,
    )
    flat = torch.zeros_like(call.input, dtype=h.dtype).flatten(-dims)
    return flat.scatter_add_(-1, winners.flatten(-dims), h.flatten(-dims))


@layer(nn.AvgPool1d, nn.AvgPool2d)
def average_pool(module: Any, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    if not call.needs_input:
        return None
    x, divisor, size, stride, padding = call.input, None, module.kernel_size, module.stride, module.padding
    if isinstance(module, nn.AvgPool2d):
        divisor = module.divisor_override
    else:
        # Treat the row as an image, because only 2-D pooling supports divisor_override, which gives sums.
        x, h, size, stride, padding = x.unsqueeze(-2), h.unsqueeze(-2), (1, *size), (1, *stride), (0, *padding)

    def pool(x: Tensor, divisor: int | None) -> Tensor:
        return F.avg_pool2d(x, size, stride, padding, module.ceil_mode, module.count_include_pad, divisor)

    # The mean of a window is its sum over a divisor, which depends on the padding at the borders.
    one = torch.ones_like(x)
    divisors = pool(one, 1) / pool(one, divisor)
    return _pull_back(lambda x: pool(x, 1), x, h / divisors.square())


@layer(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
def adaptive_average_pool(
    module: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d, call: Call, h: Tensor, g: Tensor
) -> Tensor | None:
    if not call.needs_input:
        return None
    x, dims = call.input, 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2
    pool: Any = F.adaptive_avg_pool1d if dims == 1 else F.adaptive_avg_pool2d
    sizes = [_window_sizes(x.shape[d], h.shape[d], h.device) for d in range(-dims, 0)]
    area = sizes[0] if dims == 1 else sizes[0].unsqueeze(1) * sizes[1]
    return _pull_back(lambda x: pool(x, list(h.shape[-dims:])), x, h / area)


def _slopes(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the factor of each entry in an elementwise linear map: its vector-Jacobian product with ones."""
    node: Any = y.grad_fn
    slopes = node(torch.ones_like(y))
    return cast(Tensor, slopes[0] if isinstance(slopes, tuple) else slopes)


@layer(nn.Dropout, nn.Dropout1d, nn.Dropout2d, capture=_slopes)
def dropout(module: nn.Module, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    slopes: Tensor = call.captured.to(h.dtype)
    return h * slopes.square()


@layer(Gate)
def gate(module: Gate, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    if call.wants(module.weight):
        others = [d for d in range(h.ndim) if d != module.dim % h.ndim]
        call.add(module.weight, (h * call.input.square()).sum(others))
    return h * module.shaped(call.input).square() if call.needs_input else None


def _needs_running_statistics(module: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor, y: Tensor) -> None:
    if module.training or module.running_mean is None:
        raise RuntimeError(
            "HesScale supports BatchNorm with running statistics only, because batch statistics make samples interact; "
            "call .eval() on the BatchNorm modules (with track_running_stats=True), or use LayerNorm"
        )


@layer(nn.BatchNorm1d, nn.BatchNorm2d, capture=_needs_running_statistics)
def batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    """With running statistics, BatchNorm is a linear map of each channel."""
    shape = [1, -1] + [1] * (h.ndim - 2)
    mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    inverse = (variance + module.eps).rsqrt().view(shape)
    others = [d for d in range(h.ndim) if d != 1]
    if call.wants(module.weight):
        normalized = (call.input - mean.view(shape)) * inverse
        call.add(module.weight, (h * normalized.square()).sum(others))
    if call.wants(module.bias):
        call.add(module.bias, h.sum(others))
    if not call.needs_input:
        return None
    return h * (inverse if module.weight is None else inverse * module.weight.view(shape)).square()


@layer(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    dims = list(range(-len(module.normalized_shape), 0))
    x, inverse = _normalized(call.input, dims, module.eps)
    batch = list(range(h.ndim - len(dims)))
    if call.wants(module.weight):
        call.add(module.weight, (h * x.square()).sum(batch) if batch else h * x.square())
    if call.wants(module.bias):
        call.add(module.bias, h.sum(batch) if batch else h)
    if not call.needs_input:
        return None
    if module.weight is not None:
        h, g = h * module.weight.square(), g * module.weight
    return through_normalization(x, inverse, h, g, dims)


@layer(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    """LayerNorm over each group of channels and their positions, with one weight and one bias per channel."""
    whole, groups = call.input.shape, (len(call.input), module.num_groups, -1)
    x, inverse = _normalized(call.input.reshape(groups), [-1], module.eps)
    others = [d for d in range(h.ndim) if d != 1]
    if call.wants(module.weight):
        call.add(module.weight, (h * x.view(whole).square()).sum(others))
    if call.wants(module.bias):
        call.add(module.bias, h.sum(others))
    if not call.needs_input:
        return None
    if module.weight is not None:
        weight = module.weight.view([1, -1] + [1] * (h.ndim - 2))
        h, g = h * weight.square(), g * weight
    return through_normalization(x, inverse, h.reshape(groups), g.reshape(groups), [-1]).view(whole)


def _normalized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return x̂ = (x − mean)/s over the dimensions, and 1/s."""
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    return (x - mean) * inverse, inverse


def through_normalization(x: Tensor, inverse: Tensor, h: Tensor, g: Tensor, dims: list[int]) -> Tensor:
    """Map the curvature of x̂, given as ``x``, to the curvature of the input of a normalization over n entries.

    ``n·s·∂x̂_k/∂x_i = n·[k = i] − 1 − x̂_k·x̂_i`` and ``n·s²·∂²x̂_k/∂x_i² = −2·x̂_i·D_ki − x̂_k·D_ii`` with ``D = s·∂x̂/∂x``; the
    sums over k need three means each.
    """
    n = math.prod(x.shape[d] for d in dims)

    def mean_of(t: Tensor) -> Tensor:
        return t.mean(dims, keepdim=True)

    from_curvature = h * (1 - 2 * (1 + x.square()) / n)
    from_curvature += (mean_of(h) + 2 * x * mean_of(h * x) + x.square() * mean_of(h * x.square())) / n
    gx = mean_of(g * x)
    from_gradient = 2 * x * (g - mean_of(g) - x * gx) / n + (1 - (1 + x.square()) / n) * gx
    return (from_curvature - from_gradient) * inverse.square()


def _needs_the_whole_gradient(module: nn.Embedding, x: Tensor, y: Tensor) -> None:
    for option in ("sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            raise RuntimeError(
                f"HesScale supports embeddings with plain dense gradients only, but one has {option}=True; create it with "
                f"{option}=False"
            )


@layer(nn.Embedding, capture=_needs_the_whole_gradient, unit_dim=-1)
def embedding(module: nn.Embedding, call: Call, h: Tensor, g: Tensor) -> None:
    """A row of the weight acts at every position of its index, like a filter at its positions."""
    if call.wants(module.weight):
        diagonal = torch.zeros_like(module.weight, dtype=h.dtype)
        diagonal.index_add_(0, call.input.flatten(), h.reshape(-1, module.embedding_dim))
        if module.padding_idx is not None:
            diagonal[module.padding_idx] = 0
        call.add(module.weight, diagonal)


@layer(nn.LogSoftmax)
def log_softmax(module: nn.LogSoftmax, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    """``∂y_k/∂x_i = [k = i] − q_i`` and ``∂²y_k/∂x_i² = −(q_i − q_i²)`` for every k."""
    if not call.needs_input:
        return None
    if module.dim is None:
        raise ValueError(f"{call.name}: HesScale needs an explicit dimension; write nn.LogSoftmax(dim=1)")
    q = torch.softmax(call.input, module.dim)
    h_all, g_all = h.sum(module.dim, keepdim=True), g.sum(module.dim, keepdim=True)
    return h * (1 - 2 * q) + h_all * q.square() - g_all * (q - q.square())


def _pull_back(function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
    """Apply the transposed Jacobian of ``function`` at ``x`` to ``cotangent``."""
    with torch.enable_grad():
        x = x.detach().to(cotangent.dtype).requires_grad_()
        return torch.autograd.grad(function(x), x, cotangent)[0]


def _pad(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[Tensor, Sequence[int], Callable[[Tensor], Tensor]]:
    """Return the input after explicit padding, the remaining padding, and a function that undoes it for curvature."""
    if not isinstance(module.padding, str):
        return x, module.padding, lambda h: h
    before_after: list[int] = []  # last dimension first, as in F.pad
    for size, dilation in zip(reversed(module.kernel_size), reversed(module.dilation), strict=True):
        total = dilation * (size - 1) if module.padding == "same" else 0
        before_after += [total // 2, total - total // 2]
    return F.pad(x, before_after), [0] * len(module.stride), lambda h: F.pad(h, [-width for width in before_after])


def _window_sizes(inputs: int, outputs: int, device: torch.device) -> Tensor:
    """Return the number of inputs averaged into each output of adaptive pooling.

    Output k covers the inputs from ⌊k·inputs/outputs⌋ to ⌈(k + 1)·inputs/outputs⌉.
    """
    k = torch.arange(outputs, device=device)
    first = (k * inputs).div(outputs, rounding_mode="floor")
    end = ((k + 1) * inputs + outputs - 1).div(outputs, rounding_mode="floor")
    return end - first
