"""Base class of the weight-wise optimizers: the state around the phases of a step (``_phases.py``, ``_foreach.py``)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from upgd import rules
from upgd.methods import Method
from upgd.methods.adamw import AdaUPGD as AdaptiveRule
from upgd.methods.utility import UPGD as UtilityRule
from upgd.optim import _foreach, _phases
from upgd.optim import _fused as fused
from upgd.optim import _narrow as narrow
from upgd.optim import _partitions as partitions
from upgd.optim._arguments import check_dense, check_group, with_plain_numbers
from upgd.optim._base import Curvature, step_count
from upgd.optim._fusing import FusingOptimizer
from upgd.optim._narrow import wide_state
from upgd.optim._phases import Work, global_scales, largest, use_foreach, utility_dtype, wide
from upgd.optim._seeded import SeededNoise
from upgd.optim._sharded import across, is_sharded, placed, scales_of_units

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Curvature", "WeightwiseOptimizer"]


#: The names of the states in the rules of methods, and in ``optimizer.state``.
_STATES = {"utility": "utility", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}


class WeightwiseOptimizer(FusingOptimizer):
    """Base class of the weight-wise optimizers. Subclasses set the switches of the rule."""

    #: Whether the method estimates utility.
    _gated: bool
    #: Whether it follows Adam's direction instead of the gradient.
    _adaptive = False
    #: The switches c and q of :func:`upgd.rules.update`.
    _c, _q = 1.0, 1.0
    #: The processes with the other parameters, if this optimizer has only part of them.
    _peers: partitions.Peers | None = None
    #: The indices of its parameters in the whole model, if this optimizer has only part of them and they are known.
    _places: dict[Tensor, int] | None = None
    #: The largest utility of all parts at the last step.
    _largest: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        curvature: Curvature | None = None,
        generator: torch.Generator | None = None,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(params, defaults, curvature=curvature, generator=generator)
        own = [param for group in self.param_groups for param in group["params"]]
        self._peers = partitions.given(process_group, own)
        if self._peers is not None and any(map(is_sharded, own)):
            raise ValueError(
                "process_group is for unsharded parameters, but some of these are sharded, and their shards are reduced "
                "automatically; leave process_group out"
            )
        if self._gated:
            partitions.check_flattened(self, self._peers)
        partitions.watch_zero()

    def _switches(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """The switches c, p, q of :func:`upgd.rules.update`; p is an option of methods with gradient and gates."""
        return self._c, 1.0 if group.get("protect_gradient") else 0.0, self._q

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        options = with_plain_numbers(options)
        check_group(options)
        return options

    def _averages(self) -> tuple[str, ...]:
        return "utility", "exp_avg", "exp_avg_sq"

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled; a copy without it would compare utilities within its own part only.
        return super().__getstate__() | ({} if self._peers is None else {"_peers": self._peers})

    def _needs_seed(self) -> bool:
        return super()._needs_seed() or self._peers is not None

    def _numbering(self) -> dict[Tensor, int]:
        if self._places is not None:
            return self._places
        numbers = super()._numbering()
        if self._peers is None:
            return numbers
        first = torch.distributed.get_rank(self._peers.group) << 20
        return {param: first + number for param, number in numbers.items()}

    def _has_gates(self, group: dict[str, Any]) -> bool:
        """Whether the parameters of a group have gates; if not, their rule has ū = 0."""
        return bool(self._gated and group["gated"])

    def _advance(self) -> None:
        if self._advance_fused():
            return
        # Before anything changes, because a diagonal may be missing.
        diagonals = [self._diagonals(group) for group in self.param_groups]
        work = [self._gather(group, own) for group, own in zip(self.param_groups, diagonals, strict=True)]
        gated = [w for w in work if w.utilities]
        maxima = [m for w in gated for m in (_foreach if use_foreach(w) else _phases).trace(w)]
        if self._has_shards:
            maxima = [one for m in maxima for one in m.reshape(-1)]
            maxima = across(maxima, [owner for w in gated for owner in w.owners], "max")
            for w in gated:
                if w.options["scaling"] == "local":
                    w.norms = scales_of_units(map(wide, w.utilities), w.owners)
        scale = self._global_scales(maxima) if self._gated else {}
        for w in work:
            noise = self._noise_of(w) if self._perturbs(w.options) else None
            (_foreach if use_foreach(w) else _phases).update(w, scale, noise)

    def _noise_of(self, work: Work) -> Callable[[int], Tensor]:
        """Return a function that draws the noise of the work's parameters, by their index in the work's lists."""
        if work.options["seed"] is None:
            return lambda i: self._draw(work.params[i])
        numbering = self._numbering()
        numbers = [numbering[param] for param in work.owners]
        return SeededNoise(work.owners, work.options["seed"], work.steps, numbers, work.options["noise"])

    def _global_scales(self, maxima: list[Tensor]) -> dict[torch.device, Tensor]:
        if self._peers is not None:
            self._largest = partitions.largest_of(self._peers, [one for m in maxima for one in m.reshape(-1)])
            maxima = [*maxima, self._largest]
        elif not torch.compiler.is_compiling():
            partitions.warn_if_one_of_several(self)
        return global_scales(maxima)

    # ---------------------------------------------------------------------------------------------------- fused steps

    def _methods(self) -> list[tuple[Method, bool]]:
        # Methods without utility are its rule without gates.
        rule = AdaptiveRule if self._adaptive else UtilityRule
        return [
            (
                rule(
                    scaling=group.get("scaling", "global"),
                    order=2 if self.curvature is not None and self._has_gates(group) else 1,
                ),
                self._has_gates(group),
            )
            for group in self.param_groups
        ]

    def _works(self) -> list[fused.Work]:
        numbering, works = self._numbering(), []
        for group, (method, gated) in zip(self.param_groups, self._methods(), strict=True):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            utilities: list[Tensor] = []
            exp_avgs: list[Tensor] = []
            exp_avg_sqs: list[Tensor] = []
            steps: list[Tensor] = []
            self._init_group(group, params, grads, utilities, exp_avgs, exp_avg_sqs, [], steps)
            c, p, q = self._switches(group)
            values = {"c": c, "p": p, "q": q, "beta_utility": 0.0}
            values |= {
                name: group[name] for name in ("lr", "sigma", "weight_decay", "beta_utility", "eps") if name in group
            }
            values |= dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
            works.append(
                fused.Work(
                    method=method,
                    gated=gated,
                    noise=group["noise"] if self._perturbs(group) else "none",
                    values=values,
                    sign=-1.0 if group["maximize"] else 1.0,
                    owners=params,
                    params=self._local(params, params),
                    grads=self._local(grads, params),
                    curvatures=[self._diagonal(param) for param in params] if method.uses_curvature else [],
                    states={
                        name: self._local(tensors, params)
                        for name, tensors in zip(_STATES, (utilities, exp_avgs, exp_avg_sqs), strict=True)
                    },
                    steps=[self._counted(param) for param in params] if steps else [],
                    numbers=[numbering[param] for param in params],
                    slots={name: self._slot(own) for name, own in _STATES.items()},
                    scales={name: self._scales(own, params) for name, own in _STATES.items()},
                    rounds=group["stochastic_rounding"],
                )
            )
        return works

    def _everywhere(self) -> Callable[[Tensor], Tensor] | None:
        if self._peers is None:
            if self._gated:
                partitions.warn_if_one_of_several(self)
            return None

        def over_all(largest: Tensor) -> Tensor:
            assert self._peers is not None
            self._largest = partitions.largest_of(self._peers, list(largest.reshape(-1)))
            return self._largest.to(largest)

        return over_all

    @torch.no_grad()
    def gates(self) -> dict[Tensor, Tensor]:
        """Return the gate ū in [0, 1] of each weight by parameter; empty before the first step.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> optimizer = upgd.UPGD(model.parameters())
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.gates()[model.weight].shape
            torch.Size([2, 3])
        """
        # ``self.state[param]`` would create an empty state, which loading a checkpoint takes for a full one.
        unbiased = {
            param: rules.unbiased(wide_state(state, "utility", param), group["beta_utility"], state["step"].item())
            for group in self.param_groups
            if self._has_gates(group)
            for param in group["params"]
            if "utility" in (state := self.state.get(param, {})) and param.numel()
        }
        # The maximum is not reduced again, because a single process may call this.
        others = [] if self._largest is None else [self._largest]
        maxima = [largest(u) for u in unbiased.values()]
        scale = global_scales([*across(maxima, list(unbiased), "max"), *others])
        by_units = [p for group in self.param_groups if group.get("scaling") == "local" for p in group["params"]]
        of_units = [param for param in by_units if param in unbiased]
        norms = dict(zip(of_units, scales_of_units([unbiased[param] for param in of_units], of_units), strict=True))
        return {
            param: placed(rules.gate(u, norms[param] if param in norms else scale[u.device]), param)
            for param, u in unbiased.items()
        }

    def _diagonals(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the curvature of all parameters of a group that have a gradient; empty if it is not needed."""
        if self.curvature is None or not self._has_gates(group):
            return []
        return [self._diagonal(param) for param in group["params"] if param.grad is not None and param.numel()]

    def _gather(self, group: dict[str, Any], diagonals: list[Tensor]) -> Work:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        utilities: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        previous_noises: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, grads, utilities, exp_avgs, exp_avg_sqs, previous_noises, steps)
        if steps:
            # Not in _init_group, which the compiler runs once and leaves out of the compiled step.
            torch._foreach_add_(steps, 1.0)
        # Reading a step count on the host is free; one on the device must stay there.
        on_device = group["capturable"] or torch.compiler.is_compiling()
        counted: list[float | Tensor] = [step if on_device else step.item() for step in steps]
        return Work(
            group,
            *self._switches(group),
            self._local(params, params),
            self._local(grads, params),
            self._kept(group, params, counted, "utility", utilities),
            self._kept(group, params, counted, "exp_avg", exp_avgs),
            self._kept(group, params, counted, "exp_avg_sq", exp_avg_sqs),
            previous_noises,
            counted,
            self._local(diagonals, params),
            params,
            self._rounded(group, params, counted),
        )

    # Name and signature are those of torch's optimizers, because torch.compile recognizes this method by its name.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        utilities: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        previous_noises: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        self._settle_seed()
        has_gates = self._has_gates(group)
        seeded = group["seed"] is not None and (self._perturbs(group) or self._rounds(group))
        remembers_noise = group["noise"] == "anticorrelated" and self._perturbs(group) and group["seed"] is None
        averages, state_dtype = self._averages(), group["state_dtype"]
        for param in group["params"]:
            grad = param.grad
            if grad is None or param.numel() == 0:
                continue
            if grad.is_sparse:
                check_dense(param, self)
            params.append(param)
            grads.append(grad)
            if not has_gates and not self._adaptive and not remembers_noise and not seeded:
                continue  # no state, not even an empty one
            state = self.state[param]
            if (has_gates and "utility" not in state) or (self._adaptive and "exp_avg_sq" not in state):
                self._begin(param, group)
            dtype = utility_dtype(param)
            for name in averages:
                if name in state and (state_dtype is not None or state[name].dtype is not dtype):
                    narrow.begin(state, name, param, state_dtype)
            if has_gates:
                utilities.append(state["utility"])
            if has_gates or self._adaptive or seeded:
                if "step" not in state:
                    state["step"] = step_count(param, group)
                steps.append(state["step"])
            if self._adaptive:
                exp_avgs.append(state["exp_avg"])
                exp_avg_sqs.append(state["exp_avg_sq"])
            if remembers_noise:
                previous_noises.append(self._previous_noise(param))

    def _begin(self, param: Tensor, group: dict[str, Any]) -> None:
        """Initialize missing averages of a parameter's state with zeros.

        A checkpoint of another optimizer has some of them: AdamW's averages, or UPGD's utility. There is one step count,
        that of Adam's averages if present, because their bias correction scales the step, whereas that of utility cancels
        in the gates.
        """
        state = self.state[param]
        counted = ("exp_avg", "exp_avg_sq") if self._adaptive else ("utility",)
        known = all(name in state for name in counted)
        state["step"] = step_count(param, group, state["step"] if known else 0.0)
        for name in (*counted, *(["utility"] if self._has_gates(group) else [])):
            if name not in state or (name in counted and not known):
                state.pop(name, None)
                narrow.begin(state, name, param, group["state_dtype"])
