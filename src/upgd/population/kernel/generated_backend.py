"""The kernel backend for methods without a hand-written kernel: runs kernels generated from their rules."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from upgd.kernels.machine import Integers
from upgd.kernels.modules import module_of
from upgd.methods.reset_tracing import traced_reset
from upgd.population.backend import Group, Loss, Tally
from upgd.population.kernel import generated, resets
from upgd.population.kernel.backend import KernelBackend
from upgd.population.kernel.network import NetworkLayout
from upgd.population.torch_backend import gated_parameters
from upgd.streams.contract import Chunk

__all__ = ["GeneratedBackend"]


class GeneratedBackend(KernelBackend):
    """See :class:`upgd.population.backend.Backend`."""

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._begin(network, group, device, dtype)
        self._values = [{name: float(vector[i]) for name, vector in group.values.items()} for i in range(len(group))]
        self._rules = generated.rules_of(group.method, group.kind.gated)
        self._method, self._reset = group.method, traced_reset(group.method)
        self._scalars = [scalar for rule in self._rules for scalar in rule.scalars]
        self._scalars += self._reset.scalars if self._reset else ()
        self._gated = _gated_tensors(network, self._plan, group.kind.gated)
        states = self._rules[0].state
        self._own = torch.zeros(len(group), max(1, len(states)), self._plan.parameter_count)
        for number, name in enumerate(states):
            self._state[name] = self._named(self._own[:, number])
        self._of_units = torch.zeros(len(group), len(group.method.unit_state), self._plan.units)
        for number, (name, begins_as) in enumerate(group.method.unit_state.items()):
            # The number of a layer is stored in the place of its first unit.
            count = 1 if begins_as == "layer" else None
            self._state[name] = {
                weight: self._of_units[:, number, layer.outputs : layer.outputs + layer.rows][:, :count]
                for weight, layer in zip(self._plan.weights[:-1], self._plan.layers[:-1], strict=True)
            }
        for name, values in parameters.items():
            self._state["parameters"][name].copy_(values)
            for part, begins_as in group.method.state.items():
                if begins_as == "parameter":
                    self._state[part][name].copy_(values)

    def _step(self) -> int:
        kernel = module_of(generated.source(self._method, self._rules))
        return int(kernel.take_step.address)

    def _second_order(self) -> bool:
        return generated.uses_curvature(self._rules)

    def _advance(self, i: int, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        steps = np.arange(chunk.start + 1, chunk.start + chunk.length + 1, dtype=np.float64)
        scalars = generated.table(self._scalars, self._values[i], steps)
        reduced = np.zeros(max(1, len(self._rules[0].reductions)) * self._plan.rows, np.float32)
        space = np.zeros(resets.space(self._reset, self._plan.units) if self._reset else 0, np.float32)
        own = (
            self._own[i].data_ptr(),
            self._plan.parameter_count,
            scalars.ctypes.data,
            scalars.shape[1],
            self._gated.ctypes.data,
            reduced.ctypes.data,
            self._of_units[i].data_ptr(),
            space.ctypes.data,
        )
        self._learn(i, chunk, loss, tally, own)


def _gated_tensors(network: nn.Module, layout: NetworkLayout, gated: str) -> Integers:
    """Return, for the weights and the biases of each layer, whether they have gates."""
    chosen = gated_parameters(network, gated)
    return np.repeat([int(name in chosen) for name in layout.weights], 2)
