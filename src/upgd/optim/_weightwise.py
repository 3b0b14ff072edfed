"""What the weight-wise optimizers share: torch's manners around the two phases of a step, which are in ``_phases.py``."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from upgd import noise, rules
from upgd.optim import _partitions as partitions
from upgd.optim._arguments import (
    check_complete,
    check_curvature,
    check_dense,
    check_group,
    check_parameter,
    with_plain_numbers,
)
from upgd.optim._phases import Work, global_scales, trace, update, utility_dtype
from upgd.optim._sharded import is_sharded, white_like

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")


class Curvature(Protocol):
    """Anything that knows the diagonal of the loss's Hessian after ``loss.backward()``, such as :class:`upgd.HesScale`."""

    def diagonal(self, param: Tensor) -> Tensor: ...


class WeightwiseOptimizer(Optimizer):
    """The torch manners of the weight-wise optimizers. A subclass says which switches of the rule it stands for."""

    #: Does the method estimate utility at all?
    _gated: bool
    #: Does it descend along Adam's direction instead of the gradient?
    _adaptive = False
    #: The options without a default: where the caller gives none for all groups, every group brings its own.
    _required: tuple[str, ...] = ()
    #: Who holds the other parameters, if this optimizer has only part of a model's.
    _peers: partitions.Peers | None = None
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
        check_curvature(curvature)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, but it is {generator!r}; try torch.Generator().")
        self.curvature = curvature
        self.generator = generator
        defaults = with_plain_numbers({n: v for n, v in defaults.items() if v is not None or n not in self._required})
        check_group(defaults)  # also where every group brings options of its own
        super().__init__(params, defaults)
        own = [param for group in self.param_groups for param in group["params"]]
        self._peers = partitions.given(process_group, own)
        if self._peers is not None and any(map(is_sharded, own)):
            raise ValueError(
                "process_group is for parameters that are in one piece, but some of these are sharded, and torch "
                "reduces over their shards by itself; leave process_group out."
            )
        partitions.watch_zero()

    def _switches(self, group: dict[str, Any]) -> tuple[float, float, float]:
        """The switches c, p, q of :func:`upgd.rules.update`."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            param_group.update(with_plain_numbers(param_group))
            check_complete({**self.defaults, **param_group}, self._required, self)
            check_group(param_group)
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
            # AdamW, too, takes a checkpoint whose step is a number, as other programs and old versions of torch write it.
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state and not isinstance(state["step"], Tensor):
                    state["step"] = torch.tensor(
                        float(state["step"]), dtype=torch.float32, device=step_device(param, group)
                    )

    def __getstate__(self) -> dict[str, Any]:
        # torch's own list of what to copy and pickle knows nothing of these. A process group cannot be pickled, and says so:
        # a copy without it would compare utilities within its part alone.
        own = {"curvature": self.curvature, "generator": self.generator}
        return super().__getstate__() | own | ({} if self._peers is None else {"_peers": self._peers})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; see :meth:`torch.optim.Optimizer.load_state_dict`."""
        loaded: dict[str, Any] = {}  # what the hooks of others, which come first, have made of it

        def look(_: Optimizer, given: dict[str, Any]) -> None:
            loaded.update(given)
            self._check_utilities(given)

        with self.register_load_state_dict_pre_hook(look):
            super().load_state_dict(state_dict)
        # torch casts all state to the parameter's dtype, but the averages of a 16-bit parameter are kept in 32 bits.
        for saved, param in self._saved(loaded):
            for name in ("utility", "exp_avg", "exp_avg_sq"):
                if name in saved:
                    self.state[param][name] = saved[name].to(param.device, utility_dtype(param))

    def _saved(self, state_dict: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """What was saved for each parameter, as long as there are both."""
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        return ((state_dict["state"].get(number, {}), param) for number, param in zip(ids, own, strict=False))

    def _check_utilities(self, state_dict: dict[str, Any]) -> None:
        for saved, param in self._saved(state_dict):
            utility = saved.get("utility")
            if isinstance(utility, Tensor) and not is_sharded(param) and not self._fits(utility, param):
                raise ValueError(
                    f"state_dict has a utility of shape {tuple(utility.shape)} for a parameter of shape {tuple(param.shape)},"
                    f" which {type(self).__name__} cannot take: the utility of weights is none of features, nor the other way"
                    " round; load the checkpoint of an optimizer of the same kind and model."
                )

    def _fits(self, utility: Tensor, param: Tensor) -> bool:
        """Whether it can be the utility of a parameter."""
        return utility.shape == param.shape

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

        self._advance()
        return loss

    def _advance(self) -> None:
        work = [self._gather(group) for group in self.param_groups]
        scale = self._global_scales([largest for w in work for largest in trace(w)]) if self._gated else {}
        for w in work:
            noises = [self._draw(param) for param in w.params] if w.options["sigma"] > 0 else []
            update(w, scale, noises)

    def _global_scales(self, maxima: list[Tensor]) -> dict[torch.device, Tensor]:
        if self._peers is not None:
            self._largest = partitions.largest_of(self._peers, maxima)
            maxima = [*maxima, self._largest]
        elif not torch.compiler.is_compiling():
            partitions.warn_if_one_of_several(self)
        return global_scales(maxima)

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
        # To ask ``self.state[param]`` would make an empty state, and who loads a checkpoint takes that for a full one.
        unbiased = {
            param: rules.unbiased(state["utility"], group["beta_utility"], state["step"].item())
            for group in self.param_groups
            for param in group["params"]
            if self._gated and "utility" in (state := self.state.get(param, {})) and param.numel()
        }
        others = [] if self._largest is None else [self._largest]  # not reduced again: one process may ask alone
        scale = global_scales([*(u.amax() for u in unbiased.values()), *others])
        local = {p for group in self.param_groups if group.get("scaling") == "local" for p in group["params"]}
        return {
            param: rules.gate(u, rules.local_scale(u) if param in local else scale[u.device])
            for param, u in unbiased.items()
        }

    def _gather(self, group: dict[str, Any]) -> Work:
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
        # A step count on the host costs nothing to read; one on the device must stay there.
        on_device = group["capturable"] or torch.compiler.is_compiling()
        return Work(
            group,
            *self._switches(group),
            params,
            grads,
            utilities,
            exp_avgs,
            exp_avg_sqs,
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
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        previous_noises: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        for param in group["params"]:
            if param.grad is None or param.numel() == 0:
                continue
            check_dense(param, self)
            params.append(param)
            grads.append(param.grad)
            remembers_noise = group["noise"] == "anticorrelated" and group["sigma"] > 0
            if not self._gated and not remembers_noise:
                continue  # nothing to remember: no state, not even an empty one
            state = self.state[param]
            if self._gated:
                if "utility" not in state or (self._adaptive and "exp_avg_sq" not in state):
                    self._begin(param, group)
                utilities.append(state["utility"])
                steps.append(state["step"])
            if self._adaptive:
                exp_avgs.append(state["exp_avg"])
                exp_avg_sqs.append(state["exp_avg_sq"])
            if remembers_noise:
                if "previous_noise" not in state:
                    state["previous_noise"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                previous_noises.append(state["previous_noise"])

    def _begin(self, param: Tensor, group: dict[str, Any]) -> None:
        """Let the averages that a parameter's state does not have begin at zero.

        The checkpoint of another optimizer may have some: AdamW's those of Adam, UPGD's utility. There is one count of steps,
        from where Adam's began, if there are any: their bias corrections size the step, while that of utility cancels where
        utilities are compared.
        """
        state = self.state[param]
        counted = ("exp_avg", "exp_avg_sq") if self._adaptive else ("utility",)
        known = all(name in state for name in counted)
        state["step"] = torch.as_tensor(
            state["step"] if known else 0.0, dtype=torch.float32, device=step_device(param, group)
        )
        for name in (*counted, "utility"):
            if name not in state or (name in counted and not known):
                state[name] = torch.zeros_like(param, dtype=utility_dtype(param), memory_format=torch.preserve_format)

    def _draw(self, param: Tensor) -> Tensor:
        if is_sharded(param):
            return white_like(param, self.generator)
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


def step_device(param: Tensor, group: dict[str, Any]) -> torch.device:
    """Where a parameter's count of steps lives."""
    return param.device if group["capturable"] else torch.device("cpu")


def _capture_health_check(optimizer: Optimizer) -> None:
    """torch's warning for those who capture a step that is not capturable; newer versions have it under a wider name."""
    wider, older = "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"
    getattr(optimizer, wider if hasattr(optimizer, wider) else older)()
