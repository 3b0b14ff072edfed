"""Monitor plasticity, dormant units, ranks and gates of a network while the task keeps changing.

Two learners, UPGD and plain SGD, are trained on the embedded handwritten digits, whose pixels are permuted anew every 500
samples. After each task, the program prints one line per learner.

    python examples/look_inside.py [TASKS]
"""

import sys

import torch
from torch import nn

import upgd
from upgd.monitor import Monitor
from upgd.networks import MLP
from upgd.streams import make


def main(tasks: int = 4) -> None:
    """Train both learners and print their diagnostics."""
    stream = make("input-permuted-digits", task_length=500)
    criterion = nn.CrossEntropyLoss()
    learners = {}
    for name in ("UPGD", "SGD"):
        model = MLP((64, 64, 32, 10), seed=0)
        if name == "UPGD":
            # Gates near ½ halve a step, so twice SGD's step size is a fair comparison.
            optimizer = upgd.UPGD(model.parameters(), lr=0.04, sigma=0.01, generator=torch.Generator().manual_seed(0))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        learners[name] = model, optimizer, Monitor(model, optimizer)

    print("task learner  accuracy  plasticity  dormant  weights ℓ2  effective rank  gates near ½")
    for task in range(tasks):
        chunk = stream.chunk(seeds=[0], start=task * stream.task_length, length=stream.task_length)
        inputs, targets = chunk.inputs()[0], chunk.targets[0]
        for name, (model, optimizer, monitor) in learners.items():
            right = 0
            for x, y in zip(inputs, targets, strict=True):
                outputs = model(x)
                right += int(outputs.argmax() == y)
                loss = criterion(outputs, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.plasticity(loss, lambda model=model, x=x, y=y: criterion(model(x), y))
            print(f"{task + 1:4} {name:7} {right / len(targets):9.3f}  {describe(monitor.snapshot())}")


def describe(figures: dict[str, object]) -> str:
    """Format a few diagnostics of a snapshot as one line."""
    second_layer = "layers.2.weight"
    gates = figures.get(f"gate_histogram/{second_layer}")
    near_half = "         –" if gates is None else f"{gates[4] + gates[5]:10.3f}"
    return (
        f"{figures['sample_plasticity']:10.3f} {figures['dormant_share/layers.3']:8.3f} {figures['weight_l2']:11.2f}"
        f" {figures[f'effective_rank/{second_layer}']:15.1f}    {near_half}"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
