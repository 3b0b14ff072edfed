"""Optimizers for methods that score, gate or reset hidden units, derived from the method's class."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from upgd.curvature._backward import if_compiled
from upgd.methods import Method
from upgd.methods._scalars import Scalars, evaluate
from upgd.methods.method import State, results_of
from upgd.methods.reductions import reduced
from upgd.methods.units import Reset, Units, leaves, outgoing
from upgd.optim import features as hidden
from upgd.optim._phases import utility_dtype
from upgd.optim.from_method import MethodOptimizer, Work, beginning, groups_of

__all__ = ["UnitMethodOptimizer"]


class UnitMethodOptimizer(hidden.SeesFeatures, MethodOptimizer):
    """Runs the rule of a method that acts on hidden units; created by :func:`upgd.methods.optimizer`.

    The samples of a batch are treated like the positions of a convolution: a method receives the units' outputs for all
    samples since the last step. The state of units is stored with that of their incoming weights. New weights of reset units
    are drawn from ``generator``, by default torch's global one.

    Args:
        model: the network. ``optimizer.features`` shows which hidden units were found; see :class:`upgd.FeatureUPGD`.
        method: the method.
        features, scaler: as for :class:`upgd.FeatureUPGD`.
        options: as for :class:`upgd.optim.from_method.MethodOptimizer`.
    """

    _sees_units = True

    def __init__(
        self,
        model: nn.Module,
        method: type[Method],
        *,
        features: hidden.Pairs | None = None,
        scaler: "torch.amp.GradScaler | None" = None,
        **options: Any,
    ) -> None:
        hidden.check_model(model)
        super().__init__(groups_of(model, method, **options), method, **options)
        self._hidden = hidden.Features(model, features, scaler, keeps_outputs=True)
        if self.curvature is not None and hasattr(self.curvature, "watch"):
            self.curvature.watch(*self._hidden.modules)

    def _averages(self) -> set[str]:
        return {*super()._averages(), *self._of_units()}

    def _fits(self, value: Tensor, param: Tensor, name: str) -> bool:
        if name in self._of_units():
            return value.shape in (param.shape[:1], (1,))
        return super()._fits(value, param, name)

    def _of_units(self) -> set[str]:
        """The names of the state that units have."""
        return {part for group in self.param_groups for part in self._variant(group).unit_state}

    # --------------------------------------------------------------------------------------------------------- a step

    def _observe_units(self, work: list[Work]) -> dict[Tensor, SimpleNamespace]:
        _check_one_process()
        self._outputs = {feature: feature.take_outputs() for feature in self._hidden.all}
        has_gradient = any(feature.params[0].grad is not None for feature in self._outputs)
        if has_gradient and not any(self._outputs.values()):
            raise RuntimeError(
                "no hidden units were seen since the last step; run the forward and backward pass through the model that was "
                f"passed to the optimizer, with activations as modules, such as nn.ReLU() for F.relu.{if_compiled()}"
            )
        observed: dict[str, Mapping[str, Tensor]] = {}
        of_features: dict[str, tuple[hidden.Feature, Method]] = {}
        for feature, one, i in self._features_of(work):
            if not hasattr(one.method, "observe_units"):
                continue
            state = self._unit_state(feature, one.method)
            h, t = self._scalars(one, i)
            observation = one.method.call(
                "observe_units", units=self._units(feature, one), s=self._visible(one, i, state), h=h, t=t
            )
            changed, values = results_of(one.method, "observe_units", observation)
            self._keep_units(state, changed)
            if hasattr(one.method, "measure"):
                s = SimpleNamespace(**{part: value.unsqueeze(0) for part, value in state.items()})
                values = one.method.call("measure", s=s, h=h, t=t)
            observed[feature.name] = values
            of_features[feature.name] = feature, one.method
        found: dict[Tensor, SimpleNamespace] = {}
        for name, (feature, method) in of_features.items():
            reductions = reduced(method.unit_reductions, observed, learner_dims=1)[name]
            state = self._unit_state(feature, method)
            for param in feature.params:
                found[param] = SimpleNamespace(
                    o=_spread(observed[name], param), r=_spread(reductions, param), s=_spread(state, param, 0)
                )
        return found

    def _reset_units(self, work: list[Work]) -> None:
        for feature, one, i in self._features_of(work):
            if not hasattr(one.method, "reset_units"):
                continue
            state = self._unit_state(feature, one.method)
            units = self._units(feature, one)
            h, t = self._scalars(one, i)

            def draw(units: Units = units) -> Tensor:
                return self._uniform(units.gate_gradient)

            s = self._visible(one, i, state)
            reset, changed = one.method.call("reset_units", units=units, s=s, h=h, t=t, draw=draw)
            self._keep_units(state, changed)
            self._reset(feature, one.method, reset)

    def _features_of(self, work: list[Work]) -> list[tuple[hidden.Feature, Work, int]]:
        """The features that this step sees, each with its weight's group and number therein."""
        places = {param: (one, i) for one in work for i, param in enumerate(one.owners)}
        return [
            (feature, *places[feature.params[0]])
            for feature, outputs in self._outputs.items()
            if outputs is not None and feature.params[0] in places
        ]

    def _units(self, feature: hidden.Feature, work: Work) -> Units:
        outputs = self._outputs[feature]
        assert outputs is not None
        weight = feature.params[0]
        wide = utility_dtype(weight)
        activation, gradient = (part.to(wide).unsqueeze(0) for part in outputs)
        gradient = -gradient if work.group["maximize"] else gradient
        curvature = None
        if work.method.uses_curvature:
            curvature = feature.curvature_by(self.curvature).to(wide).unsqueeze(0)
        leaving = feature.follower.weight.detach().to(wide).unsqueeze(0)
        return Units(
            activation=activation,
            gradient=gradient,
            gate_gradient=(gradient * activation).sum(-1),
            gate_curvature=curvature,
            incoming=weight.detach().to(wide).flatten(1).unsqueeze(0),
            bias=None if len(feature.params) == 1 else feature.params[1].detach().to(wide).unsqueeze(0),
            outgoing=outgoing(leaving, feature.units, feature.outputs_per_unit),
        )

    def _scalars(self, work: Work, i: int) -> tuple[Scalars, Any]:
        """Return ``h`` and ``t`` for unit hooks, as in a population of one learner."""
        device = work.params[i].device
        numbers = vars(self._numbers(work.group, device))
        values = {
            name: torch.as_tensor(value, dtype=torch.float64, device=device).reshape(1)
            for name, value in numbers.items()
        }
        now = {**values, "t": work.steps[i]}
        h = Scalars(values, lambda scalar: evaluate(scalar, now, values["lr"]))
        return h, h.step

    def _visible(self, work: Work, i: int, state: Mapping[str, Tensor]) -> State:
        """Return the state for unit hooks: that of the weights and that of the units."""
        return State(**{part: value.unsqueeze(0) for part, value in {**work.states[i], **state}.items()})

    def _unit_state(self, feature: hidden.Feature, method: Method) -> dict[str, Tensor]:
        weight = feature.params[0]
        state = self.state[weight] if method.unit_state else {}
        for part, begins_as in method.unit_state.items():
            if part not in state:
                like = weight.detach().flatten(1)[:, 0]
                state[part] = beginning(begins_as, like[:1] if begins_as == "layer" else like)
        return {part: state[part] for part in method.unit_state}

    def _keep_units(self, state: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> None:
        self._keep(dict(state), {part: value.squeeze(0) for part, value in changed.items()})

    def _reset(self, feature: hidden.Feature, method: Method, reset: Reset) -> None:
        """Give the selected units new incoming weights, bias 0 and outgoing weights 0, and reset their state."""
        chosen, follower = reset.units.squeeze(0), feature.follower
        weight, *bias = feature.params
        fresh = (2 * self._uniform(weight) - 1) * weight[0].numel() ** -0.5
        self._write(weight, chosen.view(-1, *[1] * (weight.ndim - 1)), fresh, method)
        for param in bias:
            self._write(param, chosen, torch.zeros_like(param), method)
        if reset.outgoing:
            where = leaves(reset.units, follower.weight.unsqueeze(0), feature.outputs_per_unit).squeeze(0)
            self._write(follower.weight, where, torch.zeros_like(follower.weight), method)
        if reset.next_bias is not None and follower.bias is not None:
            follower.bias += reset.next_bias.squeeze(0).to(follower.bias.dtype)
        state = self._unit_state(feature, method)
        for part, begins_as in method.unit_state.items():
            if begins_as != "layer":
                state[part].copy_(torch.where(chosen, beginning(begins_as, state[part]), state[part]))

    def _write(self, param: Tensor, where: Tensor, fresh: Tensor, method: Method) -> None:
        param.copy_(torch.where(where, fresh.to(param.dtype), param))
        state = self.state.get(param, {})
        for part, begins_as in method.state.items():
            if part in state:
                state[part].copy_(torch.where(where, beginning(begins_as, fresh).to(state[part]), state[part]))

    def _uniform(self, like: Tensor) -> Tensor:
        generator = self.generator
        device = like.device if generator is None else generator.device
        drawn = torch.rand(like.shape, generator=generator, device=device, dtype=utility_dtype(like))
        return drawn.to(like.device)


def _spread(named: Mapping[str, Tensor], param: Tensor, learner_dims: int = 1) -> SimpleNamespace:
    """Reshape one number per unit to broadcast against an incoming parameter of the units."""
    values = {name: value.squeeze(0) if learner_dims else value for name, value in named.items()}
    return SimpleNamespace(
        **{name: value.reshape(value.shape + (1,) * (param.ndim - value.ndim)) for name, value in values.items()}
    )


def _check_one_process() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            "an optimizer for hidden units sees only the samples of its own process, so replicas would drift apart; use one "
            "process, or a weight-wise method"
        )
