"""A stream: classes around centres that jump from task to task."""

import torch

import upgd.streams
from upgd.noise import Purpose, normals, words


@upgd.streams.register("jumping-blobs")
class JumpingBlobs:
    """Points around one centre per class; every task has new centres.

    Args:
        task_length: how many steps a task has.
        spread: the standard deviation of the points around their centres.
    """

    name, input_shape, outputs, loss = "jumping-blobs", (8,), 3, "cross_entropy"

    def __init__(self, task_length: int = 200, spread: float = 0.5) -> None:
        self.task_length, self.spread = task_length, spread

    def chunk(self, seeds, start, length, device="cpu"):
        seeds = upgd.streams.seed_tensor(seeds, device)[:, None]
        steps = torch.arange(start, start + length, device=device)
        classes = words(seeds, Purpose.SAMPLE_ORDER, steps, 1)[..., 0] % self.outputs
        centres = normals(seeds, Purpose.TASK, steps // self.task_length, 24).unflatten(-1, (self.outputs, 8))
        own = centres.gather(2, classes[..., None, None].expand(-1, -1, 1, 8))[:, :, 0]
        points = own + self.spread * normals(seeds, Purpose.INPUTS, steps, 8)
        return upgd.streams.Chunk(start=start, targets=classes, dense=points.float())
