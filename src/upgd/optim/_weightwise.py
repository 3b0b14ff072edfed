"""What the weight-wise optimizers share: one step of the rule over parameter groups.

The step has two phases, because the global scale is the largest utility of all parameters: first every utility is traced,
then every weight is updated. Each phase exists twice. ``_trace_plain`` and ``_update_plain`` call :mod:`upgd.rules` tensor
by tensor: they are the truth. ``_trace_foreach`` and ``_update_foreach`` do the same in place, block by block, with what a
block needs still in the cache; tests hold the two together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from upgd import noise, rules
from upgd.optim._arguments import check_curvature, check_group, check_parameter

Result = TypeVar("Result")

# Entries of a block: on the CPU what stays in the cache over the whole phase, on a GPU what bounds temporary memory while
# kernel launches are still few.
_BLOCK_ENTRIES = {"cpu": 1 << 18}
_BLOCK_ENTRIES_ELSEWHERE = 1 << 24


class Curvature(Protocol):
    """Anything that knows the diagonal of the loss's Hessian after ``loss.backward()``, such as :class:`upgd.HesScale`."""

    def diagonal(self, param: Tensor) -> Tensor: ...


@dataclass
class _Work:
    """One parameter group's part in one step: its options, and the tensors of its parameters that have a gradient."""

    options: dict[str, Any]
    c: float
    p: float
    q: float
    params: list[Tensor]
    grads: list[Tensor]
    utilities: list[Tensor]
    previous_noises: list[Tensor]
    steps: list[float | Tensor]
    curvatures: list[Tensor]

    @property
    def sign(self) -> float:
        """Maximizing a loss is minimizing its negative: gradient, curvature and with them utility change their sign."""
        return -1.0 if self.options["maximize"] else 1.0

    def corrections(self) -> list[float | Tensor]:
        """The bias correction 1 − βᵗ of each parameter."""
        return [1 - self.options["beta_utility"] ** step for step in self.steps]


class WeightwiseOptimizer(Optimizer):
    """The torch manners of the weight-wise optimizers. A subclass says which switches of the rule it stands for."""

    #: Does the method estimate utility at all?
    _gated: bool

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        curvature: Curvature | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_curvature(curvature)
        self.curvature = curvature
        self.generator = generator
        super().__init__(params, defaults)

    def _switches(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """The switches c, p, q of :func:`upgd.rules.update`."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                check_parameter(param)
        except TypeError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A checkpoint written before an option existed gets that option's default.
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults of every optimizer that it loads
                    group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own list of what to copy and pickle knows nothing of these two.
        return {**super().__getstate__(), "curvature": self.curvature, "generator": self.generator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; see :meth:`torch.optim.Optimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        # torch casts all state to the parameter's dtype, but the utility of a 16-bit parameter is kept in 32 bits.
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, own, strict=True):
            saved = state_dict["state"].get(saved_id, {}).get("utility")
            if saved is not None and "utility" in self.state[param]:
                self.state[param]["utility"] = saved.to(param.device, _utility_dtype(param))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Result]) -> Result: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Result] | None = None) -> Result | None:
        """Update the parameters once.

        Args:
            closure: evaluates the model again and returns the loss, as for every torch optimizer; optional.
        """
        _capture_health_check(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        work = [self._gather(group) for group in self.param_groups]
        scale: dict[torch.device, Tensor] = {}
        if self._gated:
            maxima = [m for w in work for m in (_trace_foreach(w) if _use_foreach(w) else _trace_plain(w))]
            scale = _global_scales(maxima)
        for w in work:
            noises = [self._draw(param) for param in w.params] if w.options["sigma"] > 0 else []
            (_update_foreach if _use_foreach(w) else _update_plain)(w, scale, noises)
        return loss

    @torch.no_grad()
    def gates(self) -> dict[Tensor, Tensor]:
        """How useful each weight is held to be, parameter → ū in [0, 1]; empty before the first step.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = upgd.UPGD(model.parameters())
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.gates()[model.weight].shape
            torch.Size([2, 3])
        """
        unbiased = {
            param: rules.unbiased(self.state[param]["utility"], group["beta_utility"], self.state[param]["step"].item())
            for group in self.param_groups
            for param in group["params"]
            if self._gated and "utility" in self.state[param] and param.numel()
        }
        scale = _global_scales([u.amax() for u in unbiased.values()])
        local = {p for group in self.param_groups if group.get("scaling") == "local" for p in group["params"]}
        return {
            param: rules.gate(u, rules.local_scale(u) if param in local else scale[u.device])
            for param, u in unbiased.items()
        }

    def _gather(self, group: dict[str, Any]) -> _Work:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        utilities: list[Tensor] = []
        previous_noises: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, grads, utilities, previous_noises, steps)
        # A step count on the host costs nothing to read; one on the device must stay there.
        on_device = group["capturable"] or torch.compiler.is_compiling()
        return _Work(
            group,
            *self._switches(group),
            params,
            grads,
            utilities,
            previous_noises,
            [step if on_device else step.item() for step in steps],
            [self._diagonal(param) for param in params] if self.curvature is not None else [],
        )

    # The name and the way of filling lists are those of torch's optimizers: torch.compile knows this method by its name.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        utilities: list[Tensor],
        previous_noises: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        for param in group["params"]:
            if param.grad is None or param.numel() == 0:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, but a parameter of shape "
                    f"{tuple(param.shape)} has one; build the layer with sparse=False."
                )
            params.append(param)
            grads.append(param.grad)
            state = self.state[param]
            if self._gated:
                if "utility" not in state:
                    where = param.device if group["capturable"] else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=where)
                    state["utility"] = torch.zeros_like(
                        param, dtype=_utility_dtype(param), memory_format=torch.preserve_format
                    )
                utilities.append(state["utility"])
                steps.append(state["step"])
            if group["noise"] == "anticorrelated" and group["sigma"] > 0:
                if "previous_noise" not in state:
                    state["previous_noise"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                previous_noises.append(state["previous_noise"])
        if steps:
            torch._foreach_add_(steps, 1.0)

    def _draw(self, param: Tensor) -> Tensor:
        return noise.white_(torch.empty_like(param, memory_format=torch.preserve_format), self.generator)

    def _diagonal(self, param: Tensor) -> Tensor:
        assert self.curvature is not None
        diagonal = self.curvature.diagonal(param)
        if not isinstance(diagonal, Tensor) or diagonal.shape != param.shape:
            got = f"shape {tuple(diagonal.shape)}" if isinstance(diagonal, Tensor) else repr(diagonal)
            raise ValueError(
                f"curvature.diagonal(param) must give a tensor of the parameter's shape {tuple(param.shape)}, but it gave "
                f"{got}; call loss.backward() before step(), and give the curvature the model that owns the parameter."
            )
        return diagonal


def _capture_health_check(optimizer: Optimizer) -> None:
    """torch's warning for those who capture a step that is not capturable; newer versions have it under a wider name."""
    wider, older = "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"
    getattr(optimizer, wider if hasattr(optimizer, wider) else older)()


def _utility_dtype(param: Tensor) -> torch.dtype:
    """Utilities are small and change slowly: 16 bits would neither hold g·w nor let a trace with β = 0.999 decay."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


def _use_foreach(work: _Work) -> bool:
    if work.options["foreach"] is not None:
        return bool(work.options["foreach"])
    # The compiler does its own blocking, and sharded tensors do their own reductions.
    plain = all(type(param) in (Tensor, torch.nn.Parameter) for param in work.params)
    return plain and not torch.compiler.is_compiling()


def _global_scales(maxima: list[Tensor]) -> dict[torch.device, Tensor]:
    """The largest utility of all parameters, wherever they live, on each of their devices."""
    if not maxima:
        return {}
    dtype = torch.float64 if any(m.dtype == torch.float64 for m in maxima) else torch.float32
    home = maxima[0].device
    scale = rules.global_scale([m.to(home, dtype) for m in maxima])
    return {device: scale.to(device) for device in {m.device for m in maxima}}


# ------------------------------------------------------------------------------------------- tensor by tensor: the truth


def _trace_plain(work: _Work) -> list[Tensor]:
    """Trace the utilities; return the largest of each parameter, unbiased."""
    beta = work.options["beta_utility"]
    maxima = []
    for i, (param, grad, trace) in enumerate(zip(work.params, work.grads, work.utilities, strict=True)):
        curvature = work.curvatures[i].to(trace.dtype) if work.curvatures else None
        utility = work.sign * rules.utility(param.to(trace.dtype), grad.to(trace.dtype), curvature)
        trace.copy_(rules.trace(trace, utility, beta))
        maxima.append(rules.unbiased(trace, beta, work.steps[i]).amax())
    return maxima


def _update_plain(work: _Work, scale: dict[torch.device, Tensor], noises: list[Tensor]) -> None:
    """Update the weights."""
    options = work.options
    for i, (param, grad) in enumerate(zip(work.params, work.grads, strict=True)):
        gate: float | Tensor = 0.0
        if work.utilities:
            utility = rules.unbiased(work.utilities[i], options["beta_utility"], work.steps[i])
            local = options["scaling"] == "local"
            gate = rules.gate(utility, rules.local_scale(utility) if local else scale[param.device].to(utility.dtype))
        xi: float | Tensor = noises[i] if noises else 0.0
        if noises and work.previous_noises:
            xi = noise.anticorrelated(noises[i], work.previous_noises[i])
            work.previous_noises[i].copy_(noises[i])
        wide = _utility_dtype(param)
        new = rules.update(
            param.to(wide),
            work.sign * grad.to(wide),
            gate,
            xi,
            lr=_on(options["lr"], param.device),
            sigma=options["sigma"],
            weight_decay=options["weight_decay"],
            c=work.c,
            p=work.p,
            q=work.q,
        )
        param.copy_(new)


# ------------------------------------------------------------------------------------ block by block, in place: the same


def _blocks(params: list[Tensor], *others: list[Tensor]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Cut the lists, tensor by tensor alike, along their first dimension into blocks that hold about as many entries as
    fit the device; small tensors share a block. Yields the parameters' numbers and the lists of slices. An empty list
    stays empty."""
    limit = _BLOCK_ENTRIES.get(params[0].device.type, _BLOCK_ENTRIES_ELSEWHERE) if params else 0
    numbers: list[int] = []
    lists: list[list[Tensor]] = [[] for _ in range(1 + len(others))]
    filled = 0
    for number, param in enumerate(params):
        rows = param.shape[0] if param.ndim else 1
        at_once = max(1, limit * rows // param.numel())
        for start in range(0, rows, at_once):
            for tensors, slices in zip((params, *others), lists, strict=True):
                if tensors:
                    whole = tensors[number]
                    slices.append(whole if at_once >= rows else whole[start : start + at_once])
            numbers.append(number)
            filled += lists[0][-1].numel()
            if filled >= limit:
                yield numbers, lists
                numbers, lists, filled = [], [[] for _ in lists], 0
    if numbers:
        yield numbers, lists


def _trace_foreach(work: _Work) -> list[Tensor]:
    """Trace the utilities; return the largest of each parameter, unbiased."""
    beta, sign = work.options["beta_utility"], work.sign
    maxima: list[list[Tensor]] = [[] for _ in work.params]
    for numbers, (params, grads, traces, curvatures) in _blocks(
        work.params, work.grads, work.utilities, work.curvatures
    ):
        params, grads = _wide(params, traces), _wide(grads, traces)
        torch._foreach_mul_(traces, beta)
        torch._foreach_addcmul_(traces, grads, params, value=-sign * (1 - beta))
        if curvatures:
            squares = torch._foreach_mul(params, params)
            torch._foreach_addcmul_(traces, _wide(curvatures, traces), squares, value=0.5 * sign * (1 - beta))
        for number, trace in zip(numbers, traces, strict=True):
            maxima[number].append(trace.amax())
    largest = [m[0] if len(m) == 1 else torch.stack(m).amax() for m in maxima]
    return [m / correction for m, correction in zip(largest, work.corrections(), strict=True)]


def _update_foreach(work: _Work, scale: dict[torch.device, Tensor], noises: list[Tensor]) -> None:
    """Update the weights."""
    options, lr = work.options, work.options["lr"]
    scales = _negative_scales(work, scale) if work.utilities else []
    xis = noises
    if noises and work.previous_noises:
        # The last draw's memory holds the difference while it is needed, and then this draw.
        xis = [torch.sub(now, last, out=last) for now, last in zip(noises, work.previous_noises, strict=True)]
    for _, (params, grads, traces, divisors, noise_parts) in _blocks(
        work.params, work.grads, work.utilities, scales, xis
    ):
        useless: list[Tensor] = []
        if traces:
            useless = list(torch._foreach_div(traces, divisors))
            torch._foreach_sigmoid_(useless)  # 1 − sigmoid(x) = sigmoid(−x): the scales are negative
        weights = [p.to(_utility_dtype(p)) for p in params]
        if options["weight_decay"] != 0:
            torch._foreach_mul_(weights, _on(1 - lr * options["weight_decay"], params[0].device))
        if work.c:
            _subtract(weights, work.sign * lr * work.c, _wide(grads, weights), useless if work.p else [])
        if noise_parts:
            _subtract(weights, lr * options["sigma"], _wide(noise_parts, weights), useless if work.q else [])
        if weights[0] is not params[0]:
            torch._foreach_copy_(params, weights)
    if noises and work.previous_noises:
        torch._foreach_copy_(work.previous_noises, noises)


def _negative_scales(work: _Work, scale: dict[torch.device, Tensor]) -> list[Tensor]:
    """What to divide the traces by for the exponent of 1 − ū: −scale, times the bias correction that the traces lack."""
    scales = []
    for trace, correction in zip(work.utilities, work.corrections(), strict=True):
        if work.options["scaling"] == "local":
            divisor = rules.local_scale(trace)  # the norm lacks the same correction
        else:
            divisor = (scale[trace.device].to(trace.dtype) * correction).clamp(min=torch.finfo(trace.dtype).tiny)
        scales.append((-divisor).expand_as(trace))
    return scales


def _subtract(weights: list[Tensor], lr: float | Tensor, terms: list[Tensor], factors: list[Tensor]) -> None:
    """In place: weight − lr·term·factor. ``lr`` may be a tensor, ``factors`` may be empty."""
    if isinstance(lr, Tensor):
        lr = _on(lr, weights[0].device)
        factors = list(torch._foreach_mul(factors, lr)) if factors else [lr] * len(weights)
        torch._foreach_addcmul_(weights, terms, factors, value=-1.0)
    elif factors:
        torch._foreach_addcmul_(weights, terms, factors, value=-lr)
    else:
        torch._foreach_add_(weights, terms, alpha=-lr)


def _wide(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [t.to(other.dtype) for t, other in zip(tensors, like, strict=True)]


@overload
def _on(lr: float, device: torch.device) -> float: ...


@overload
def _on(lr: Tensor, device: torch.device) -> Tensor: ...


def _on(lr: float | Tensor, device: torch.device) -> float | Tensor:
    return lr.to(device) if isinstance(lr, Tensor) else lr
