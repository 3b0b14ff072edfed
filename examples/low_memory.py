"""Train a classifier of digits in few bits: where plain bfloat16 stalls, and what stochastic rounding and narrow state do.

Run it: ``python examples/low_memory.py``
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import upgd
import upgd.data

VARIANTS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, rounded at random": (torch.bfloat16, {"stochastic_rounding": True}),
    "… and traces in bfloat16": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    "… or in 8 bits": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.uint8}),
}


def train(dtype: torch.dtype, steps: int, **options: object) -> tuple[float, float]:
    """Train on the embedded digits; returns the loss over all of them, and bytes of parameters and state per parameter."""
    digits = upgd.data.load("digits")
    images = torch.tensor(digits.images).flatten(1) / digits.white
    labels = torch.tensor(digits.labels).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(dtype)
    optimizer = upgd.AdaUPGD(model.parameters(), lr=2e-5, sigma=0.01, seed=0, **options)
    for _ in range(steps):
        chosen = torch.randint(len(images), (32,))
        loss = cross_entropy(model(images[chosen].to(dtype)).float(), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        final = cross_entropy(model(images.to(dtype)).float(), labels).item()
    kept = [*model.parameters(), *(tensor for state in optimizer.state.values() for tensor in state.values())]
    number = sum(param.numel() for param in model.parameters())
    return final, sum(tensor.numel() * tensor.element_size() for tensor in kept) / number


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="default 3000")
    steps = parser.parse_args(arguments).steps
    print(f"{'':30} loss   bytes per parameter, with its state")
    losses = {}
    for name, (dtype, options) in VARIANTS.items():
        losses[name], size = train(dtype, steps, **options)
        print(f"{name:30} {losses[name]:.3f}  {size:.1f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
