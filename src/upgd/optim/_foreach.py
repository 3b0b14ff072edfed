"""The foreach implementation of a step: the phases of ``_phases.py``, in place, on many tensors at once.

The tensors are processed in blocks. On the CPU, a block stays in the cache for the whole phase. On other devices, blocks only
limit the memory of temporaries, and there are as few blocks as possible, because every block launches all kernels.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from upgd.optim._phases import Draw, Kept, Work, keep, largest, local_scale, on, utility_dtype, wide

__all__ = ["trace", "update"]

#: Number of entries of a block, by device.
_BLOCK_ENTRIES = {"cpu": 1 << 18}
#: On other devices, all temporaries together have the size of the largest parameter, and a block has at least this many
#: entries.
_LEAST_BLOCK_ENTRIES = 1 << 21


def trace(work: Work) -> list[Tensor]:
    """See :func:`upgd.optim._phases.trace`."""
    beta, sign = work.options["beta_utility"], work.sign
    maxima: list[list[Tensor]] = [[] for _ in work.params]
    exact = all(
        isinstance(kept, Tensor) and kept.dtype is param.dtype is grad.dtype
        for kept, param, grad in zip(work.utilities, work.params, work.grads, strict=True)
    )
    limit = _block_entries(work.params, temporaries=bool(work.curvatures) + (0 if exact else 4))
    for numbers, (params, grads, kept, curvatures) in _blocks(
        limit, work.params, work.grads, work.utilities, work.curvatures
    ):
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


def update(work: Work, scale: dict[torch.device, Tensor], draw: Draw | None) -> None:
    """See :func:`upgd.optim._phases.update`."""
    scales = _negative_scales(work, scale) if work.utilities else []
    local = work.options.get("scaling") == "local"
    noises = _Noises(work.params, draw)
    previous = [] if draw is None else work.previous_noises
    sizes = _adam_sizes(work)
    limit = _block_entries(work.params, temporaries=_temporaries(work, draw is not None))
    for numbers, tensors in _blocks(
        limit,
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


# ---------------------------------------------------------------------------------------------------------------- blocks


def _block_entries(params: list[Tensor], temporaries: int) -> int:
    """Return the number of entries of a block, for a phase with this number of temporaries of the size of a block."""
    if not params:
        return 0
    if (fixed := _BLOCK_ENTRIES.get(params[0].device.type)) is not None:
        return fixed
    if not temporaries:
        return sys.maxsize
    return max(_LEAST_BLOCK_ENTRIES, max(param.numel() for param in params) // temporaries)


def _temporaries(work: Work, noise: bool) -> int:
    """Return the maximum number of temporaries that :func:`_update_block` needs."""
    narrow = any(utility_dtype(param) is not param.dtype for param in work.params) or bool(work.rounded)
    count = bool(work.utilities) + bool(work.options["weight_decay"]) + 2 * bool(work.exp_avgs) + 3 * narrow
    count += 2 * any(not isinstance(kept, Tensor) for kept in (*work.utilities, *work.exp_avgs))
    count += bool(noise and work.previous_noises) + isinstance(work.options["lr"], Tensor)
    # The noise of the largest parameter is itself a temporary of that size, so the others should be small.
    return 16 * max(count, 1) if noise else count


class _Noises(Sequence[Tensor]):
    """The noise of each parameter, drawn on first access. Only the last one is kept, so access them in order."""

    def __init__(self, params: list[Tensor], draw: Draw | None) -> None:
        self._count, self._draw = len(params), draw
        self._number, self._last = -1, torch.empty(0)

    def __len__(self) -> int:
        return 0 if self._draw is None else self._count

    def __getitem__(self, number: Any) -> Any:
        if number != self._number:
            assert self._draw is not None
            del self._last  # free the memory first
            self._number, self._last = number, self._draw(number)
        return self._last


def _blocks(limit: int, params: list[Tensor], *others: Sequence[Any]) -> Iterator[tuple[list[int], list[list[Any]]]]:
    """Split lists of tensors into blocks of at most ``limit`` entries, or of one row if rows are longer.

    Large tensors are split along the first dimension, and small ones share a block. Yields the indices of the parameters in
    a block and the lists of slices, which the caller must not keep. An empty list stays empty.
    """
    # torch.compile cannot trace the cache.
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
    """Return the blocks of :func:`_blocks`: indices of tensors, and the rows of each; None means all."""
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


def _maxima(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest entry of each tensor; on a GPU in one launch."""
    if tensors[0].device.type == "cpu" or len({t.dtype for t in tensors}) > 1:
        return [tensor.amax() for tensor in tensors]
    return list(torch._foreach_max(tensors))


def _all_equal(values: Sequence[float | Tensor]) -> bool:
    """Return whether all values are the same number; False for tensors, which may be on a device."""
    return all(not isinstance(value, Tensor) and value == values[0] for value in values)


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
        # If all tensors share the scale, the kernel takes it as a single number.
        utilities = [wide(trace) for trace in traces]
        common = scales[0].ndim == 0 and all(scale is scales[0] for scale in scales)
        useless = list(torch._foreach_div(utilities, scales[0] if common else _expanded(scales, utilities)))
        torch._foreach_sigmoid_(useless)  # 1 − sigmoid(x) = sigmoid(−x), and the scales are negative
    weights = [p if (dtype := utility_dtype(p)) is p.dtype else p.to(dtype) for p in params]
    moved, rate = weights, lr
    if options["weight_decay"] != 0:  # added to the rest of the step; see rules.update
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
    """Update the averages of the gradient and of its square, and return them."""
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
    """Return a and b of each parameter such that m̂ / (√v̂ + ε) = m / (a·√v + b), which includes the bias corrections."""
    if not work.exp_avgs:
        return []
    first, second = (work.corrections(beta) for beta in work.options["betas"])
    return [(one / two**0.5, one * work.options["eps"]) for one, two in zip(first, second, strict=True)]


def _adam_factors(sizes: list[tuple[Any, Any]], seconds: list[Tensor], useless: list[Tensor]) -> list[Tensor]:
    """Return the factors of the averaged gradients: 1 / (a·√v + b), times 1 − ū if it is given."""
    divisors = torch._foreach_sqrt(seconds)
    torch._foreach_mul_(divisors, [a for a, _ in sizes])
    torch._foreach_add_(divisors, [b for _, b in sizes])
    if useless:
        torch._foreach_div_(useless, divisors)
        return useless
    torch._foreach_reciprocal_(divisors)
    return list(divisors)


def _negative_scales(work: Work, scale: dict[torch.device, Tensor]) -> list[Tensor]:
    """Return the divisors of the traces in the exponent of 1 − ū: −scale times the bias correction, which traces omit."""
    if work.norms or work.options["scaling"] == "local":
        # The norm is that of the traces, so the correction cancels.
        norms = work.norms or [local_scale(wide(trace)) for trace in work.utilities]
        return [(-norm).expand_as(param) for norm, param in zip(norms, work.params, strict=True)]
    known: dict[Any, Tensor] = {}  # parameters with the same number of steps share a scale
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
    """Compute weight − lr·term·factor in place. ``lr`` may be a tensor; ``factors`` default to 1."""
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
