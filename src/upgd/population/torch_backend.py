"""The readable truth: every method, variant and network, in batched tensors on any device.

One step is: what the sample says (:mod:`.chain` or :mod:`.functional`), then the rule (:mod:`upgd.rules`) with the learner
dimension first and every setting a vector. Nothing here is clever; faster backends must equal it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from upgd import noise, rules
from upgd.population import threads
from upgd.population.backend import Group, Kind, Loss, Tally
from upgd.population.chain import Chain, Derivatives
from upgd.population.functional import Functional
from upgd.streams.contract import Chunk

__all__ = ["TorchBackend", "gates", "unsupported"]

#: Random numbers in the making at once: their temporaries are many.
_NORMALS_AT_ONCE = 1 << 20

Named = dict[str, Tensor]


def unsupported(network: nn.Module, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run the network so; ``None`` if it can."""
    needs = [name for name, so in (("order=2", kind.order == 2), ("wise='feature'", kind.wise == "feature")) if so]
    if needs and (reason := Chain.unsupported(network)):
        return (
            f"{' and '.join(needs)} must know the network as a chain of layers, but {reason}; make it an nn.Sequential, or "
            "use wise='weight' and order=1"
        )
    return None


class TorchBackend:
    """See :class:`upgd.population.backend.Backend`."""

    fills_device = False

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._kind = group.kind
        self._group = _on(group, device)
        self._dtype = dtype
        self._model = _model(network, group.kind, device, dtype)
        self._parameters: Named = {name: p.to(device, dtype, copy=True) for name, p in parameters.items()}
        self._state: dict[str, Named] = {"parameters": self._parameters}
        self._goes_on = torch.ones(len(group), dtype=torch.bool, device=device)  #: who takes the current step
        if group.kind.rule == "adamw":
            self._state["first_moment"] = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
            self._state["second_moment"] = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        elif group.kind.rule == "utility":
            self._state["utility"] = {name: torch.zeros_like(judged) for name, judged in self._judged().items()}

    @torch.no_grad()
    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and add to the tally."""
        with threads.worth(sum(p.numel() for p in self._parameters.values())):
            self._advance(chunk, loss, tally)

    def _advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        targets = chunk.targets[self._group.rows]
        if loss == "mse":
            targets = targets.to(self._dtype)
        for offset, noises in enumerate(self._noises(chunk.start, chunk.length)):
            x = chunk.inputs_at(offset)[self._group.rows].to(self._dtype)
            self._step(x, targets[:, offset], loss, noises, chunk.start + offset, tally)

    def parameters(self) -> dict[str, Tensor]:
        """The learners' parameters now."""
        return dict(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on; the names are those of the interface."""
        return {f"{part}.{name}": t.clone() for part, named in self._state.items() for name, t in named.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        for part, named in self._state.items():
            for name, tensor in named.items():
                named[name] = state[f"{part}.{name}"].to(tensor, copy=True)

    def _step(self, x: Tensor, target: Tensor, loss: Loss, noises: Named, stream_step: int, tally: Tally) -> None:
        found = self._model.derivatives(self._parameters, x, target, loss)
        tally.loss += found.loss
        tally.correct += found.correct
        diverged = (tally.diverged_at < 0) & ~found.loss.isfinite()
        tally.diverged_at.copy_(torch.where(diverged, stream_step, tally.diverged_at))
        self._goes_on = tally.diverged_at < 0

        step = stream_step + 1
        adamw = self._kind.rule == "adamw"
        changed = self._adamw(found, step) if adamw else self._perturbed_descent(found, noises, step)
        for part, named in self._state.items():
            named.update(changed[part])

    def _unless_diverged(self, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(_of_learners(self._goes_on, old), new, old)

    # ---------------------------------------------------------------------------------------- the rule of upgd.rules

    def _perturbed_descent(self, found: Derivatives, noises: Named, step: int) -> dict[str, Named]:
        """The new parameters and traces."""
        traces, gates = self._gates(found, step) if self._kind.rule == "utility" else ({}, {})
        g = self._group
        new = {}
        for name, weight in self._parameters.items():
            settings = {"lr": g.lr, "weight_decay": g.weight_decay}
            gradient = found.gradient[name]
            if self._is_output(name):
                updated = rules.update(weight, gradient, **settings)
            else:
                settings |= {"sigma": g.sigma, "c": g.c, "p": g.p, "q": g.q}
                updated = rules.update(weight, gradient, gates.get(name, 0.0), noises.get(name, 0.0), **settings)
            new[name] = self._unless_diverged(updated, weight)
        return {"parameters": new, "utility": traces}

    def _gates(self, found: Derivatives, step: int) -> tuple[Named, Named]:
        """The new traces, and how useful each entry of each parameter is held to be."""
        feature_wise = self._kind.wise == "feature"
        gradient = found.gate_gradient if feature_wise else found.gradient
        curvature = found.gate_curvature if feature_wise else found.curvature
        traces, unbiased = {}, {}
        for name, judged in self._judged().items():
            instant = rules.utility(judged, gradient[name], curvature.get(name))
            # What is kept is what the gates look at, so that there is one tensor and not two.
            old = self._state["utility"][name]
            traces[name] = self._unless_diverged(self._trace(old, instant, "beta"), old)
            unbiased[name] = self._unbiased(traces[name], "beta", step)
        gates = _gates_of(unbiased, self._kind, self._gate)
        return traces, self._spread(gates) if feature_wise else gates

    def _trace(self, previous: Tensor, instant: Tensor, beta: str) -> Tensor:
        """The running average with the group's setting of that name."""
        return rules.trace(previous, instant, getattr(self._group, beta))

    def _unbiased(self, traced: Tensor, beta: str, step: int) -> Tensor:
        return rules.unbiased(traced, getattr(self._group, beta), step)

    def _gate(self, utility: Tensor, scale: Tensor) -> Tensor:
        return rules.gate(utility, scale)

    def _judged(self) -> Named:
        """Whose utility is looked at: the weights; or gates, constant 1, behind the features."""
        if self._kind.wise == "weight":
            return self._parameters
        assert isinstance(self._model, Chain)
        return {name: torch.ones_like(self._parameters[name].flatten(2)[..., 0]) for name in self._model.features()}

    def _spread(self, gates: Named) -> Named:
        """A feature's gate holds for all weights that enter it, and for its bias."""
        assert isinstance(self._model, Chain)
        spread = {}
        for name, parameter in self._parameters.items():
            if not self._is_output(name):
                gate = gates[self._model.owner(name)]
                spread[name] = gate.reshape(gate.shape + (1,) * (parameter.ndim - gate.ndim))
        return spread

    def _is_output(self, name: str) -> bool:
        """Whether the parameter belongs to an output layer that gets plain gradient descent."""
        if self._kind.wise == "weight":
            return False
        assert isinstance(self._model, Chain)
        return self._model.owner(name) == self._model.output_weight

    def _noises(self, start: int, length: int) -> Iterator[Named]:
        """ξ of the learners' steps start + 1 … start + length, each by parameter; nothing where nobody perturbs."""
        if self._kind.noise == "none":
            yield from ({} for _ in range(length))
            return
        shapes = {name: p.shape for name, p in self._parameters.items()}
        sizes = [shape[1:].numel() for shape in shapes.values()]
        anticorrelated = self._kind.noise == "anticorrelated"
        whites = self._whites(start if anticorrelated else start + 1, start + length + 1, sum(sizes))
        previous = next(whites) if anticorrelated else None
        for white in whites:
            drawn = white if previous is None else noise.anticorrelated(white, previous)
            previous = white if anticorrelated else None
            pieces = torch.split(drawn, sizes, dim=1)
            yield {name: piece.view(shape) for piece, (name, shape) in zip(pieces, shapes.items(), strict=True)}

    def _whites(self, first: int, stop: int, count: int) -> Iterator[Tensor]:
        """ζ of the steps from ``first``, ``(learners, count)`` each: many steps of a small network at once, few learners
        of a large one."""
        seeds = self._group.seeds
        learners = max(1, _NORMALS_AT_ONCE // count)
        steps_at_once = max(1, _NORMALS_AT_ONCE // (count * len(seeds)))
        for begin in range(first, stop, steps_at_once):
            steps = torch.arange(begin, min(begin + steps_at_once, stop), device=seeds.device).unsqueeze(1)
            some = [noise.learner_normals(s, steps, count, dtype=self._dtype) for s in torch.split(seeds, learners)]
            drawn = torch.cat(some, dim=1)
            if begin == 0:
                drawn[0] = 0  # ζ₀
            yield from drawn.unbind()

    # ------------------------------------------------------------------------------------------------- torch's AdamW

    def _adamw(self, found: Derivatives, step: int) -> dict[str, Named]:
        """The new parameters and moments; see :class:`torch.optim.AdamW`."""
        g = self._group
        new: dict[str, Named] = {part: {} for part in self._state}
        for name, weight in self._parameters.items():
            gradient = found.gradient[name]
            moments = self._state["first_moment"][name], self._state["second_moment"][name]
            first = self._unless_diverged(self._trace(moments[0], gradient, "beta1"), moments[0])
            second = self._unless_diverged(self._trace(moments[1], gradient**2, "beta2"), moments[1])
            size = self._unbiased(second, "beta2", step).sqrt() + _of_learners(g.eps, weight)
            # torch multiplies the weight by 1 − lr·wd, which is 1 in 32 bits if lr·wd is small; see rules.update.
            decay = _of_learners(g.weight_decay, weight) * weight
            updated = weight - _of_learners(g.lr, weight) * (self._unbiased(first, "beta1", step) / size + decay)
            new["parameters"][name] = self._unless_diverged(updated, weight)
            new["first_moment"][name], new["second_moment"][name] = first, second
        return new


def gates(group: Group, traces: Mapping[str, Tensor], step: int) -> Named:
    """How useful everything that has a trace is held to be, after ``step`` steps."""
    beta = group.beta.to(next(iter(traces.values())).device)
    return _gates_of({name: rules.unbiased(trace, beta, step) for name, trace in traces.items()}, group.kind)


def _gates_of(unbiased: Named, kind: Kind, gate: Callable[[Tensor, Tensor], Tensor] = rules.gate) -> Named:
    if kind.scaling == "local":
        return {name: gate(u, rules.local_scale(u, learner_dims=1)) for name, u in unbiased.items()}
    if not unbiased:
        return {}  # feature-wise, and no hidden layer
    scale = rules.global_scale(unbiased.values(), learner_dims=1)
    return {name: gate(u, scale) for name, u in unbiased.items()}


def _model(network: nn.Module, kind: Kind, device: torch.device, dtype: torch.dtype) -> Chain | Functional:
    if Chain.unsupported(network) is None:
        return Chain(network, curvature=kind.order == 2, features=kind.wise == "feature")
    return Functional(copy.deepcopy(network).to(device, dtype))


def _on(group: Group, device: torch.device) -> Group:
    vectors = {f.name: getattr(group, f.name).to(device) for f in fields(group) if f.name != "kind"}
    return replace(group, **vectors)


def _of_learners(value: Tensor, like: Tensor) -> Tensor:
    """One value per learner, to meet tensors that have more dimensions than learners do."""
    value = value.reshape(value.shape + (1,) * (like.ndim - value.ndim))
    return value if value.dtype == torch.bool else value.to(like.dtype)
