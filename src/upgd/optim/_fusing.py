"""The option ``fused`` of optimizers: when a step is fused, and how it is taken and overlapped with the backward pass."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upgd.methods import Method
from upgd.optim._base import BaseOptimizer
from upgd.optim._fused import Fused, Repeated, StepPlan, Work, reason_against
from upgd.optim._sharded import largest_across, local, sum_across

__all__ = ["FusingOptimizer"]


class FusingOptimizer(BaseOptimizer):
    """Base class of optimizers with an option ``fused``. Subclasses provide their tensors and the methods of their groups."""

    #: The kernels and their memory; a copy of the optimizer creates its own.
    _fused: Fused | None = None
    #: The plan of the last step, if the next one may reuse it.
    _repeated: Repeated | None = None

    def _methods(self) -> list[tuple[Method, bool]]:
        """Return the method of each group, in the variant given by its options, and whether the group is gated."""
        raise NotImplementedError

    def _works(self) -> list[Work]:
        """Return the inputs of a step, for each group."""
        raise NotImplementedError

    def _everywhere(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that reduces a maximum over all processes; None if this process has all parameters."""
        return None

    def _fuses(self) -> bool:
        """Return whether steps are fused: if requested, and on a GPU wherever possible."""
        asked = [group["fused"] for group in self.param_groups]
        if self._overlaps() and not all(asked):
            raise ValueError("overlap=True needs fused steps; pass fused=True as well")
        if any(group["fused"] is False or group.get("foreach") is not None for group in self.param_groups):
            if True in asked:
                raise ValueError(
                    "fused=True must hold for all parameter groups, but one has fused=False or foreach; give all groups the "
                    "same options"
                )
            return False
        if torch.compiler.is_compiling():  # the part outside the compiled step checks whether it is possible
            return True in asked
        params = [param for group in self.param_groups for param in group["params"]]
        if True not in asked and (not params or params[0].device.type != "cuda"):
            return False
        reason = reason_against(params, self._methods(), self.param_groups)
        if reason is not None and True in asked:
            raise RuntimeError(f"fused=True is not possible, because {reason}; leave fused out")
        return reason is None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by :class:`torch.amp.GradScaler`, which then lets the step unscale gradients and skip infinite ones."""
        return self._fuses()

    def _needs_seed(self) -> bool:
        return super()._needs_seed() or self._fuses()

    def _advance_fused(self) -> bool:
        """Take a fused step if steps are fused; return whether it was taken."""
        if not torch.compiler.is_compiling() and self._repeated is not None:
            if (plan := self._repeated.plan(self)) is not None:
                self._take(plan, self._repeated.changed() if self._overlaps() else None)
                return True
            self._repeated = None
        if self._fuses():
            self._plan_and_take()
            return True
        return False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _plan_and_take(self) -> None:
        if self._repeated is not None and (plan := self._repeated.plan(self)) is not None:
            self._take(plan)
            return
        self._fuses()  # raises an error if fused steps are impossible
        if self._fused is None:
            self._fused = Fused()
        if any(map(self._perturbs, self.param_groups)) and self.param_groups[0]["seed"] is None:
            self._seed_is_settled = False  # the previous steps were not fused
        plan = self._fused.planned(self._works())
        if plan is not None:
            if self._overlaps():
                self._check_overlap(plan)
            self._take(plan)
            self._repeated = Repeated(self, plan) if Repeated.possible(plan) else None

    def _take(self, plan: StepPlan, changed: list[tuple[int, int]] | None = None) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None or found_inf is not None:
            changed = None  # the gradients observed early were scaled
        plan.step(
            self.param_groups[0]["seed"] or 0,
            grad_scale=grad_scale,
            found_inf=found_inf,
            everywhere=self._everywhere(),
            across=largest_across if self._has_shards else None,
            across_units=sum_across if self._has_shards else None,
            changed=changed,
        )

    def _local(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """Return the local parts of tensors that belong to parameters."""
        if not self._has_shards:
            return tensors
        return [local(tensor, param) for tensor, param in zip(tensors, params, strict=bool(tensors))]

    def _scales(self, name: str, params: list[Tensor]) -> list[Tensor | None]:
        """Return the local scales of the state of that name; None for parameters whose state has more than 8 bits."""
        scales = (self.state[param].get(f"{name}_scale") if param in self.state else None for param in params)
        return [None if scale is None else local(scale) for scale in scales]

    # -------------------------------------------------------------------------------------------------------- overlap

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options; see :meth:`torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        self._repeated = None
        if self._overlaps():
            hook = _Early(weakref.ref(self))
            for param in self.param_groups[-1]["params"]:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(hook)

    def _overlaps(self) -> bool:
        return any(group.get("overlap") for group in self.param_groups)

    def _check_overlap(self, plan: StepPlan) -> None:
        reason = None
        if not hasattr(plan.engine, "observe"):
            reason = "the parameters are not on a GPU"
        elif not plan.reductions:
            reason = "no group has gates, so there is nothing to compute before the step"
        elif not Repeated.possible(plan):
            reason = "a parameter is not contiguous, or the method uses curvature"
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            reason = "torch.distributed is initialized, and gradients may be reduced after they have been computed"
        if reason is not None:
            raise RuntimeError(f"overlap=True is not possible, because {reason}; leave overlap out")

    def _observe_early(self, param: Tensor) -> None:
        if self._repeated is not None and not torch.compiler.is_compiling():
            self._repeated.observe(self, param)

    def _counted(self, param: Tensor) -> Tensor:
        """Return the step count of a parameter on the device where the kernels update it."""
        state: dict[str, Any] = self.state[param]
        if state["step"].device != param.device or state["step"].dtype != torch.float64:  # which the kernels read
            state["step"] = state["step"].to(param.device, torch.float64)
        step: Tensor = state["step"]
        return step


class _Early:
    """The hook that notifies an optimizer, if it still exists, of an accumulated gradient."""

    def __init__(self, optimizer: "weakref.ref[FusingOptimizer]") -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def __call__(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._observe_early(param)
