"""The fused implementation of a step: one or two passes, by kernels that are generated from the method's rule.

The kernels use Triton on a GPU and numba on the CPU. This module converts the groups of an optimizer to their inputs.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from upgd.kernels.source import simplified
from upgd.kernels.steps import Engine, Part, Reductions, states_of
from upgd.kernels.triton_source import check
from upgd.methods import Method
from upgd.methods.tracing import CannotTrace, Rule, traced
from upgd.optim._phases import is_plain
from upgd.optim._sharded import first_entry, has_whole_rows, is_sharded, local

__all__ = ["NOISES", "Fused", "Repeated", "StepPlan", "Work", "reason_against"]

NOISES = {"none": 0, "white": 1, "anticorrelated": 2}


@dataclass(frozen=True)
class _Kind:
    """What the kernels for a kind of device support.

    Attributes:
        package: the package that they need.
        dtypes: the supported dtypes of parameters.
        shards: whether parameters may be shards.
        narrow: whether state with fewer bits and parameters can be rounded stochastically.
    """

    package: str
    dtypes: tuple[torch.dtype, ...]
    shards: bool
    narrow: bool


_KINDS = {
    "cpu": _Kind("numba", (torch.float32,), shards=False, narrow=False),
    "cuda": _Kind("triton", (torch.float32, torch.bfloat16, torch.float16), shards=True, narrow=True),
}


_REDUCTIONS_OF_SHARDS = (("max", "learner"), ("norm", "unit"))


@dataclass
class Work:
    """The inputs of a step for one parameter group; lists have an entry for each parameter.

    Attributes:
        method: the method, in the variant given by the group's options.
        gated: whether the first phase runs.
        noise: ``"none"``, ``"white"`` or ``"anticorrelated"``.
        values: the numbers in ``h``.
        sign: −1 to maximize.
        owners: the parameters of the optimizer. If they are sharded, the other tensors are local shards.
        states: the tensors of each state, by its name in the rule.
        slots: for each state, by its name in the rule, the slot of the random numbers with which it is rounded if it is
            stored with fewer bits.
        scales: for each state, by its name in the rule, its scales; None for parameters whose state has more than 8 bits.
        rounds: whether bfloat16 parameters are rounded stochastically.
    """

    method: Method
    gated: bool
    noise: str
    values: Mapping[str, Any]
    sign: float
    owners: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor]
    curvatures: list[Tensor]
    states: Mapping[str, list[Tensor]]
    steps: list[Tensor]
    numbers: list[int]
    slots: Mapping[str, int]
    scales: Mapping[str, list[Tensor | None]]
    rounds: bool


def reason_against(
    params: Sequence[Tensor], methods: Iterable[tuple[Method, bool]], groups: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return why steps cannot be fused, as a clause that follows "because"; None if they can.

    Args:
        params: all parameters.
        methods: the method of each group, and whether it is gated.
        groups: the options of each group.
    """
    if not params:
        return "there are no parameters"
    device = params[0].device
    kind = _KINDS.get(device.type)
    for param in params:
        if param.device != device:
            return "the parameters are on several devices"
        if kind is None or param.dtype not in kind.dtypes:
            return f"a parameter is {param.dtype} on {device}"
        if not is_plain(param) and (reason := _reason_against_shard(param, kind)) is not None:
            return reason
    assert kind is not None
    for group in groups:
        narrow = group.get("state_dtype") in (torch.bfloat16, torch.uint8)
        if not kind.narrow and (narrow or group.get("stochastic_rounding")):
            return f"the kernels for {device.type} do not support state_dtype and stochastic_rounding"
    if not _installed(kind.package):
        return f"it needs {kind.package}, which is not installed"
    reductions: set[Any] = set()
    for method, gated in methods:
        if (reason := _untraceable(*_variant(method), gated)) is not None:
            return reason
        reductions |= set(method.reductions.values()) if gated else set()
    if any(map(is_sharded, params)) and not any(reductions <= {one} for one in _REDUCTIONS_OF_SHARDS):
        return (
            "parameters are sharded, and the kernels support only maxima over all parameters or only norms of units, but not "
            "both or others"
        )
    return None


def _reason_against_shard(param: Tensor, kind: _Kind) -> str | None:
    if not is_sharded(param):
        return f"a parameter is a {type(param).__name__}"
    if not kind.shards:
        return f"a parameter is sharded, and the kernels for {param.device.type} do not support shards"
    if not has_whole_rows(param):
        return "a parameter is sharded along another dimension than the first"
    return None


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _variant(method: Method) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """Return a method's class and the switches that select its variant, as a key for caches."""
    switches = ((name, getattr(method, name)) for name, setting in method.settings.items() if setting.is_switch)
    return type(method), tuple(switches)


@functools.cache
def _traced(method: Any, switches: tuple[tuple[str, Any], ...], gated: bool) -> Rule:
    return traced(method(**dict(switches)), gated=gated)


@functools.cache
def _untraceable(method: Any, switches: tuple[tuple[str, Any], ...], gated: bool) -> str | None:
    try:
        check(_traced(method, switches, gated))
    except CannotTrace as reason:
        return str(reason)
    return None


@functools.lru_cache(maxsize=256)
def _rule(
    method: Any,
    switches: tuple[tuple[str, Any], ...],
    gated: bool,
    known: tuple[tuple[int, float], ...],
    noise: bool,
    reductions: Reductions,
) -> Rule:
    """Return the rule of a group, with some scalars known and its reductions numbered as those of the step."""
    rule = simplified(_traced(method, switches, gated), dict(known), noise=noise)
    if not gated or not reductions:
        return rule
    own = _reductions(method(**dict(switches)))
    observed = {name: place for (name, _, _), place in zip(own, rule.observed, strict=True)}
    numbers = [reductions.index(one) for one in own]
    return replace(
        rule,
        nodes=tuple(("reduced", numbers[node[1]]) if node[0] == "reduced" else node for node in rule.nodes),
        reductions=tuple((operation, over) for _, operation, over in reductions),  # type: ignore[misc]
        observed=tuple(observed[name] for name, _, _ in reductions),
    )


def _reductions(method: Method) -> Reductions:
    return tuple((name, operation, over) for name, (operation, over) in method.reductions.items())


class Fused:
    """The fused steps of one optimizer."""

    def __init__(self) -> None:
        self._engines: dict[torch.device, Engine] = {}

    def planned(self, works: Sequence[Work]) -> "StepPlan | None":
        """Return the plan of a step; None if no parameter has a gradient."""
        works = [one for work in works for one in _by_dtype(work)]
        if not works:
            return None
        found: dict[tuple[str, str, str], None] = {}
        for work in works:
            if work.gated:
                found.update(dict.fromkeys(_reductions(work.method)))
        reductions = tuple(found)
        copies: list[tuple[Tensor, Tensor]] = []
        parts = [_part(work, reductions, copies) for work in works]
        return StepPlan(self._engine(works[0].params[0].device), parts, reductions, copies, works)

    def _engine(self, device: torch.device) -> Engine:
        if device not in self._engines:
            self._engines[device] = make_engine(device)
        return self._engines[device]


@dataclass
class StepPlan:
    """A step that is ready to be taken. It can be taken again if only gradients and the learning rate change.

    Attributes:
        copies: pairs of a non-contiguous tensor and its contiguous copy, which the step modifies.
    """

    engine: Engine
    parts: list[Part]
    reductions: Reductions
    copies: list[tuple[Tensor, Tensor]]
    works: list[Work]

    def step(
        self,
        seed: int,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        everywhere: Callable[[Tensor], Tensor] | None = None,
        changed: Sequence[tuple[int, int]] | None = None,
        across: Callable[[Tensor, list[Tensor]], None] | None = None,
        across_units: Callable[[Tensor, list[Tensor]], Tensor] | None = None,
    ) -> None:
        """Take the step; see :meth:`upgd.kernels.steps.Engine.step` and :meth:`upgd.kernels.cuda_step.CudaStep.step`."""
        more: dict[str, Any] = {} if changed is None else {"changed": changed}
        by_unit = any(over == "unit" for _, _, over in self.reductions)
        if across is not None and not by_unit:
            owners = [owner for work in self.works if work.gated for owner in work.owners]
            more["across"] = lambda maxima: across(maxima, owners)
        if across_units is not None and by_unit:

            def sum_over_processes(number: int, squares: Tensor) -> Tensor:
                return across_units(squares, [self.works[number].owners[i] for i in self.parts[number].split])

            more["across_units"] = sum_over_processes
        self.engine.step(
            self.parts,
            self.reductions,
            seed,
            grad_scale=grad_scale,
            found_inf=found_inf,
            everywhere=everywhere,
            **more,
        )
        for original, copy in self.copies:
            original.copy_(copy)
        # Autograd must detect the change, as it does for changes by torch operations.
        torch.autograd.graph.increment_version([param for work in self.works for param in work.params])


class Repeated:
    """Detects cheaply whether a step can reuse the plan of the previous one.

    It also runs the first phase of the next step early, tensor by tensor, during the backward pass.
    """

    def __init__(self, optimizer: Optimizer, plan: StepPlan) -> None:
        self._plan, self._state, self._count = plan, optimizer.state, len(optimizer.state)
        self._options = [_options(group) for group in optimizer.param_groups]
        self._params = [owner for work in plan.works for owner in work.owners]
        own = set(self._params)
        self._idle = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        self._sharded = any(map(is_sharded, self._params))
        self._addresses = self._current_addresses()
        self._kinds = [grad.dtype for part in plan.parts for grad in part.grads]
        groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        self._groups = [groups[work.owners[0]] for work in plan.works]
        self._places = {
            param: (number, place)
            for number, (part, work) in enumerate(zip(plan.parts, plan.works, strict=True))
            for place, param in enumerate(work.owners)
            if part.rule.reductions
        }
        #: For each parameter that was observed early: the gradient, its version and that of the parameter.
        self._seen: dict[Tensor, tuple[Tensor, int, int]] = {}
        self._states = [
            (optimizer.state[param], list(optimizer.state[param].items()))
            for param in self._params
            if param in optimizer.state
        ]

    def _current_addresses(self) -> list[int]:
        params = map(local, self._params) if self._sharded else self._params
        return [param.data_ptr() for param in params]

    @staticmethod
    def possible(plan: StepPlan) -> bool:
        """Return whether the plan can be reused: nothing but gradients and learning rates changes from step to step."""
        return not plan.copies and not any(part.curvatures for part in plan.parts)

    def observe(self, optimizer: Optimizer, param: Tensor) -> None:
        """Run the first phase for a parameter whose gradient has been accumulated, if the next step can use the result."""
        self._seen.pop(param, None)
        grad, engine = param.grad, self._plan.engine
        if param not in self._places or grad is None or grad.dtype != param.dtype or not grad.is_contiguous():
            return
        if not self._same(optimizer):
            return
        number, place = self._places[param]
        if engine.observe(self._plan.parts[number], number, place, grad):  # type: ignore[attr-defined]
            self._seen[param] = grad, grad._version, param._version

    def changed(self) -> list[tuple[int, int]] | None:
        """Return the tensors that have changed since they were observed, by part and index; None if most have."""
        found = []
        for param, place in self._places.items():
            grad, version, own = self._seen.get(param, (None, 0, 0))
            if grad is not param.grad or grad is None or (grad._version, param._version) != (version, own):
                found.append(place)
        self._seen.clear()
        return found if 2 * len(found) < len(self._places) else None

    def _same(self, optimizer: Optimizer) -> bool:
        if optimizer.state is not self._state or len(self._state) != self._count:
            return False
        return [_options(group) for group in optimizer.param_groups] == self._options

    def plan(self, optimizer: Optimizer) -> StepPlan | None:
        """Return the plan with the current gradients and learning rates, or None if something else has changed."""
        if not self._same(optimizer):
            return None
        grads = [param.grad for param in self._params]
        if self._sharded:
            grads = [
                None if grad is None else local(grad, param) for grad, param in zip(grads, self._params, strict=True)
            ]
        for grad, kind in zip(grads, self._kinds, strict=True):
            if grad is None or grad.dtype is not kind or grad.layout is not torch.strided or not grad.is_contiguous():
                return None
        if any(param.grad is not None for param in self._idle):
            return None
        if self._current_addresses() != self._addresses:
            return None
        if any(state.get(name) is not value for state, values in self._states for name, value in values):
            return None
        start = 0
        for part, group in zip(self._plan.parts, self._groups, strict=True):
            part.grads = grads[start : start + len(part.params)]  # type: ignore[assignment]  # none of them is None
            part.values = {**part.values, "lr": group["lr"]}
            start += len(part.params)
        return self._plan


def _options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return everything in a group that a step depends on, except the learning rate."""
    own = tuple((name, value) for name, value in group.items() if name not in ("params", "lr"))
    return (*own, len(group["params"]), isinstance(group["lr"], Tensor))


def make_engine(device: torch.device) -> Engine:
    """Return the engine that computes steps on a device."""
    if _KINDS[device.type].package == "numba":
        from upgd.kernels.cpu_step import CpuStep

        return CpuStep()
    from upgd.kernels.cuda_step import CudaStep

    return CudaStep(device)


def _by_dtype(work: Work) -> list[Work]:
    """Split by the dtypes of parameters, gradients and state."""
    columns = [tensors for tensors in (work.params, work.grads, *work.states.values()) if tensors]
    kinds = [tuple(tensor.dtype for tensor in row) for row in zip(*columns, strict=True)]
    if len(set(kinds)) <= 1:
        return [work] if kinds else []

    def some(tensors: list[Any], kind: Any) -> list[Any]:
        return [one for one, own in zip(tensors, kinds, strict=True) if own == kind] if tensors else []

    return [
        replace(
            work,
            owners=some(work.owners, kind),
            params=some(work.params, kind),
            grads=some(work.grads, kind),
            curvatures=some(work.curvatures, kind),
            states={name: some(tensors, kind) for name, tensors in work.states.items()},
            steps=some(work.steps, kind),
            numbers=some(work.numbers, kind),
            scales={name: some(tensors, kind) for name, tensors in work.scales.items()},
        )
        for kind in dict.fromkeys(kinds)
    ]


def _part(work: Work, reductions: Reductions, copies: list[tuple[Tensor, Tensor]]) -> Part:
    method, switches = _variant(work.method)
    general = _traced(method, switches, work.gated)
    rule = _rule(
        method,
        switches,
        work.gated,
        _known(general, work.values),
        work.noise != "none",
        reductions if work.gated else (),
    )

    def whole(tensors: Iterable[Tensor], *, written: bool = False, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return contiguous tensors; copies of tensors that the step writes are copied back after it."""
        made = [tensor.to(dtype or tensor.dtype).contiguous() for tensor in tensors]
        if written:
            copies.extend((old, new) for old, new in zip(tensors, made, strict=True) if new is not old)
        return made

    names = list(rule.state)
    states = [work.states[names[n]] for n in states_of(rule)]
    slots: list[int | None] = [0 if work.rounds and work.params[0].dtype == torch.bfloat16 else None]
    slots += [
        work.slots[names[n]] if tensors[0].dtype in (torch.bfloat16, torch.uint8) else None
        for n, tensors in zip(states_of(rule), states, strict=True)
    ]
    coded = any(tensors[0].dtype == torch.uint8 for tensors in states)
    return Part(
        rule=rule,
        noise=NOISES[work.noise],
        values=work.values,
        sign=work.sign,
        params=whole(work.params, written=True),
        grads=whole(work.grads),
        curvatures=whole(work.curvatures, dtype=torch.float32) if rule.uses("curvature") else [],
        states=[whole(tensors, written=True) for tensors in states],
        steps=work.steps,
        numbers=work.numbers,
        starts=[first_entry(owner) for owner in work.owners] if any(map(is_sharded, work.owners)) else [],
        split=[place for place, owner in enumerate(work.owners) if is_sharded(owner) and owner.ndim < 2],
        slots=tuple(slots) if any(slot is not None for slot in slots) else (),
        scales=[work.scales[names[n]] for n in states_of(rule)] if coded else [],  # type: ignore[misc]  # none is None
    )


def _known(rule: Rule, values: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Return the scalars that remove terms: those that are 0 or 1, unless they depend on the step or the learning rate."""
    known = []
    for n, scalar in enumerate(rule.scalars):
        if not scalar.changes and not re.search(r"\blr\b", scalar.key):
            value = float(scalar.compute(values))
            if value in (0.0, 1.0):
                known.append((n, value))
    return tuple(known)
