"""Learners that run a torch optimizer: one module and one optimizer each. Slow, but works for any optimizer."""

import copy
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upgd import noise, normalization
from upgd.methods.deriving import TorchMethod
from upgd.noise import Purpose
from upgd.population import threads
from upgd.population.backend import Group, Loss, Tally, finite_learners
from upgd.population.functional import check_learns_online
from upgd.streams.contract import Chunk

__all__ = ["OptimizerBackend"]


class OptimizerBackend:
    """See :class:`upgd.population.backend.Backend`.

    The state of an optimizer uses the names of the interface: ``exp_avg.NAME`` for the parameter ``NAME``. Plain numbers are
    ``number.KEY.NAME``, and options, which some optimizers change over time, are ``option.KEY``.
    """

    fills_device = False

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        check_learns_online(network)
        assert isinstance(group.method, TorchMethod)
        self._group, self._device, self._dtype = group, device, dtype
        self._models = [copy.deepcopy(network).to(device, dtype) for _ in range(len(group))]
        for i, model in enumerate(self._models):
            model.load_state_dict({name: p[i] for name, p in parameters.items()}, strict=False)
        self._optimizers = [
            group.method.make(model.parameters(), {name: float(value[i]) for name, value in group.values.items()})
            for i, model in enumerate(self._models)
        ]
        self._normalizer: dict[str, Tensor] = {}

    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""
        size = sum(p.numel() for p in self._models[0].parameters())
        # Random numbers of an optimizer must be a function of seed and step, without affecting the global generator.
        forked = torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])
        with threads.worth(size), forked, torch.enable_grad():
            self._advance(chunk, loss, tally)

    def _advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        rows = self._group.rows.to(self._device)
        targets = chunk.targets[rows]
        steps = torch.arange(chunk.start + 1, chunk.start + chunk.length + 1)
        drawn = noise.words(self._group.seeds.unsqueeze(1), Purpose.NOISE, steps, 2)
        seeds = ((drawn[..., 0] << 31) ^ drawn[..., 1]).tolist()
        diverged = (tally.diverged_at >= 0).tolist()
        for offset in range(chunk.length):
            x = chunk.inputs_at(offset)[rows].to(self._dtype)
            if self._group.kind.normalize:
                x = self._normalized(x, chunk.start + offset + 1)
            for i in range(len(self._group)):
                if not diverged[i]:
                    _seed(seeds[i][offset], self._device)
                    diverged[i] = self._learn(i, x[i], targets[i, offset], loss, tally)
                    if diverged[i]:
                        tally.diverged_at[i] = chunk.start + offset

    def _learn(self, i: int, x: Tensor, target: Tensor, loss: Loss, tally: Tally) -> bool:
        """Train one learner on one sample, and return whether it has diverged."""
        outputs = self._models[i](x.unsqueeze(0))
        if loss == "cross_entropy":
            lost = F.cross_entropy(outputs, target.unsqueeze(0))
            tally.correct[i] += outputs.detach()[0].argmax() == target
        else:
            lost = F.mse_loss(outputs, target.to(self._dtype).unsqueeze(0))
        tally.loss[i] += lost.detach()
        if not bool(lost.isfinite()):
            return True
        self._optimizers[i].zero_grad()
        torch.autograd.backward(lost)
        self._optimizers[i].step()
        return False

    def _normalized(self, x: Tensor, step: int) -> Tensor:
        """Return the samples normalized by each learner's running mean and variance."""
        state = self._normalizer
        if not state:
            state |= {"mean": torch.zeros_like(x), "variance": torch.ones_like(x)}
        rates = self._group.values["normalize"].to(self._device)
        decay = normalization.decay(rates, torch.full_like(rates, step))
        decay = decay.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
        normalized, state["mean"], state["variance"] = normalization.normalize(
            x, state["mean"], state["variance"], decay
        )
        return normalized

    def parameters(self) -> dict[str, Tensor]:
        """Return the learners' current parameters."""
        named = [dict(model.named_parameters()) for model in self._models]
        return {name: torch.stack([own[name].detach() for own in named]) for name in named[0]}

    def finite(self) -> Tensor:
        """Return whether all parameters of each learner are finite."""
        return finite_learners(*self.parameters().values())

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume; see the class for the names."""
        kept = [self._state_of(model, one) for model, one in zip(self._models, self._optimizers, strict=True)]
        # A learner that diverged in the first step has no state; the values in its place are never used.
        shapes = {name: tensor for own in kept for name, tensor in own.items()}
        return {
            **{f"parameters.{name}": p for name, p in self.parameters().items()},
            **{
                name: torch.stack([own.get(name, torch.zeros_like(like)) for own in kept])
                for name, like in shapes.items()
            },
            **{f"normalizer.{name}": tensor.clone() for name, tensor in self._normalizer.items()},
        }

    def _state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key}.{name}"] = value.detach()
                elif isinstance(value, Real):
                    found[f"number.{key}.{name}"] = _exact(value)
                elif value is not None:
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r}, which cannot be saved; only "
                        "tensors and numbers can"
                    )
        options = optimizer.param_groups[0]
        return found | {f"option.{key}": _exact(value) for key, value in options.items() if _is_number(value)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        for i, (model, optimizer) in enumerate(zip(self._models, self._optimizers, strict=True)):
            optimizer.state.clear()
            group = optimizer.param_groups[0]
            params = dict(model.named_parameters())
            for full, tensors in state.items():
                part, _, name = full.partition(".")
                value = tensors[i]
                if part == "parameters":
                    params[name].data.copy_(value)
                elif part == "option":
                    group[name] = value.item()
                elif part == "number":
                    key, _, name = name.partition(".")
                    optimizer.state[params[name]][key] = value.item()
                elif part != "normalizer":
                    on_host = part == "step" and not (group.get("capturable") or group.get("fused"))
                    where = torch.device("cpu") if on_host else self._device
                    optimizer.state[params[name]][part] = value.to(where, copy=True)
        self._normalizer = {
            name.removeprefix("normalizer."): tensor.to(self._device, self._dtype, copy=True)
            for name, tensor in state.items()
            if name.startswith("normalizer.")
        }


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _exact(value: Any) -> Tensor:
    """Return a number as a tensor from which ``item()`` restores the exact value and type."""
    kinds: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64}
    return torch.tensor(value, dtype=kinds.get(type(value), torch.float64))
