"""A plain implementation without this package: a network, autograd, and the rule per tensor. The baseline of speed-ups."""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PlainUPGD", "seconds_per_step"]


class PlainUPGD(torch.optim.Optimizer):
    """Weight-wise UPGD with global scaling, first order, white noise: two loops over the parameters."""

    def __init__(self, params, lr: float, sigma: float, beta_utility: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "sigma": sigma, "beta_utility": beta_utility, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        largest = torch.tensor(-torch.inf)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["utility"] = torch.zeros_like(p)
                state["step"] += 1
                beta = group["beta_utility"]
                state["utility"].mul_(beta).add_(-p.grad * p, alpha=1 - beta)
                largest = torch.maximum(largest, state["utility"].max())
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                correction = 1 - group["beta_utility"] ** state["step"]
                gate = torch.sigmoid((state["utility"] / correction) / (largest / correction))
                noise = torch.randn_like(p) * group["sigma"]
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_((p.grad + noise) * (1 - gate), alpha=-group["lr"])


def seconds_per_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    """Train on each sample once, evaluating every prediction; return the processor time per step.

    Args:
        inputs: ``(steps, *input_shape)``, ready to use.
        targets: ``(steps,)`` classes, or ``(steps, outputs)`` for regression.
    """
    classes = not targets.is_floating_point()
    criterion = functional.cross_entropy if classes else functional.mse_loss
    losses, right = [], 0
    begin = time.process_time()
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        outputs = model(x)
        loss = criterion(outputs, y)
        losses.append(loss.item())
        if classes:
            right += (outputs.argmax(1) == y).item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.process_time() - begin) / len(targets)
