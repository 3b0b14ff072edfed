"""The reference backend: every method, variant and network, in batched tensors on any device.

One step computes the derivatives for the samples (:mod:`.chain` or :mod:`.functional`) and applies the method's rule
(:mod:`upgd.methods`) with a leading learner dimension and every setting as a vector. The code favours clarity; faster
backends must agree with it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from upgd import noise, normalization
from upgd.methods._scalars import Scalar, Scalars, evaluate
from upgd.methods.method import State, results_of
from upgd.methods.reductions import reduced
from upgd.methods.units import leaves
from upgd.methods.utility import Utility, gate_of
from upgd.networks import initial_bounds
from upgd.noise import Purpose
from upgd.population import threads
from upgd.population.backend import Group, Loss, Tally, finite_learners
from upgd.population.chain import Chain, Derivatives
from upgd.population.functional import Functional
from upgd.streams.contract import Chunk

__all__ = ["TorchBackend", "gates", "unsupported"]

#: Number of random numbers to generate at once; generating them takes several temporaries of this size.
_NORMALS_AT_ONCE = 1 << 20

Named = dict[str, Tensor]


def unsupported(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why this backend cannot run the network with this group, or ``None`` if it can."""
    method = group.method
    both = (("curvature", method.uses_curvature), ("the hidden units", method.uses_units))
    needs = [name for name, needed in both if needed]
    if needs and (reason := Chain.unsupported(network)):
        return (
            f"{method.name} with these settings needs {' and '.join(needs)} and so the network as a chain of layers, but "
            f"{reason}; make it an nn.Sequential, or use first-order utility of weights"
        )
    if method.uses_units and group.kind.gated not in ("all", "hidden"):
        return f"gated={group.kind.gated!r} does not apply to features, which are in hidden layers; use granularity='weight'"
    try:
        gated_parameters(network, group.kind.gated)
        if method.needs("bound"):
            initial_bounds(network)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def gated_parameters(network: nn.Module, gated: str) -> frozenset[str]:
    """Return the parameters with gates: of all layers, of hidden layers, of the output layer, or of named layers."""
    names = [name for name, _ in network.named_parameters()]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    chosen = {"all": layers, "hidden": layers[:-1], "output": layers[-1:]}.get(gated)
    if chosen is None:
        chosen = gated.split("+")
        if unknown := [name for name in chosen if name not in layers]:
            raise ValueError(
                f"gated={gated!r} names {unknown[0]!r}, which is not a layer with parameters; choose from {', '.join(layers)}"
            )
    return frozenset(name for name in names if name.rpartition(".")[0] in chosen)


class TorchBackend:
    """See :class:`upgd.population.backend.Backend`."""

    fills_device = False
    #: Whether a step may branch on its own results, for which the host has to wait.
    _branches = True

    def __init__(
        self,
        network: nn.Module,
        group: Group,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._kind = group.kind
        self._method = group.method
        self._group = _on(group, device)
        self._dtype = dtype
        self._model = _model(network, group, device, dtype)
        self._gated = gated_parameters(network, group.kind.gated)
        self._bounds = initial_bounds(network) if self._method.needs("bound") else {}
        self._parameters: Named = {name: p.to(device, dtype, copy=True) for name, p in parameters.items()}
        self._state: dict[str, Named] = {"parameters": self._parameters}
        self._goes_on = torch.ones(len(group), dtype=torch.bool, device=device)  #: learners that take the current step
        for part, begins_as in self._method.state.items():
            self._state[part] = {name: _beginning(begins_as, p) for name, p in self._parameters.items()}
        for part, begins_as in self._method.unit_state.items():
            of_units = {name: self._parameters[name].flatten(2)[..., 0] for name in self._hidden()}
            self._state[part] = {name: _beginning(begins_as, row) for name, row in of_units.items()}
        self._h = Scalars(self._group.values, self._resolve)
        self._now: dict[str, Any] = {}  #: settings and step count of the current step
        self._resolved: dict[str, Tensor] = {}

    @torch.no_grad()
    def advance(self, chunk: Chunk, loss: Loss, tally: Tally) -> None:
        """Learn from every sample of the chunk, in order, and update the tally."""
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
        """Return the learners' current parameters."""
        return dict(self._parameters)

    def finite(self) -> Tensor:
        """Return whether all parameters of each learner are finite."""
        return finite_learners(*self.parameters().values())

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume; the names are those of the interface."""
        return {f"{part}.{name}": t.clone() for part, named in self._state.items() for name, t in named.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the result of :meth:`state`."""
        for part, named in self._state.items():
            for name, tensor in named.items():
                named[name] = state[f"{part}.{name}"].to(tensor, copy=True)
        if self._kind.normalize and "normalizer.mean" in state:  # the shape is known only after the first sample
            like = next(iter(self._parameters.values()))
            self._state["normalizer"] = {n: state[f"normalizer.{n}"].to(like, copy=True) for n in ("mean", "variance")}

    def _step(self, x: Tensor, target: Tensor, loss: Loss, noises: Named, stream_step: Any, tally: Tally) -> None:
        step = stream_step + 1
        self._begin_step(step)
        if self._kind.normalize:
            x = self._normalized(x, step)
        found = self._model.derivatives(self._parameters, x, target, loss)
        tally.loss += found.loss
        tally.correct += found.correct
        diverged = (tally.diverged_at < 0) & ~found.loss.isfinite()
        tally.diverged_at.copy_(torch.where(diverged, stream_step, tally.diverged_at))
        self._goes_on = tally.diverged_at < 0

        of_units = self._observe_units(found)
        observed, reductions = self._observe(found)
        new = {}
        for name, weight in self._parameters.items():
            result = self._method.call(
                "update",
                w=weight,
                g=found.gradient[name],
                s=self._state_of(name),
                h=self._h,
                t=self._h.step,
                o=observed.get(name),
                r=reductions.get(name),
                noise=noises.get(name, 0.0),
                curvature=found.curvature.get(name),
                unit=self._unit_of(name, of_units),
                bound=self._bounds.get(name),
            )
            updated, changed = results_of(self._method, "update", result)
            new[name] = self._unless_diverged(updated, weight)
            self._keep(name, changed)
        self._parameters.update(new)
        if hasattr(self._method, "reset_units"):
            self._reset_units(found, step)

    # ------------------------------------------------------------------------------------------------ phases of a step

    def _observe(self, found: Derivatives) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the first phase for all gated parameters; return the observed values and their reductions, by parameter."""
        if not hasattr(self._method, "observe"):
            return {}, {}
        observed: dict[str, Mapping[str, Tensor]] = {}
        for name, weight in self._parameters.items():
            if name in self._gated:
                observation = self._method.call(
                    "observe",
                    w=weight,
                    g=found.gradient[name],
                    s=self._state_of(name),
                    h=self._h,
                    t=self._h.step,
                    curvature=found.curvature.get(name),
                )
                observed[name] = self._kept(name, "observe", observation, self._state_of)
        return _namespaces(observed), _namespaces(reduced(self._method.reductions, observed, learner_dims=1))

    def _observe_units(self, found: Derivatives) -> dict[str, SimpleNamespace]:
        """Run ``observe_units`` for all hidden layers; return the results by incoming weight."""
        hidden = self._hidden()
        if not hidden or not hasattr(self._method, "observe_units"):
            return {}
        assert isinstance(self._model, Chain)
        observed: dict[str, Mapping[str, Tensor]] = {}
        for name in hidden:
            units = self._model.units(name, self._parameters, found)
            observation = self._method.call(
                "observe_units", units=units, s=self._state_of(name), h=self._h, t=self._h.step
            )
            observed[name] = self._kept(name, "observe_units", observation, self._unit_state_of)
        reductions = reduced(self._method.unit_reductions, observed, learner_dims=1)
        return {
            name: SimpleNamespace(o=observed[name], r=reductions[name], s=self._unit_state_of(name)) for name in hidden
        }

    def _reset_units(self, found: Derivatives, step: Any) -> None:
        """Run ``reset_units`` for all hidden layers."""
        assert isinstance(self._model, Chain)
        for number, name in enumerate(self._hidden()):
            units = self._model.units(name, self._parameters, found)

            def draw(number: int = number, size: int = units.gate_gradient.shape[1]) -> Tensor:
                keys = noise.words(self._group.seeds, Purpose.UNITS, step, 4 * (number + 1))[:, -4:]
                return noise.uniforms_at(
                    keys.to(torch.int32), torch.arange(size, dtype=torch.int32, device=keys.device)
                )

            reset, changed = self._method.call(
                "reset_units", units=units, s=self._state_of(name), h=self._h, t=self._h.step, draw=draw
            )
            self._keep(name, changed)
            self._reset(name, number, reset, step)

    def _reset(self, name: str, number: int, reset: Any, step: Any) -> None:
        assert isinstance(self._model, Chain)
        _, following, next_bias = self._model.around(name)
        mask = reset.units & self._goes_on.unsqueeze(1)
        if not self._branches or bool(mask.any()):  # few steps reset a unit
            self._renew(name, number, mask, step)
            if reset.outgoing:
                leaving = self._parameters[following]
                where = leaves(mask, leaving, self._model.outputs_per_unit(name))
                self._write(following, where, torch.zeros_like(leaving))
        if reset.next_bias is not None and next_bias is not None:
            moved = self._parameters[next_bias] + reset.next_bias
            self._parameters[next_bias] = self._unless_diverged(moved, self._parameters[next_bias])
        for part, begins_as in self._method.unit_state.items():
            if begins_as != "layer":
                fresh_state = _beginning(begins_as, self._state[part][name])
                self._state[part][name] = torch.where(mask, fresh_state, self._state[part][name])

    def _renew(self, name: str, number: int, mask: Tensor, step: Any) -> None:
        """Draw new incoming weights for some units of a hidden layer, and set their biases to zero."""
        assert isinstance(self._model, Chain)
        bias, _, _ = self._model.around(name)
        weight = self._parameters[name]
        keys = noise.words(self._group.seeds, Purpose.RESET, step, 4 * (number + 1))[:, -4:].to(torch.int32)
        index = torch.arange(weight[0].numel(), dtype=torch.int32, device=weight.device)
        bound = weight[0, 0].numel() ** -0.5
        fresh = (2 * noise.uniforms_at(keys, index).to(self._dtype) - 1).mul(bound).view_as(weight)
        self._write(name, _of_learners(mask, weight), fresh)
        if bias is not None:
            self._write(bias, mask, torch.zeros_like(self._parameters[bias]))

    def _write(self, name: str, where: Tensor, fresh: Tensor) -> None:
        """Write new values to some entries of a parameter, and reset the method's state of these entries."""
        self._parameters[name] = torch.where(where, fresh, self._parameters[name])
        for part, begins_as in self._method.state.items():
            state = self._state[part][name]
            self._state[part][name] = torch.where(where, _beginning(begins_as, fresh), state)

    # --------------------------------------------------------------------------------------------- arguments of rules

    def _begin_step(self, step: Any) -> None:
        self._now = {**self._group.values, "t": step}
        self._resolved = {}

    def _resolve(self, scalar: Scalar) -> Tensor:
        """Return the values of a per-learner expression, computed once per step."""
        if scalar.key not in self._resolved:
            self._resolved[scalar.key] = evaluate(scalar, self._now, self._group.seeds)
        return self._resolved[scalar.key]

    def _state_of(self, name: str) -> State:
        parts = (*self._method.state, *self._method.unit_state)
        return State(**{part: self._state[part][name] for part in parts if name in self._state[part]})

    def _unit_state_of(self, name: str) -> State:
        return State(**{part: self._state[part][name] for part in self._method.unit_state})

    def _keep(self, name: str, changed: Mapping[str, Tensor]) -> None:
        for part, value in changed.items():
            if part not in self._state:
                raise ValueError(f"{self._method.name} changes the state {part!r}, which it does not declare")
            self._state[part][name] = self._unless_diverged(value, self._state[part][name])

    def _kept(self, name: str, phase: str, observation: Any, state_of: Callable[[str], State]) -> Mapping[str, Tensor]:
        """Store the state that an observation changes; return the values to reduce."""
        changed, values = results_of(self._method, phase, observation)
        self._keep(name, changed)
        if hasattr(self._method, "measure"):
            values = self._method.call("measure", s=state_of(name), h=self._h, t=self._h.step)
        return values

    def _unit_of(self, name: str, of_units: Mapping[str, SimpleNamespace]) -> SimpleNamespace | None:
        """Return the state and reductions of the unit that each entry of a parameter belongs to."""
        if not of_units:
            return None
        assert isinstance(self._model, Chain)
        unit = of_units.get(self._model.owner(name) or "")
        if unit is None:
            return None
        ndim = self._parameters[name].ndim

        def spread(named: Mapping[str, Tensor]) -> SimpleNamespace:
            return SimpleNamespace(**{key: v.reshape(v.shape + (1,) * (ndim - v.ndim)) for key, v in named.items()})

        return SimpleNamespace(o=spread(unit.o), r=spread(unit.r), s=spread(vars(unit.s)))

    def _hidden(self) -> tuple[str, ...]:
        """The incoming weights of hidden units, if the method uses units."""
        return self._model.features() if self._method.uses_units and isinstance(self._model, Chain) else ()

    def _unless_diverged(self, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(_of_learners(self._goes_on, old), new, old)

    def _normalized(self, x: Tensor, step: Any) -> Tensor:
        """Return the sample normalized by the learner's running mean and variance."""
        state = self._state.setdefault("normalizer", {})
        if not state:
            state |= {"mean": torch.zeros_like(x), "variance": torch.ones_like(x)}
        decay = normalization.decay(self._h.normalize, self._h.step)
        normalized, state["mean"], state["variance"] = normalization.normalize(
            x, state["mean"], state["variance"], decay
        )
        return normalized

    def _noises(self, start: int, length: int) -> Iterator[Named]:
        """Yield ξ of the learners' steps start + 1 … start + length, each by parameter; empty without noise."""
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
        """Yield ζ of the steps from ``first``, ``(learners, count)`` each; small networks draw many steps at once, large ones
        few learners."""
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


def gates(group: Group, traces: Mapping[str, Tensor], step: int) -> Named:
    """Return the gate ū of everything that has a utility trace, after ``step`` steps."""
    method = group.method
    if not isinstance(method, Utility):
        return {}
    some = next(iter(traces.values()))
    values = {name: value.to(some.device) for name, value in group.values.items()}
    h = Scalars(values, lambda scalar: evaluate(scalar, {**values, "t": step}, values["lr"]))
    unbiased = {name: {"scale": trace / (1 - h.beta_utility**h.step)} for name, trace in traces.items()}
    reductions = method.reductions if method.by_weight else method.unit_reductions
    scales = reduced(reductions, unbiased, learner_dims=1)
    return {
        name: gate_of(method, own["scale"], method.scale_of(own["scale"], scales[name]["scale"], h, h.step))
        for name, own in unbiased.items()
    }


def _model(network: nn.Module, group: Group, device: torch.device, dtype: torch.dtype) -> Chain | Functional:
    if Chain.unsupported(network) is None:
        return Chain(network, curvature=group.method.uses_curvature, features=group.method.uses_units)
    return Functional(copy.deepcopy(network).to(device, dtype))


def _beginning(begins_as: str, parameter: Tensor) -> Tensor:
    """Return the initial state of the given kind."""
    if begins_as == "layer":
        return torch.zeros_like(parameter[:, :1])
    return parameter.clone() if begins_as == "parameter" else torch.zeros_like(parameter)


def _namespaces(named: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    return {name: SimpleNamespace(**values) for name, values in named.items()}


def _on(group: Group, device: torch.device) -> Group:
    values = {name: value.to(device) for name, value in group.values.items()}
    return replace(group, seeds=group.seeds.to(device), rows=group.rows.to(device), values=values)


def _of_learners(value: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per learner so that it broadcasts against tensors with more dimensions."""
    value = value.reshape(value.shape + (1,) * (like.ndim - value.ndim))
    return value if value.dtype == torch.bool else value.to(like.dtype)
