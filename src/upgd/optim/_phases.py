"""One step of a weight-wise optimizer: its inputs, and the implementation that defines the result.

A step has two phases, because the global scale is the largest utility of all parameters: :func:`trace` updates all utilities,
then :func:`update` updates all weights. Each phase has two implementations. The one in this module calls :mod:`upgd.rules`
tensor by tensor and is the reference. The one in ``_foreach.py`` works in place on many tensors at once. Fused steps are in
``_fused.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, overload

import torch
from torch import Tensor

from upgd import noise, rules


class Kept(Protocol):
    """A tensor stored with fewer bits; see ``_narrow.py``."""

    def __getitem__(self, rows: slice) -> "Kept": ...
    def wide(self) -> Tensor: ...
    def keep(self, values: Tensor) -> Tensor: ...


def wide(kept: Tensor | Kept) -> Tensor:
    """Return the values in the dtype of the computation."""
    return kept if isinstance(kept, Tensor) else kept.wide()


def keep(kept: Tensor | Kept, values: Tensor) -> Tensor:
    """Store new values; return them as stored."""
    if not isinstance(kept, Tensor):
        return kept.keep(values)
    return kept if kept is values else kept.copy_(values)


@dataclass
class Work:
    """The inputs of one step for one parameter group: options, and the tensors of all parameters that have a gradient.

    Lists that the method does not need are empty. For sharded parameters, the lists contain the local shards, which may have
    no entries.
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
    owners: list[Tensor]  #: the parameters of the optimizer, which ``params`` may be shards of
    rounded: list[Tensor | Kept]  #: the parameters, if they are rounded stochastically
    norms: list[Tensor] = field(default_factory=list)  #: of the units' utilities, for sharded units

    @property
    def sign(self) -> float:
        """−1 to maximize: gradient, curvature and utility change their sign."""
        return -1.0 if self.options["maximize"] else 1.0

    def corrections(self, beta: float) -> list[float | Tensor]:
        """Return the bias correction 1 − βᵗ of each parameter."""
        known: dict[float, float] = {}
        for step in self.steps:
            if not isinstance(step, Tensor) and step not in known:
                known[step] = 1 - beta**step
        return [1 - beta**step if isinstance(step, Tensor) else known[step] for step in self.steps]


#: Draws the noise of a parameter, given its index in the lists.
Draw = Callable[[int], Tensor]


def utility_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: 32 bits for 16-bit parameters, in which a trace with β = 0.999 would stop
    changing."""
    dtype = param.dtype
    return torch.float32 if dtype is torch.bfloat16 or dtype is torch.float16 else dtype


def use_foreach(work: Work) -> bool:
    """Return whether the foreach implementation is used."""
    if work.options["foreach"] is not None:
        return bool(work.options["foreach"])
    # The compiler fuses operations by itself.
    return all(map(is_plain, work.params)) and not torch.compiler.is_compiling()


def is_plain(param: Tensor) -> bool:
    """Return whether this is an ordinary tensor and not of a subclass, such as a sharded one."""
    return type(param) in (Tensor, torch.nn.Parameter)


def largest(values: Tensor) -> Tensor:
    """Return the largest entry, or −∞ if there is none, as in an empty shard."""
    return values.amax() if values.numel() else values.new_full((), -torch.inf)


def global_scales(maxima: list[Tensor]) -> dict[torch.device, Tensor]:
    """Return the largest utility of all parameters on each of their devices."""
    if not maxima:
        return {}
    dtype = torch.float64 if any(m.dtype == torch.float64 for m in maxima) else torch.float32
    home = maxima[0].device
    # At least the smallest normal number of every dtype: a scale rounded to zero would give 0 / 0 for utilities of zero.
    tiny = max(torch.finfo(m.dtype).tiny for m in maxima)
    on_home = [m.to(home, dtype) for m in maxima]
    if any(m.ndim for m in on_home):  # as rules.global_scale, for all parameters at once
        together = torch.cat([m.reshape(-1) for m in on_home])
        scale = torch.where(together.isfinite(), together, 0).amax()
    else:
        scale = rules.global_scale(on_home)
    scale = scale.clamp(min=tiny)
    return {device: scale.to(device) for device in {m.device for m in maxima}}


def local_scale(utility: Tensor) -> Tensor:
    """:func:`upgd.rules.local_scale`, in a form that torch.compile can handle on the CPU.

    Inductor fuses the norm over a unit with the update of its row, and its C++ backend then fails with a KeyError because
    the same loop overwrites both trace and weight (pytorch/pytorch#196570). A custom operation prevents the fusion.
    """
    if torch.compiler.is_compiling() and utility.device.type == "cpu" and is_plain(utility):
        return cast(Tensor, _opaque_local_scale(utility))
    return rules.local_scale(utility)


@torch.library.custom_op("upgd::local_scale", mutates_args=())
def _opaque_local_scale(utility: Tensor) -> Tensor:
    return rules.local_scale(utility)


_opaque_local_scale.register_fake(rules.local_scale)


def trace(work: Work) -> list[Tensor]:
    """Update the utilities; return the largest unbiased utility of each parameter, in tensors of one or more elements."""
    beta = work.options["beta_utility"]
    maxima = []
    for i, (param, grad, kept) in enumerate(zip(work.params, work.grads, work.utilities, strict=True)):
        old = wide(kept)
        curvature = work.curvatures[i].to(old.dtype) if work.curvatures else None
        utility = work.sign * rules.utility(param.to(old.dtype), grad.to(old.dtype), curvature)
        new = keep(kept, rules.trace(old, utility, beta))
        maxima.append(largest(rules.unbiased(new, beta, work.steps[i])))
    return maxima


def update(work: Work, scale: dict[torch.device, Tensor], draw: Draw | None) -> None:
    """Update the weights.

    Args:
        work: the inputs.
        scale: the global scale on each device.
        draw: called once for each parameter, in order; None if there is no noise. The noise of a parameter is released
            before that of the next one is drawn, so the noise of all parameters is never in memory at once.
    """
    options = work.options
    for i, (param, grad) in enumerate(zip(work.params, work.grads, strict=True)):
        gate: float | Tensor = 0.0
        if work.utilities:
            utility = rules.unbiased(wide(work.utilities[i]), options["beta_utility"], work.steps[i])
            if work.norms:
                of_units = rules.unbiased(work.norms[i], options["beta_utility"], work.steps[i])
            elif options["scaling"] == "local":
                of_units = local_scale(utility)
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
        # Search has c = 0, and 0·∞ would be NaN.
        descent = (
            work.sign * grad.to(dtype) if work.c or work.exp_avgs else torch.zeros((), dtype=dtype, device=grad.device)
        )
        new = rules.update(
            param.to(dtype),
            _direction(work, i, descent) if work.exp_avgs else descent,
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
        del xi, new  # free the memory before the next parameter


def _direction(work: Work, i: int, grad: Tensor) -> Tensor:
    """Update the averages of the gradient and of its square; return Adam's direction m̂ / (√v̂ + ε)."""
    beta1, beta2 = work.options["betas"]
    step = work.steps[i]
    first = keep(work.exp_avgs[i], rules.trace(wide(work.exp_avgs[i]), grad, beta1))
    second = keep(work.exp_avg_sqs[i], rules.trace(wide(work.exp_avg_sqs[i]), grad**2, beta2))
    eps: float = work.options["eps"]
    return rules.unbiased(first, beta1, step) / (rules.unbiased(second, beta2, step).sqrt() + eps)


@overload
def on(lr: float, device: torch.device) -> float: ...


@overload
def on(lr: Tensor, device: torch.device) -> Tensor: ...


def on(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return the learning rate; if it is a tensor, on a device and without dimensions."""
    return lr.to(device).reshape(()) if isinstance(lr, Tensor) else lr
