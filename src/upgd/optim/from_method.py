"""The torch optimizer that runs the rule of a method."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from upgd import noise, rules
from upgd.methods import Method
from upgd.methods.method import Reduction, State, results_of
from upgd.methods.reductions import reduced
from upgd.methods.utility import Utility, gate_of
from upgd.networks import initial_bounds
from upgd.optim import _fused as fusing
from upgd.optim import _narrow as narrow
from upgd.optim._arguments import check_dense, check_gated, check_lr, with_plain_seed
from upgd.optim._base import Curvature, step_count
from upgd.optim._fusing import FusingOptimizer
from upgd.optim._phases import Kept, keep, on, utility_dtype, wide
from upgd.optim._seeded import seeded
from upgd.optim._sharded import local, placed, reduced_across

__all__ = ["BOUND", "MethodOptimizer", "Work", "beginning", "groups_of", "needs_model"]

#: The option of methods that need the bounds of initial distributions.
BOUND = "bound"
#: torch's messages about a number in the place of a tensor.
_OF_NUMBER = re.compile(
    r"(\w+)\(\)(?:: argument '\w+' \(position \d+\) must be Tensor, not (bool|float|int)$"
    r"| received an invalid combination of arguments - got \((bool|float|int),)"
)
#: Names in a parameter's state that methods cannot use.
_RESERVED = ("step", "previous_noise")


def needs_model(method: type[Method]) -> str:
    """Return the error message for parameters where a model is needed."""
    return (
        f"method={method.name!r} with these settings works on hidden units, so it needs the model instead of its parameters; "
        f"use upgd.methods.optimizer({method.name!r}, model, …)"
    )


def groups_of(model: nn.Module, method: type[Method], **options: Any) -> list[Any]:
    """Return the named parameters of a model, in groups with a ``bound`` each if the method needs it and none was given."""
    named = list(model.named_parameters())
    if not method.needs("bound") or BOUND in options:
        return named
    try:
        bounds = initial_bounds(model)
    except TypeError as error:
        raise ValueError(
            f"method={method.name!r} needs the bound of every parameter's initial distribution, and {error}; pass parameter "
            'groups with a bound, such as {"params": …, "bound": 0.05}'
        ) from None
    groups: dict[float | None, list[tuple[str, Tensor]]] = {}
    for name, param in named:
        groups.setdefault(bounds[name], []).append((name, param))
    return [{"params": params, BOUND: bound} for bound, params in groups.items()]


@dataclass
class Work:
    """One parameter group in one step; lists have one entry per parameter with a gradient."""

    group: dict[str, Any]
    method: Method  #: in the variant selected by the group's options
    params: list[Tensor]  #: their local parts; the other tensors likewise
    owners: list[Tensor]  #: the parameters as passed to the optimizer
    numbers: list[int]  #: indices of the parameters among all of the optimizer's; empty if the group has no seed
    weights: list[Tensor]  #: the parameters, in the type of their state
    grads: list[Tensor]
    curvatures: list[Tensor | None]
    states: list[dict[str, Any]]  #: tensors, or ``Kept`` in fewer bits
    rounded: list[Tensor | Kept]  #: the parameters, if they are rounded stochastically
    steps: list[float | Tensor]
    previous_noises: list[Tensor]
    observed: list[Mapping[str, Tensor]]  #: empty if the group has no gates


class MethodOptimizer(FusingOptimizer):
    """Runs the rule of any method that works entry by entry; created by :func:`upgd.methods.optimizer`.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer. Every group may have its own
            settings; a reduction over the learner is one over all groups. If the method has gates, a group with
            ``"gated": False`` has none.
        method: the method.
        curvature, maximize, fused, capturable, generator, seed, state_dtype, stochastic_rounding: as for
            :class:`upgd.UPGD`.
        bound: for a method that needs it, the bound b of the parameters' initial uniform distribution on [−b, b], or
            ``None`` if they were initialized to a constant; groups may have their own.
        settings: the method's settings by name.
    """

    #: Whether the model, and thus its hidden units, are known.
    _sees_units = False

    def __init__(
        self,
        params: ParamsT,
        method: type[Method],
        *,
        curvature: Curvature | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        bound: Any = ...,
        **settings: Any,
    ) -> None:
        self.method = method
        own = {name: setting for name, setting in method.settings.items() if name not in ("normalize", "gated")}
        self._required = tuple(name for name, setting in own.items() if setting.default is ...)
        if unknown := [name for name in settings if name not in own]:
            raise ValueError(
                f"{unknown[0]} is not an option of an optimizer for method={method.name!r}; leave it out, or use one of "
                f"{', '.join(own)}"
            )
        defaults = {
            name: settings.get(name, None if setting.default is ... else setting.default)
            for name, setting in own.items()
        }
        if "gated" in method.settings:
            defaults["gated"] = True
        if bound is not ...:
            defaults[BOUND] = bound
        defaults |= {
            "maximize": maximize,
            "fused": fused,
            "capturable": capturable,
            "seed": seed,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, curvature=curvature, generator=generator)

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self.method.name}", 1)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"method": self.method, "_required": self._required}

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        check_gated(options)
        checked = with_plain_seed(options)
        for name, setting in self.method.settings.items():
            if name == "lr" and name in options:
                check_lr(options[name])
                checked[name] = options[name] if isinstance(options[name], Tensor) else float(options[name])
            elif name in options and name != "gated":
                checked[name] = setting.check(name, options[name])
        return checked

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            self._check_variant(self._variant(group := {**self.defaults, **param_group}), group)
        super().add_param_group(param_group)

    def _check_variant(self, method: Method, group: Mapping[str, Any]) -> None:
        name = self.method.name
        if method.uses_units and not self._sees_units:
            raise ValueError(needs_model(self.method))
        if method.uses_units and self._rounds({**group}):
            raise ValueError(
                f"method={name!r} resets the state of hidden units, which has 32 bits; leave state_dtype and "
                "stochastic_rounding out"
            )
        if method.needs("bound") and BOUND not in group:
            raise ValueError(
                f"method={name!r} needs the bound of every parameter's initial distribution; pass the model instead of "
                'its parameters, or groups with a bound, such as {"params": …, "bound": 0.05}'
            )
        if (bound := group.get(BOUND)) is not None and not (isinstance(bound, float | int) and 0 < bound < math.inf):
            raise ValueError(
                f"bound must be a positive number, or None for parameters initialized to a constant, not {bound!r}"
            )
        if method.uses_curvature and self.curvature is None:
            raise ValueError(f"method={name!r} needs curvature; pass curvature=upgd.HesScale(model, criterion)")
        if taken := [part for part in (*method.state, *method.unit_state) if part in _RESERVED]:
            raise ValueError(
                f"method={name!r} has a state named {taken[0]!r}, which optimizers use; give it another name"
            )

    def _variant(self, group: Mapping[str, Any]) -> Method:
        """Return the method in the variant selected by a group's options."""
        switches = {
            name: group[name]
            for name, setting in self.method.settings.items()
            if setting.is_switch and name != "gated" and name in group
        }
        return self.method(**switches)

    def _averages(self) -> Iterable[str]:
        return {part for group in self.param_groups for part in self._variant(group).state}

    # --------------------------------------------------------------------------------------------------------- a step

    def _advance(self) -> None:
        if self._advance_fused():
            return
        work = [self._gather(group) for group in self.param_groups]
        units = self._observe_units(work)
        for one in work:
            self._observe(one)
        observed = {f"{k}.{i}": values for k, one in enumerate(work) for i, values in enumerate(one.observed)}
        owners = {f"{k}.{i}": owner for k, one in enumerate(work) for i, owner in enumerate(one.owners)}
        known: list[tuple[dict[str, Reduction], dict[str, dict[str, Tensor]]]] = []
        for k, one in enumerate(work):
            reductions = _reductions(one.method, observed, owners if self._has_shards else None, known)
            for i in range(len(one.params)):
                self._update(one, i, reductions.get(f"{k}.{i}"), units.get(one.owners[i]))
        self._reset_units(work)

    def _observe_units(self, work: list[Work]) -> dict[Tensor, SimpleNamespace]:
        """Return the method's observations of hidden units, by their incoming parameters."""
        return {}

    def _reset_units(self, work: list[Work]) -> None:
        """Let the method reset hidden units."""

    def _observe(self, work: Work) -> None:
        """Run the first phase for a group."""
        if not hasattr(work.method, "observe") or not work.group.get("gated", True):
            return
        for i, weight in enumerate(work.weights):
            h, t = self._numbers(work.group, weight.device), work.steps[i]
            observation = _called(
                work.method,
                "observe",
                w=weight,
                g=work.grads[i],
                s=_opened(work.states[i]),
                h=h,
                t=t,
                curvature=work.curvatures[i],
            )
            changed, values = results_of(work.method, "observe", observation)
            self._keep(work.states[i], changed)
            if hasattr(work.method, "measure"):
                values = _called(work.method, "measure", s=_opened(work.states[i]), h=h, t=t)
            work.observed.append(values)

    def _update(
        self, work: Work, i: int, reductions: Mapping[str, Tensor] | None, unit: SimpleNamespace | None
    ) -> None:
        """Run the second phase for a parameter."""
        result = _called(
            work.method,
            "update",
            w=work.weights[i],
            g=work.grads[i],
            s=_opened(work.states[i]),
            h=self._numbers(work.group, work.params[i].device),
            t=work.steps[i],
            o=SimpleNamespace(**work.observed[i]) if work.observed else None,
            r=None if reductions is None else SimpleNamespace(**reductions),
            noise=self._noise(work, i),
            curvature=work.curvatures[i],
            unit=unit,
            bound=work.group.get(BOUND),
        )
        updated, changed = results_of(work.method, "update", result)
        self._keep(work.states[i], changed)
        keep(work.rounded[i] if work.rounded else work.params[i], updated)

    def _keep(self, state: dict[str, Any], changed: Mapping[str, Tensor]) -> None:
        if unknown := [part for part in changed if part not in state]:
            raise ValueError(f"{self.method.name} changes a state {unknown[0]!r} that it does not declare")
        # A rule may return one state as another, so none is overwritten before all are computed.
        values = {
            part: value.clone() if any(value is old for old in state.values()) else value
            for part, value in changed.items()
        }
        for part, value in values.items():
            keep(state[part], value)

    def _noise(self, work: Work, i: int) -> Tensor | float:
        if self._noise_of(work.method, work.group) == "none":
            return 0.0
        if work.group["seed"] is not None:
            kind = self._noise_of(work.method, work.group)
            return seeded(work.owners[i], work.group["seed"], work.steps[i], work.numbers[i], kind)
        drawn = self._draw(work.params[i])
        xi = drawn
        if work.previous_noises:
            xi = noise.anticorrelated(drawn, work.previous_noises[i])
            work.previous_noises[i].copy_(drawn)
        return xi.to(work.weights[i].dtype)

    def _perturbs(self, group: dict[str, Any]) -> bool:
        return self._noise_of(self._variant(group), group) != "none"

    def _noise_of(self, method: Method, group: Mapping[str, Any]) -> str:
        return method.noise_of({name: group[name] for name in ("sigma",) if name in group})

    def _numbers(self, group: Mapping[str, Any], device: torch.device) -> SimpleNamespace:
        """What the rule sees as ``h``."""
        numbers: dict[str, Any] = dict(self.method.constants)
        for name, setting in self.method.settings.items():
            if setting.pair:
                numbers.update(zip(setting.pair, group[name], strict=True))
            elif not setting.is_switch and name in group:
                numbers[name] = group[name]
        if isinstance(numbers.get("lr"), Tensor):
            numbers["lr"] = on(numbers["lr"], device)
        return SimpleNamespace(**numbers)

    def _methods(self) -> list[tuple[Method, bool]]:
        return [(self._variant(group), group.get("gated", True)) for group in self.param_groups]

    def _works(self) -> list[fusing.Work]:
        numbering, works = self._numbering(), []
        for group, (method, gated) in zip(self.param_groups, self._methods(), strict=True):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            steps: list[Tensor] = []
            lists: list[list[Tensor]] = [[] for _ in method.state]
            self._init_group(group, params, grads, steps, [], *lists)
            works.append(
                fusing.Work(
                    method=method,
                    gated=gated,
                    noise=self._noise_of(method, group),
                    values=vars(self._numbers(group, params[0].device)) if params else {},
                    sign=-1.0 if group["maximize"] else 1.0,
                    owners=params,
                    params=self._local(params, params),
                    grads=self._local(grads, params),
                    curvatures=[self._diagonal(param) for param in params] if method.uses_curvature else [],
                    states={
                        name: self._local(tensors, params) for name, tensors in zip(method.state, lists, strict=True)
                    },
                    steps=[self._counted(param) for param in params] if steps else [],
                    numbers=[numbering[param] for param in params],
                    slots={name: self._slot(name) for name in method.state},
                    scales={name: self._scales(name, params) for name in method.state},
                    rounds=group["stochastic_rounding"],
                )
            )
        return works

    def _gather(self, group: dict[str, Any]) -> Work:
        method = self._variant(group)
        parts = list(method.state)
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        previous_noises: list[Tensor] = []
        lists: list[list[Tensor]] = [[] for _ in parts]
        self._init_group(group, params, grads, steps, previous_noises, *lists)
        if steps:
            # Not in _init_group, which the compiler runs once and leaves out of the compiled step.
            torch._foreach_add_(steps, 1.0)
        numbering, own = self._numbering(), [local(param) for param in params]
        on_device = group["capturable"] or torch.compiler.is_compiling()
        counted: list[float | Tensor] = [step if on_device else step.item() for step in steps]
        states = {
            part: self._kept(group, params, counted, part, tensors) for part, tensors in zip(parts, lists, strict=True)
        }
        # Maximizing a loss is minimizing its negative.
        sign = -1.0 if group["maximize"] else 1.0
        return Work(
            group=group,
            method=method,
            params=own,
            owners=params,
            numbers=[] if group["seed"] is None else [numbering[param] for param in params],
            weights=[param.to(utility_dtype(param)) for param in own],
            grads=[sign * local(grad, p).to(utility_dtype(p)) for p, grad in zip(params, grads, strict=True)],
            curvatures=[
                sign * local(self._diagonal(param), param).to(utility_dtype(param)) if method.uses_curvature else None
                for param in params
            ],
            states=[{part: tensors[i] for part, tensors in states.items()} for i in range(len(params))],
            rounded=self._rounded(group, params, counted),
            steps=counted or [0.0] * len(params),
            previous_noises=previous_noises,
            observed=[],
        )

    # torch.compile knows this method by its name, as torch's own optimizers have it, and runs it outside the compiled step.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        previous_noises: list[Tensor],
        *lists: list[Tensor],
    ) -> None:
        method = self._variant(group)
        self._settle_seed()
        seeded = group["seed"] is not None and (self._perturbs(group) or self._rounds(group))
        counts = self.method.needs("t") or seeded
        remembers_noise = self._noise_of(method, group) == "anticorrelated" and group["seed"] is None
        for param in group["params"]:
            if param.grad is None or param.numel() == 0:
                continue
            check_dense(param, self)
            params.append(param)
            grads.append(param.grad)
            if not (counts or remembers_noise or method.state):
                continue  # no state, not even an empty one
            state = self.state[param]
            if counts:
                if "step" not in state:
                    state["step"] = step_count(param, group)
                steps.append(state["step"])
            if remembers_noise:
                previous_noises.append(self._previous_noise(param))
            for (part, begins_as), tensors in zip(method.state.items(), lists, strict=True):
                if part not in state:
                    state[part] = beginning(begins_as, param)
                if begins_as == "zeros":
                    narrow.begin(state, part, param, group["state_dtype"])
                tensors.append(state[part])

    @torch.no_grad()
    def gates(self) -> dict[Tensor, Tensor]:
        """Return the gate ū in [0, 1] of each weight by parameter; empty for methods without utility."""
        if not issubclass(self.method, Utility):
            return {}
        observed: dict[str, dict[str, Tensor]] = {}
        found: dict[str, tuple[Tensor, Utility, SimpleNamespace, float]] = {}
        for group in self.param_groups:
            for param in group["params"] if group.get("gated", True) else ():
                state = self.state.get(param, {})
                if "utility" in state and param.numel():
                    h, t = self._numbers(group, param.device), state["step"].item()
                    key = str(len(found))
                    trace = narrow.wide_state(state, "utility", param)
                    observed[key] = {"scale": rules.unbiased(trace, h.beta_utility, t)}
                    method = self._variant(group)
                    assert isinstance(method, Utility)
                    found[key] = param, method, h, t
        known: list[tuple[dict[str, Reduction], dict[str, dict[str, Tensor]]]] = []
        owners = {key: param for key, (param, *_) in found.items()} if self._has_shards else None
        gates: dict[Tensor, Tensor] = {}
        for key, (param, method, h, t) in found.items():
            own, reduced_to = observed[key]["scale"], _reductions(method, observed, owners, known)[key]["scale"]
            gates[param] = placed(gate_of(method, own, method.scale_of(own, reduced_to, h, t)), param)
        return gates


def _called(method: Method, phase: str, **arguments: Any) -> Any:
    """Run a phase of the rule. Settings and the step are plain numbers here, which torch's functions do not take."""
    if torch.compiler.is_compiling():
        return method.call(phase, **arguments)
    try:
        return method.call(phase, **arguments)
    except TypeError as error:
        found = _OF_NUMBER.match(str(error))
        if found is None:
            raise
        raise TypeError(
            f"method={method.name!r} calls torch.{found[1]} with a {found[2] or found[3]} in place of a tensor; h and t "
            "are plain numbers in an optimizer, so use arithmetic, such as h.lr**0.5, or torch.full_like"
        ) from error


def _reductions(
    method: Method,
    observed: Mapping[str, Mapping[str, Tensor]],
    owners: Mapping[str, Tensor] | None,
    known: list[tuple[dict[str, Reduction], dict[str, dict[str, Tensor]]]],
) -> dict[str, dict[str, Tensor]]:
    """The reductions that a variant of the method asks for, over all groups; ``known`` has those of other groups.

    ``owners`` are the parameters, if some of them are sharded.
    """
    wanted = dict(method.reductions or method.unit_reductions)
    for reductions, result in known:
        if reductions == wanted:
            return result
    values = {of: own for of, own in observed.items() if all(name in own for name in wanted)}
    result = reduced(wanted, values) if owners is None else reduced_across(wanted, values, owners)
    known.append((wanted, result))
    return result


def _opened(state: Mapping[str, Tensor | Kept]) -> State:
    """What the rule sees as ``s``."""
    return State(**{part: wide(kept) for part, kept in state.items()})


def beginning(begins_as: str, param: Tensor) -> Tensor:
    """The initial state of that kind, in 32 bits where the parameter has 16."""
    if begins_as not in ("zeros", "parameter", "layer"):
        raise ValueError(f"state begins as 'zeros' or as a copy of the 'parameter', not as {begins_as!r}")
    if begins_as == "parameter":
        return param.detach().to(utility_dtype(param), copy=True, memory_format=torch.preserve_format)
    return torch.zeros_like(param, dtype=utility_dtype(param), memory_format=torch.preserve_format)
