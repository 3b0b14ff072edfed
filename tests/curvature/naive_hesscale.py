"""A reference implementation of HesScale from its definition: per sample, per layer, with autograd in float64."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from upgd.curvature import Residual


def naive_diagonals(model: nn.Module, criterion: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """``Σ_samples Σ_k ∂²L/∂y_k²·(∂y_k/∂θ)²`` for every parameter θ of every layer, by name."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    outputs = model(x).detach()
    gradient = torch.func.grad(lambda y: criterion(y, target))(outputs)
    for sample in range(len(x)):
        curvature = hessian_diagonal(lambda y, n=sample: criterion(_with_row(outputs, n, y), target), outputs[sample])
        _sweep(model, "", x[sample : sample + 1], curvature[None], gradient[sample : sample + 1], total)
    return total


def hessian_diagonal(function, x: Tensor) -> Tensor:
    return hessian(function)(x).reshape(x.numel(), x.numel()).diagonal().reshape(x.shape).detach()


def _with_row(rows: Tensor, n: int, row: Tensor) -> Tensor:
    return torch.stack([row if i == n else rows[i] for i in range(len(rows))])


def _sweep(module: nn.Module, prefix: str, x: Tensor, h: Tensor, g: Tensor, total: dict[str, Tensor]):
    """Propagate curvature and gradient of the output through one module to its input, for one sample."""
    if isinstance(module, nn.Sequential):
        inputs = [x]
        for child in module:
            inputs.append(child(inputs[-1]).detach())
        for (name, child), child_input in reversed(list(zip(module.named_children(), inputs[:-1], strict=True))):
            h, g = _sweep(child, f"{prefix}{name}.", child_input, h, g, total)
        return h, g
    if isinstance(module, Residual):
        branches = [
            _sweep(module.body, f"{prefix}body.", x, h, g, total),
            _sweep(module.shortcut, f"{prefix}shortcut.", x, h, g, total),
        ]
        return sum(h for h, _ in branches), sum(g for _, g in branches)

    outputs = h.numel()
    for name, param in module.named_parameters():
        jacobian = jacrev(lambda p, name=name: functional_call(module, {name: p}, (x,)))(param.detach())
        total[prefix + name] += (h.reshape(outputs, 1) * jacobian.reshape(outputs, -1).square()).sum(0).view_as(param)
    if not x.is_floating_point():  # indices of an embedding have no gradient
        return h, g
    jacobian = jacrev(module)(x).reshape(outputs, x.numel()).detach()
    second = hessian(module)(x).reshape(outputs, x.numel(), x.numel()).diagonal(dim1=1, dim2=2).detach()
    h_in = torch.zeros(x.numel(), dtype=x.dtype)
    g_in = torch.zeros(x.numel(), dtype=x.dtype)
    for k in range(outputs):
        h_in += h.flatten()[k] * jacobian[k] ** 2 + g.flatten()[k] * second[k]
        g_in += g.flatten()[k] * jacobian[k]
    return h_in.view_as(x), g_in.view_as(x)
