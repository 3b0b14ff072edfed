"""A method with resets of its own, and a record of the resets on the torch backend."""

from types import MappingProxyType

import torch

from upgd.methods import Method, Setting
from upgd.methods.units import Reset
from upgd.population.torch_backend import TorchBackend


class OwnResets(Method):
    """Uses everything that a hook supports and the built-in methods do not use."""

    name = "own-resets"
    rate = Setting(0.2, least=0)
    state = MappingProxyType({"start": "parameter", "velocity": "zeros"})
    unit_state = MappingProxyType({"size": "zeros", "longest": "layer"})

    def update(self, w, g, s, h):
        velocity = 0.5 * s.velocity + g
        return w - h.lr * (velocity + 0.1 * (w - s.start)), {"velocity": velocity}

    def reset_units(self, units, s, h, t, draw):
        size = s.size + (units.outgoing**2).sum((1, 3)) * units.activation.mean(-1).abs() ** 0.5
        largest = size.amax(-1, keepdim=True)
        small = ~(size > 0.3 * largest) | (size < s.longest / 8)
        chosen = torch.where(t % 2 == 0, small & (draw() < h.rate), False)
        moved = (size[:, None, :, None] * 0.01 * units.outgoing).sum((2, 3))
        return Reset(chosen, next_bias=moved, outgoing=False), {"size": size, "longest": largest}


def recorded(monkeypatch) -> list[tuple[int, int]]:
    """Return a list to which the torch backend adds the number of the layer and the step of every reset."""
    seen: list[tuple[int, int]] = []
    original = TorchBackend._reset

    def counted(self, name, number, reset, step):
        seen.extend((number, step) for _ in range(int(reset.units.any())))
        original(self, name, number, reset, step)

    monkeypatch.setattr(TorchBackend, "_reset", counted)
    return seen
