"""The fused implementation: the whole step in one or two passes, by kernels that are made from the method's rule.

On a GPU they are Triton's, on the CPU numba's. Here the optimizers' groups become what the kernels work on.
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
from upgd.methods import Method
from upgd.methods.tracing import CannotTrace, Rule, traced
from upgd.optim._phases import is_plain

__all__ = ["NOISES", "Fused", "Repeated", "StepPlan", "Work", "reason_against"]

NOISES = {"none": 0, "white": 1, "anticorrelated": 2}
_TYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
_PACKAGES = {"cpu": "numba", "cuda": "triton"}


@dataclass
class Work:
    """One parameter group's part in a step, as the optimizer knows it; lists have an entry for each parameter.

    Attributes:
        method: in the variant that the group's options choose.
        gated: whether the first phase runs.
        noise: ``"none"``, ``"white"`` or ``"anticorrelated"``.
        values: the numbers that the rule finds in ``h``.
        sign: −1 to maximize.
        states: the tensors of each state by its name in the rule.
    """

    method: Method
    gated: bool
    noise: str
    values: Mapping[str, Any]
    sign: float
    params: list[Tensor]
    grads: list[Tensor]
    curvatures: list[Tensor]
    states: Mapping[str, list[Tensor]]
    steps: list[Tensor]
    numbers: list[int]


def reason_against(params: Iterable[Tensor], methods: Iterable[tuple[Method, bool]]) -> str | None:
    """Why the fused implementation cannot take a step, a clause that goes on after "because"; None if it can.

    Args:
        params: all parameters.
        methods: the method of each group, and whether it is gated.
    """
    devices = set()
    for param in params:
        if not is_plain(param):
            return f"a parameter is a {type(param).__name__}"
        devices.add(param.device)
        if param.dtype not in _TYPES.get(param.device.type, ()):
            return f"a parameter is {param.dtype} on {param.device}"
    if len(devices) != 1:
        return "the parameters are on several devices" if devices else "there are no parameters"
    package = _PACKAGES[devices.pop().type]
    if not _installed(package):
        return f"it needs {package}, which is not installed"
    for method, gated in methods:
        reason = _untraceable(*_variant(method), gated)
        if reason is not None:
            return reason
    return None


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _variant(method: Method) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """A method's class and the switches that choose a variant of it, to be remembered by."""
    switches = ((name, getattr(method, name)) for name, setting in method.settings.items() if setting.is_switch)
    return type(method), tuple(switches)


@functools.cache
def _traced(method: Any, switches: tuple[tuple[str, Any], ...], gated: bool) -> Rule:
    return traced(method(**dict(switches)), gated=gated)


@functools.cache
def _untraceable(method: Any, switches: tuple[tuple[str, Any], ...], gated: bool) -> str | None:
    from upgd.kernels.cuda_step import check

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
    """The rule of a group, with some scalars known and its reductions numbered as those of the step."""
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
        """What a step needs; None if no parameter has a gradient."""
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
    """A step that can be taken, again if nothing but gradients and the learning rate changes.

    Attributes:
        copies: tensors that do not lie in one piece, and what the step changes in their place.
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
    ) -> None:
        """Take the step; see :meth:`upgd.kernels.steps.Engine.step` and :meth:`upgd.kernels.cuda_step.CudaStep.step`."""
        early = {} if changed is None else {"changed": changed}
        self.engine.step(
            self.parts,
            self.reductions,
            seed,
            grad_scale=grad_scale,
            found_inf=found_inf,
            everywhere=everywhere,
            **early,
        )
        for original, copy in self.copies:
            original.copy_(copy)
        # Autograd shall notice that parameters changed, as it does where torch changes them.
        torch.autograd.graph.increment_version([param for work in self.works for param in work.params])


class Repeated:
    """Recognises, at little cost, that a step is like the one before, of which it has the plan.

    It also lets the first phase of the next step run early, tensor by tensor, while the backward pass goes on.
    """

    def __init__(self, optimizer: Optimizer, plan: StepPlan) -> None:
        self._plan, self._state, self._count = plan, optimizer.state, len(optimizer.state)
        self._options = [_options(group) for group in optimizer.param_groups]
        self._params = [param for part in plan.parts for param in part.params]
        own = set(self._params)
        self._idle = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        self._addresses = [param.data_ptr() for param in self._params]
        self._kinds = [grad.dtype for part in plan.parts for grad in part.grads]
        groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        self._groups = [groups[part.params[0]] for part in plan.parts]
        self._places = {
            param: (number, place)
            for number, part in enumerate(plan.parts)
            for place, param in enumerate(part.params)
            if part.rule.reductions
        }
        #: What was observed early: gradients with their versions and those of the parameters.
        self._seen: dict[Tensor, tuple[Tensor, int, int]] = {}
        self._states = [
            (optimizer.state[param], list(optimizer.state[param].items()))
            for param in self._params
            if param in optimizer.state
        ]

    @staticmethod
    def possible(plan: StepPlan) -> bool:
        """Whether nothing else changes from step to step."""
        return not plan.copies and not any(part.curvatures for part in plan.parts)

    def observe(self, optimizer: Optimizer, param: Tensor) -> None:
        """Run the first phase for a parameter whose gradient has been accumulated, if the next step can use that."""
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
        """What has changed since it was observed, by part and place; None if it is all or most."""
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
        """The plan with the present gradients and learning rates, or None if something else is not as it was."""
        if not self._same(optimizer):
            return None
        grads = [param.grad for param in self._params]
        for grad, kind in zip(grads, self._kinds, strict=True):
            if grad is None or grad.dtype is not kind or grad.layout is not torch.strided or not grad.is_contiguous():
                return None
        if any(param.grad is not None for param in self._idle):
            return None
        if [param.data_ptr() for param in self._params] != self._addresses:
            return None
        if any(state.get(name) is not value for state, values in self._states for name, value in values):
            return None
        start = 0
        for part, group in zip(self._plan.parts, self._groups, strict=True):
            part.grads = grads[start : start + len(part.params)]  # type: ignore[assignment]  # there is no None
            part.values = {**part.values, "lr": group["lr"]}
            start += len(part.params)
        return self._plan


def _options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything in a group that decides what a step is, but the learning rate."""
    own = tuple((name, value) for name, value in group.items() if name not in ("params", "lr"))
    return (*own, len(group["params"]), isinstance(group["lr"], Tensor))


def make_engine(device: torch.device) -> Engine:
    """What computes steps on a device."""
    if device.type == "cpu":
        from upgd.kernels.cpu_step import CpuStep

        return CpuStep()
    from upgd.kernels.cuda_step import CudaStep

    return CudaStep(device)


def _by_dtype(work: Work) -> list[Work]:
    """The same in pieces whose parameters and gradients have one type each."""
    kinds = [(param.dtype, grad.dtype) for param, grad in zip(work.params, work.grads, strict=True)]
    if len(set(kinds)) <= 1:
        return [work] if kinds else []

    def some(tensors: list[Any], kind: Any) -> list[Any]:
        return [one for one, own in zip(tensors, kinds, strict=True) if own == kind] if tensors else []

    return [
        replace(
            work,
            params=some(work.params, kind),
            grads=some(work.grads, kind),
            curvatures=some(work.curvatures, kind),
            states={name: some(tensors, kind) for name, tensors in work.states.items()},
            steps=some(work.steps, kind),
            numbers=some(work.numbers, kind),
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
        """The tensors in one piece each; what is written to a copy is taken back after the step."""
        made = [tensor.to(dtype or tensor.dtype).contiguous() for tensor in tensors]
        if written:
            copies.extend((old, new) for old, new in zip(tensors, made, strict=True) if new is not old)
        return made

    names = list(rule.state)
    return Part(
        rule=rule,
        noise=NOISES[work.noise],
        values=work.values,
        sign=work.sign,
        params=whole(work.params, written=True),
        grads=whole(work.grads),
        curvatures=whole(work.curvatures, dtype=torch.float32) if rule.uses("curvature") else [],
        states=[whole(work.states[names[n]], written=True) for n in states_of(rule)],
        steps=work.steps,
        numbers=work.numbers,
    )


def _known(rule: Rule, values: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """The scalars that make terms vanish: those that are 0 or 1, unless they follow the step or the learning rate."""
    known = []
    for n, scalar in enumerate(rule.scalars):
        if not scalar.changes and not re.search(r"\blr\b", scalar.key):
            value = float(scalar.compute(values))
            if value in (0.0, 1.0):
                known.append((n, value))
    return tuple(known)
