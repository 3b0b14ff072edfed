"""One step of the weight-wise rule over a parameter group.

The step has two phases, because the global scale is the largest utility of all parameters: first every utility is traced,
then every weight is updated. Each phase exists twice. ``_trace_plain`` and ``_update_plain`` call :mod:`upgd.rules` tensor
by tensor: they are the truth. ``_trace_foreach`` and ``_update_foreach`` do the same in place, block by block, with what a
block needs still in the cache; tests hold the two together.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, overload

import torch
from torch import Tensor

from upgd import noise, rules

# Entries of a block: on the CPU what stays in the cache over the whole phase, on a GPU what bounds temporary memory while
# kernel launches are still few.
_BLOCK_ENTRIES = {"cpu": 1 << 18}
_BLOCK_ENTRIES_ELSEWHERE = 1 << 24


class Kept(Protocol):
    """A tensor in fewer bits; see ``_narrow.py``."""

    def __getitem__(self, rows: slice) -> "Kept": ...
    def wide(self) -> Tensor: ...
    def keep(self, values: Tensor) -> Tensor: ...


def wide(kept: Tensor | Kept) -> Tensor:
    """The tensor to compute with."""
    return kept if isinstance(kept, Tensor) else kept.wide()


def keep(kept: Tensor | Kept, values: Tensor) -> Tensor:
    """Keep new values; return them as they are kept."""
    if not isinstance(kept, Tensor):
        return kept.keep(values)
    return kept if kept is values else kept.copy_(values)


@dataclass
class Work:
    """One parameter group's part in one step: its options, and the tensors of its parameters that have a gradient.

    A list that the method does not need is empty. Of sharded tensors the lists have what this process has, which may be
    empty; ``owners`` are the parameters as the optimizer knows them. State in fewer bits is ``Kept`` and no tensor.
    """

    options: dict[str, Any]
    c: float
    p: float
    q: float
    params: list[Tensor]
    grads: list[Tensor]
    utilities: list[Tensor | Kept]
    exp_avgs: list[Tensor | Kept]
    exp_avg_sqs: list[Tensor | Kept]
    previous_noises: list[Tensor]
    steps: list[float | Tensor]
    curvatures: list[Tensor]
    owners: list[Tensor]
    rounded: list[Tensor | Kept]  #: the parameters, if they are rounded at random
    norms: list[Tensor] = field(default_factory=list)  #: of the utilities' units, where those are sharded

    @property
    def sign(self) -> float:
        """Maximizing a loss is minimizing its negative: gradient, curvature and with them utility change their sign."""
        return -1.0 if self.options["maximize"] else 1.0

    def corrections(self, beta: float) -> list[float | Tensor]:
        """The bias correction 1 − βᵗ of each parameter."""
        return [1 - beta**step for step in self.steps]


def trace(work: Work) -> list[Tensor]:
    """Trace the utilities; return the largest of each parameter, unbiased, in tensors with one or several of them."""
    return _trace_foreach(work) if _use_foreach(work) else _trace_plain(work)


#: Draws the noise of a parameter, which is called by its place in the lists.
Draw = Callable[[int], Tensor]


def update(work: Work, scale: dict[torch.device, Tensor], draw: Draw | None) -> None:
    """Update the weights, with the global scale on each device.

    ``draw`` is called once for each parameter, in order; None stands for no noise. The noise of a parameter is drawn when the
    parameter is updated and released before the next one, so the noise of all parameters is never in memory at once.
    """
    (_update_foreach if _use_foreach(work) else _update_plain)(work, scale, draw)


def utility_dtype(param: Tensor) -> torch.dtype:
    """Utilities are small and change slowly: 16 bits would neither hold g·w nor let a trace with β = 0.999 decay."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


def _use_foreach(work: Work) -> bool:
    if work.options["foreach"] is not None:
        return bool(work.options["foreach"])
    # The compiler does its own blocking.
    return all(map(is_plain, work.params)) and not torch.compiler.is_compiling()


def is_plain(param: Tensor) -> bool:
    """Whether this is a tensor as such, and no subclass with a mind of its own, such as a sharded one."""
    return type(param) in (Tensor, torch.nn.Parameter)


def largest(values: Tensor) -> Tensor:
    """The largest entry; −∞ if there is none, which is so where another process has the whole tensor."""
    return values.amax() if values.numel() else values.new_full((), -torch.inf)


def global_scales(maxima: list[Tensor]) -> dict[torch.device, Tensor]:
    """The largest utility of all parameters, wherever they live, on each of their devices."""
    if not maxima:
        return {}
    dtype = torch.float64 if any(m.dtype == torch.float64 for m in maxima) else torch.float32
    home = maxima[0].device
    # Never less than what every one of their dtypes can hold: a scale that is rounded to zero makes NaN of zero utility.
    tiny = max(torch.finfo(m.dtype).tiny for m in maxima)
    on_home = [m.to(home, dtype) for m in maxima]
    if any(m.ndim for m in on_home):  # as rules.global_scale, for all parameters at once
        together = torch.cat([m.reshape(-1) for m in on_home])
        scale = torch.where(together.isfinite(), together, 0).amax()
    else:
        scale = rules.global_scale(on_home)
    scale = scale.clamp(min=tiny)
    return {device: scale.to(device) for device in {m.device for m in maxima}}


def _local_scale(utility: Tensor) -> Tensor:
    """:func:`upgd.rules.local_scale`, in a form that torch.compile can handle on the CPU.

    Inductor fuses the norm over a unit with the update of its row, and its C++ backend then fails with a KeyError because
    the same loop overwrites both trace and weight (pytorch/pytorch#196570). An operation that it cannot see into prevents
    the fusion.
    """
    if torch.compiler.is_compiling() and utility.device.type == "cpu" and is_plain(utility):
        return cast(Tensor, _opaque_local_scale(utility))
    return rules.local_scale(utility)


@torch.library.custom_op("upgd::local_scale", mutates_args=())
def _opaque_local_scale(utility: Tensor) -> Tensor:
    return rules.local_scale(utility)


_opaque_local_scale.register_fake(rules.local_scale)


# ------------------------------------------------------------------------------------------- tensor by tensor: the truth


def _trace_plain(work: Work) -> list[Tensor]:
    beta = work.options["beta_utility"]
    maxima = []
    for i, (param, grad, kept) in enumerate(zip(work.params, work.grads, work.utilities, strict=True)):
        trace = wide(kept)
        curvature = work.curvatures[i].to(trace.dtype) if work.curvatures else None
        utility = work.sign * rules.utility(param.to(trace.dtype), grad.to(trace.dtype), curvature)
        trace = keep(kept, rules.trace(trace, utility, beta))
        maxima.append(largest(rules.unbiased(trace, beta, work.steps[i])))
    return maxima


def _update_plain(work: Work, scale: dict[torch.device, Tensor], draw: Draw | None) -> None:
    options = work.options
    for i, (param, grad) in enumerate(zip(work.params, work.grads, strict=True)):
        gate: float | Tensor = 0.0
        if work.utilities:
            utility = rules.unbiased(wide(work.utilities[i]), options["beta_utility"], work.steps[i])
            if work.norms:
                of_units = rules.unbiased(work.norms[i], options["beta_utility"], work.steps[i])
            elif options["scaling"] == "local":
                of_units = _local_scale(utility)
            else:
                of_units = scale[param.device].to(utility.dtype)
            gate = rules.gate(utility, of_units)
        xi: float | Tensor = 0.0
        if draw is not None:
            xi = draw(i)
            if work.previous_noises:
                drawn, xi = xi, noise.anticorrelated(xi, work.previous_noises[i])
                work.previous_noises[i].copy_(drawn)
                del drawn
        dtype = utility_dtype(param)
        descent = work.sign * grad.to(dtype)
        new = rules.update(
            param.to(dtype),
            _adam_plain(work, i, descent) if work.exp_avgs else descent,
            gate,
            xi,
            lr=on(options["lr"], param.device),
            sigma=options["sigma"],
            weight_decay=options["weight_decay"],
            c=work.c,
            p=work.p,
            q=work.q,
        )
        keep(work.rounded[i] if work.rounded else param, new)
        del xi, new  # before the next parameter's are made


def _adam_plain(work: Work, i: int, grad: Tensor) -> Tensor:
    """Carry on the averages of the gradient and of its square; return Adam's direction m̂ / (√v̂ + ε)."""
    beta1, beta2 = work.options["betas"]
    step = work.steps[i]
    first = keep(work.exp_avgs[i], rules.trace(wide(work.exp_avgs[i]), grad, beta1))
    second = keep(work.exp_avg_sqs[i], rules.trace(wide(work.exp_avg_sqs[i]), grad**2, beta2))
    eps: float = work.options["eps"]
    return rules.unbiased(first, beta1, step) / (rules.unbiased(second, beta2, step).sqrt() + eps)


# ------------------------------------------------------------------------------------ block by block, in place: the same


class _Noises(Sequence[Tensor]):
    """The noise of each parameter, drawn when it is asked for. Holds the last one only; ask in order."""

    def __init__(self, params: list[Tensor], draw: Draw | None) -> None:
        self._count, self._draw = len(params), draw
        self._number, self._last = -1, torch.empty(0)

    def __len__(self) -> int:
        return 0 if self._draw is None else self._count

    def __getitem__(self, number: Any) -> Any:
        if number != self._number:
            assert self._draw is not None
            del self._last  # before the next one is made
            self._number, self._last = number, self._draw(number)
        return self._last


def _blocks(params: list[Tensor], *others: Sequence[Any]) -> Iterator[tuple[list[int], list[list[Any]]]]:
    """Cut the lists, tensor by tensor alike, along their first dimension into blocks that hold as many entries as fit the
    device, or a single row; small tensors share a block. Yields the parameters' numbers and the lists of slices, which the
    caller must not keep. An empty list stays empty."""
    limit = _BLOCK_ENTRIES.get(params[0].device.type, _BLOCK_ENTRIES_ELSEWHERE) if params else 0
    # The compiler warns of the cache, and does without.
    cuts = _cuts.__wrapped__ if torch.compiler.is_compiling() else _cuts
    for block in cuts(tuple(param.shape for param in params), limit):
        lists = [
            [tensors[n] if rows is None else tensors[n][rows] for n, rows in block] if tensors else []
            for tensors in (params, *others)
        ]
        yield [number for number, _ in block], lists
        del lists


@functools.lru_cache(maxsize=64)
def _cuts(shapes: tuple[torch.Size, ...], limit: int) -> list[list[tuple[int, slice | None]]]:
    """The blocks of :func:`_blocks`: numbers of tensors, and which rows of each; None stands for all."""
    blocks: list[list[tuple[int, slice | None]]] = []
    filled, last = 0, 0
    for number, shape in enumerate(shapes):
        rows, size = shape[0] if shape else 1, shape.numel()
        if not size:
            continue
        at_once = max(1, limit * rows // size)
        for start in range(0, rows, at_once):
            entries = min(at_once, rows - start) * (size // rows)
            # A slice of a large tensor keeps all of its noise in memory, so it shares no block with another tensor.
            joins = bool(blocks) and (number == blocks[-1][-1][0] or max(size, last) <= limit)
            if not joins or filled + entries > limit:
                blocks.append([])
                filled = 0
            blocks[-1].append((number, None if at_once >= rows else slice(start, start + at_once)))
            filled += entries
        last = size
    return blocks


def _trace_foreach(work: Work) -> list[Tensor]:
    beta, sign = work.options["beta_utility"], work.sign
    maxima: list[list[Tensor]] = [[] for _ in work.params]
    for numbers, (params, grads, kept, curvatures) in _blocks(work.params, work.grads, work.utilities, work.curvatures):
        traces = [wide(one) for one in kept]
        params, grads = _wide(params, traces), _wide(grads, traces)
        torch._foreach_mul_(traces, beta)
        torch._foreach_addcmul_(traces, grads, params, value=-sign * (1 - beta))
        if curvatures:
            squares = torch._foreach_mul(params, params)
            torch._foreach_addcmul_(traces, _wide(curvatures, traces), squares, value=0.5 * sign * (1 - beta))
        traces = [keep(one, trace) for one, trace in zip(kept, traces, strict=True)]
        for number, found in zip(numbers, _maxima(traces), strict=True):
            maxima[number].append(found)
    each = [
        m[0] if len(m) == 1 else torch.stack(m).amax() if m else largest(wide(trace))
        for m, trace in zip(maxima, work.utilities, strict=True)
    ]
    corrections = work.corrections(beta)
    if len({m.dtype for m in each}) == len({m.device for m in each}) == 1 and _all_equal(corrections):
        return [torch.stack(each) / corrections[0]]
    return [m / correction for m, correction in zip(each, corrections, strict=True)]


def _maxima(tensors: list[Tensor]) -> list[Tensor]:
    """The largest entry of each tensor; on a GPU in one launch."""
    if tensors[0].device.type == "cpu" or len({t.dtype for t in tensors}) > 1:
        return [tensor.amax() for tensor in tensors]
    return list(torch._foreach_max(tensors))


def _all_equal(values: Sequence[float | Tensor]) -> bool:
    """Whether all are the same number; tensors are not looked at."""
    return all(not isinstance(value, Tensor) and value == values[0] for value in values)


def _update_foreach(work: Work, scale: dict[torch.device, Tensor], draw: Draw | None) -> None:
    scales = _negative_scales(work, scale) if work.utilities else []
    local = work.options.get("scaling") == "local"
    noises = _Noises(work.params, draw)
    previous = [] if draw is None else work.previous_noises
    sizes = _adam_sizes(work)
    for numbers, tensors in _blocks(
        work.params,
        work.grads,
        work.utilities,
        scales if local else [],
        noises,
        previous,
        work.exp_avgs,
        work.exp_avg_sqs,
        work.rounded,
    ):
        if scales and not local:
            tensors[3] = [scales[n] for n in numbers]
        _update_block(work, [sizes[n] for n in numbers] if sizes else [], *tensors)
        del tensors


def _update_block(
    work: Work,
    sizes: list[tuple[Any, Any]],
    params: list[Tensor],
    grads: list[Tensor],
    traces: list[Tensor | Kept],
    scales: list[Tensor],
    noises: list[Tensor],
    previous_noises: list[Tensor],
    firsts: list[Tensor | Kept],
    seconds: list[Tensor | Kept],
    rounded: list[Tensor | Kept],
) -> None:
    options, lr = work.options, work.options["lr"]
    if previous_noises:
        drawn, noises = noises, list(torch._foreach_sub(noises, previous_noises))
        torch._foreach_copy_(previous_noises, drawn)
    useless: list[Tensor] = []
    if traces:
        # One scale for all tensors is one number on the device, and its kernel needs no list of them.
        utilities = [wide(trace) for trace in traces]
        common = scales[0].ndim == 0 and all(scale is scales[0] for scale in scales)
        useless = list(torch._foreach_div(utilities, scales[0] if common else _expanded(scales, utilities)))
        torch._foreach_sigmoid_(useless)  # 1 − sigmoid(x) = sigmoid(−x): the scales are negative
    weights = [p if (dtype := utility_dtype(p)) is p.dtype else p.to(dtype) for p in params]
    moved, rate = weights, lr
    if options["weight_decay"] != 0:  # it is added to the rest of the step; see rules.update
        moved, rate = list(torch._foreach_mul(weights, -options["weight_decay"])), 1.0
    if noises:
        _subtract(moved, rate * options["sigma"], _wide(noises, weights), useless if work.q else [])
    if firsts:
        averages, squares = _average(work, grads, firsts, seconds)
        _subtract(moved, rate, averages, _adam_factors(sizes, squares, useless if work.p else []))
    elif work.c:
        _subtract(moved, work.sign * rate * work.c, _wide(grads, weights), useless if work.p else [])
    if moved is not weights:
        _subtract(weights, -lr, moved, [])
    if rounded:
        for one, weight in zip(rounded, weights, strict=True):
            keep(one, weight)
        return
    narrow = [(param, weight) for param, weight in zip(params, weights, strict=True) if weight is not param]
    if narrow:
        torch._foreach_copy_([param for param, _ in narrow], [weight for _, weight in narrow])


def _average(
    work: Work, grads: list[Tensor], kept_firsts: list[Tensor | Kept], kept_seconds: list[Tensor | Kept]
) -> tuple[list[Tensor], list[Tensor]]:
    """Carry on the averages of the gradient and of its square, and return them."""
    beta1, beta2 = work.options["betas"]
    firsts, seconds = [wide(one) for one in kept_firsts], [wide(one) for one in kept_seconds]
    grads = _wide(grads, firsts)
    if work.sign < 0:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, value=1 - beta2)
    return (
        [keep(kept, first) for kept, first in zip(kept_firsts, firsts, strict=True)],
        [keep(kept, second) for kept, second in zip(kept_seconds, seconds, strict=True)],
    )


def _adam_sizes(work: Work) -> list[tuple[Any, Any]]:
    """For each parameter the a and b that make m / (a·√v + b) of m̂ / (√v̂ + ε): the bias corrections are in them."""
    if not work.exp_avgs:
        return []
    first, second = (work.corrections(beta) for beta in work.options["betas"])
    return [(one / two**0.5, one * work.options["eps"]) for one, two in zip(first, second, strict=True)]


def _adam_factors(sizes: list[tuple[Any, Any]], seconds: list[Tensor], useless: list[Tensor]) -> list[Tensor]:
    """What the average of the gradient is multiplied by: 1 / (a·√v + b), times 1 − ū if that is given."""
    divisors = torch._foreach_sqrt(seconds)
    torch._foreach_mul_(divisors, [a for a, _ in sizes])
    torch._foreach_add_(divisors, [b for _, b in sizes])
    if useless:
        torch._foreach_div_(useless, divisors)
        return useless
    torch._foreach_reciprocal_(divisors)
    return list(divisors)


def _negative_scales(work: Work, scale: dict[torch.device, Tensor]) -> list[Tensor]:
    """What to divide the traces by for the exponent of 1 − ū: −scale, times the bias correction that the traces lack."""
    if work.norms or work.options["scaling"] == "local":
        # The norm lacks the same correction; so does its floor, which is no matter.
        norms = work.norms or [_local_scale(wide(trace)) for trace in work.utilities]
        return [(-norm).expand_as(param) for norm, param in zip(norms, work.params, strict=True)]
    known: dict[Any, Tensor] = {}  # parameters that have taken as many steps share a scale
    scales = []
    for param, correction in zip(work.params, work.corrections(work.options["beta_utility"]), strict=True):
        dtype = utility_dtype(param)
        key = param.device, dtype, id(correction) if isinstance(correction, Tensor) else correction
        if key not in known:
            known[key] = -(scale[param.device].to(dtype) * correction).clamp(min=torch.finfo(dtype).tiny)
        scales.append(known[key])
    return scales


def _expanded(scales: list[Tensor], traces: list[Tensor]) -> list[Tensor]:
    return [scale.expand_as(trace) for scale, trace in zip(scales, traces, strict=True)]


def _subtract(weights: list[Tensor], lr: float | Tensor, terms: list[Tensor], factors: list[Tensor]) -> None:
    """In place: weight − lr·term·factor. ``lr`` may be a tensor, ``factors`` may be empty."""
    if isinstance(lr, Tensor):
        lr = on(lr, weights[0].device)
        factors = list(torch._foreach_mul(factors, lr)) if factors else [lr] * len(weights)
        torch._foreach_addcmul_(weights, terms, factors, value=-1.0)
    elif factors:
        torch._foreach_addcmul_(weights, terms, factors, value=-lr)
    else:
        torch._foreach_add_(weights, terms, alpha=-lr)


def _wide(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [t if t.dtype is other.dtype else t.to(other.dtype) for t, other in zip(tensors, like, strict=True)]


@overload
def on(lr: float, device: torch.device) -> float: ...


@overload
def on(lr: Tensor, device: torch.device) -> Tensor: ...


def on(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """The learning rate where it is needed; a tensor without dimensions, if it is one."""
    return lr.to(device).reshape(()) if isinstance(lr, Tensor) else lr
