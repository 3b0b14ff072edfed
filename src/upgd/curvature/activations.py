"""First and second derivatives of the activations."""

import math

import torch
from torch import Tensor, nn

from upgd.activations import CReLU
from upgd.curvature._registry import elementwise, layer
from upgd.curvature._sweep import Call


@layer(nn.ReLU)
def relu(module: nn.ReLU, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    # σ' is 0 or 1 and σ'' is 0, so curvature propagates like the gradient, with torch's kernel.
    return torch.ops.aten.threshold_backward(h, call.input, 0) if call.needs_input else None


@layer(CReLU)
def crelu(module: CReLU, call: Call, h: Tensor, g: Tensor) -> Tensor | None:
    if not call.needs_input:
        return None
    positive, negative = h.chunk(2, module.dim)
    return torch.where(call.input > 0, positive, 0) + torch.where(call.input < 0, negative, 0)


@elementwise(nn.LeakyReLU)
def leaky_relu(module: nn.LeakyReLU, x: Tensor) -> tuple[Tensor, None]:
    return torch.where(x > 0, 1.0, x.new_full((), module.negative_slope)), None


@elementwise(nn.Tanh)
def tanh(module: nn.Tanh, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    first = 1 - y.square()
    return first, -2 * y * first


@elementwise(nn.Sigmoid)
def sigmoid(module: nn.Sigmoid, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.sigmoid(x)
    first = y * (1 - y)
    return first, first * (1 - 2 * y)


@elementwise(nn.ELU)
def elu(module: nn.ELU, x: Tensor) -> tuple[Tensor, Tensor]:
    exponential = module.alpha * torch.exp(x.clamp(max=0))
    return torch.where(x > 0, 1.0, exponential), torch.where(x > 0, 0.0, exponential)


@elementwise(nn.SiLU)
def silu(module: nn.SiLU, x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


@elementwise(nn.GELU)
def gelu(module: nn.GELU, x: Tensor) -> tuple[Tensor, Tensor]:
    if module.approximate == "none":
        density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density, density * (2 - x.square())
    # ½·x·(1 + tanh u) with u = √(2/π)·(x + 0.044715·x³)
    k, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + cubic * x**3))
    u1, u2 = k * (1 + 3 * cubic * x.square()), 6 * k * cubic * x
    t1 = (1 - t.square()) * u1
    t2 = (1 - t.square()) * u2 - 2 * t * t1 * u1
    return 0.5 * (1 + t + x * t1), t1 + 0.5 * x * t2


@elementwise(nn.Softplus)
def softplus(module: nn.Softplus, x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(module.beta * x)
    linear = module.beta * x > module.threshold
    return torch.where(linear, 1.0, s), torch.where(linear, 0.0, module.beta * s * (1 - s))
