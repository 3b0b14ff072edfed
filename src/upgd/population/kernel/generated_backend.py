"""The kernel backend for methods without a hand-written kernel: runs kernels generated from their rules."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from upgd.population.backend import Group, Loss, Tally
from upgd.population.kernel import generated
from upgd.population.kernel.backend import _NOISES, KernelBackend, _samples
from upgd.population.kernel.layout import scratch_floats
from upgd.population.kernel.network import chain, plan
from upgd.streams.contract import Chunk

__all__ = ["GeneratedBackend", "cannot_generate"]


def cannot_generate(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel can be generated for this, worded to follow "because"; ``None`` if one can."""
    kind = group.kind
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device}"
    if dtype != torch.float32:
        return f"it computes in torch.float32, not in {dtype}"
    if kind.normalize or kind.gated != "all":
        return "it supports neither input normalization nor gates in some layers only"
    links = chain(network)
    return links if isinstance(links, str) else generated.unsupported(group.method)


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
        if reason := cannot_generate(network, group, device, dtype):
            raise ValueError(f"the kernel backend cannot run this, because {reason}")
        self._plan = plan(network)
        self._kind = group.kind
        self._rows = group.rows.tolist()
        self._seeds = group.seeds.tolist()
        self._values = [{name: float(vector[i]) for name, vector in group.values.items()} for i in range(len(group))]
        self._rule = generated.rule_of(group.method)
        self._kernel = generated.module_of(generated.source(group.method.name, self._rule))
        learners, count = len(group), self._plan.parameter_count
        self._parameters = torch.zeros(learners, count)
        self._own = torch.zeros(learners, max(1, len(self._rule.state)), count)
        self._state = {"parameters": self._named(self._parameters)}
        for number, name in enumerate(self._rule.state):
            self._state[name] = self._named(self._own[:, number])
        for name, values in parameters.items():
            self._state["parameters"][name].copy_(values)
            for part, begins_as in group.method.state.items():
                if begins_as == "parameter":
                    self._state[part][name].copy_(values)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        for part, named in self._state.items():
            for name, tensor in named.items():
                tensor.copy_(state[f"{part}.{name}"])

    def _advance(self, i: int, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        p = self._plan
        steps = np.arange(chunk.start + 1, chunk.start + chunk.length + 1, dtype=np.float64)
        diverged_at = self._kernel.advance(
            p.layers,
            p.slopes,
            self._parameters[i].numpy(),
            self._own[i].view(-1).numpy(),
            generated.table(self._rule, self._values[i], steps),
            np.zeros(max(1, len(self._rule.reductions)) * p.rows, np.float32),
            p.units,
            p.rows,
            self._seeds[i],
            _NOISES[self._kind.noise],
            _samples(chunk, self._rows[i], loss),
            chunk.start,
            tally.loss[i : i + 1].numpy(),
            tally.correct[i : i + 1].numpy(),
            np.zeros(scratch_floats(p.units, p.rows, int(p.layers[:, :2].max()), p.workspace), np.float32),
            np.zeros(p.rows, np.uint8),
        )
        tally.diverged_at[i] = diverged_at
