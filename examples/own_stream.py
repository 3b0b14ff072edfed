"""A custom stream in ten lines: a sine whose phase changes with every task.

Run it: ``python examples/own_stream.py``
"""

import torch
from torch.nn.functional import mse_loss

import upgd.streams
from upgd.networks import MLP
from upgd.noise import Purpose, uniforms


@upgd.streams.register("drifting-sine")
class DriftingSine:
    name, input_shape, outputs, loss, task_length = "drifting-sine", (1,), 1, "mse", 1_000

    def chunk(self, seeds, start, length, device="cpu"):
        seeds = upgd.streams.seed_tensor(seeds, device)[:, None]
        steps = torch.arange(start, start + length, device=device)
        x = 2 * uniforms(seeds, Purpose.INPUTS, steps, 1).float() - 1
        phase = 6.28 * uniforms(seeds, Purpose.TASK, steps // self.task_length, 1).float()
        return upgd.streams.Chunk(start=start, dense=x, targets=torch.sin(3 * x + phase))


def main() -> None:
    stream = upgd.streams.make("drifting-sine")
    network = MLP((1, 50, 1), "tanh")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for x, y in upgd.streams.iterate(stream, seed=0, steps=1_000):
        loss = mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(f"mean loss: {torch.stack(losses[:200]).mean():.3f} at the start of the task,", end=" ")
    print(f"{torch.stack(losses[-200:]).mean():.3f} at its end")


if __name__ == "__main__":
    main()
