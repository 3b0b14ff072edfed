"""A network: layer normalisation and a residual connection."""

from math import prod

from torch import nn

import upgd.networks


@upgd.networks.register("residual")
class Residual(nn.Module):
    def __init__(self, stream, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(prod(stream.input_shape), width), nn.LayerNorm(width)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, stream.outputs)
        self.relu, self.relu_inside = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        h = self.relu(self.norm(self.first(x.flatten(1))))
        return self.last(h + self.relu_inside(self.second(h)))
