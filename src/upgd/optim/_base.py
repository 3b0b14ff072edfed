"""torch.optim plumbing shared by all optimizers: options, checkpoints, copies, closures, noise and curvature."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from upgd import noise
from upgd.optim import _narrow as narrow
from upgd.optim._arguments import check_complete, check_curvature, check_parameter
from upgd.optim._phases import Kept, utility_dtype
from upgd.optim._replicas import ReplicaNoise, of_the_first
from upgd.optim._sharded import is_sharded, local

Result = TypeVar("Result")


class Curvature(Protocol):
    """Provides the diagonal of the loss's Hessian after ``loss.backward()``, as :class:`upgd.HesScale` does."""

    def diagonal(self, param: Tensor) -> Tensor: ...


class BaseOptimizer(Optimizer):
    """Base class of all optimizers. Subclasses implement the step (:meth:`_advance`) and define their options."""

    #: The options without a default: if not passed to the optimizer, every group must have its own.
    _required: tuple[str, ...] = ()
    #: State shared with replicas of the model in other processes; a copy of the optimizer negotiates it again.
    _replica_noise: ReplicaNoise | None = None
    #: Whether some parameters are sharded.
    _has_shards = False
    #: Whether the seed of the noise, if needed, has been agreed on by all processes.
    _seed_is_settled = False

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        curvature: Curvature | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_curvature(curvature)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, but it is {generator!r}; try torch.Generator()")
        self.curvature = curvature
        self.generator = generator
        given = {name: value for name, value in defaults.items() if value is not None or name not in self._required}
        # Also if every group has its own options.
        super().__init__(params, self._checked(given))

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options as Python numbers; raise ValueError for invalid ones."""
        raise NotImplementedError

    def _advance(self) -> None:
        """Take one step."""
        raise NotImplementedError

    def _averages(self) -> Iterable[str]:
        """Names of state tensors with the parameter's shape, kept in 32 bits if the parameter has 16."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            check_complete({**self.defaults, **param_group}, self._required, self)
            param_group.update(self._checked(param_group))
        super().add_param_group(param_group)
        self._seed_is_settled = False
        self._has_shards = self._has_shards or any(map(is_sharded, self.param_groups[-1]["params"]))
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
            if isinstance(dtype := group.get("state_dtype"), str):
                group["state_dtype"] = getattr(torch, dtype)
            # Like AdamW, accept a step that is a number, as written by other programs and old versions of torch.
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state and not isinstance(state["step"], Tensor):
                    state["step"] = step_count(param, group, float(state["step"]))

    def __getstate__(self) -> dict[str, Any]:
        # torch's list of attributes to copy and pickle does not include these.
        return super().__getstate__() | {
            "curvature": self.curvature,
            "generator": self.generator,
            "_has_shards": self._has_shards,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict; see :meth:`torch.optim.Optimizer.state_dict`."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            # torch.distributed.checkpoint refuses dtypes in full state dicts.
            if isinstance(dtype := group.get("state_dtype"), torch.dtype):
                group["state_dtype"] = str(dtype).removeprefix("torch.")
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; see :meth:`torch.optim.Optimizer.load_state_dict`."""
        loaded: dict[str, Any] = {}  # as changed by other hooks, which run first

        def look(_: Optimizer, given: dict[str, Any]) -> None:
            loaded.update(given)
            self._check_saved(given)

        def restore(_: Optimizer) -> None:
            self._restore_dtypes(loaded)

        # Before other hooks, which may change the loaded state.
        restoring = self.register_load_state_dict_post_hook(restore, prepend=True)
        with self.register_load_state_dict_pre_hook(look), restoring:
            super().load_state_dict(state_dict)
        self._seed_is_settled = False

    def _restore_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's conversions of a state dict that was just loaded.

        torch casts step counts to 32 bits if steps are fused or capturable, and other state to the parameter's dtype, but
        the averages of a 16-bit parameter are kept in 32 bits.
        """
        options = {param: group for group in self.param_groups for param in group["params"]}
        for saved, param in self._saved(state_dict):
            if isinstance(step := saved.get("step"), Tensor):
                where = self.state[param]["step"].device
                self.state[param]["step"] = step.to(where, _step_dtype(where), copy=True)
            for name in self._averages():
                if name in saved:
                    kept = saved[name].dtype in (torch.uint8, options[param].get("state_dtype"))
                    dtype = saved[name].dtype if kept else utility_dtype(param)
                    self.state[param][name] = saved[name].to(param.device, dtype)
                if (scales := f"{name}_scale") in saved:
                    self.state[param][scales] = saved[scales].to(param.device)

    def _saved(self, state_dict: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Pair parameters with their saved state."""
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        return ((state_dict["state"].get(number, {}), param) for number, param in zip(ids, own, strict=False))

    def _check_saved(self, state_dict: dict[str, Any]) -> None:
        """Raise an error for a checkpoint of another kind of optimizer or model."""
        for saved, param in self._saved(state_dict):
            for name in self._averages():
                value = saved.get(name)
                if isinstance(value, Tensor) and not is_sharded(param) and not self._fits(value, param, name):
                    raise ValueError(
                        f"state_dict has {name} of shape {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(param.shape)}, which {type(self).__name__} cannot load; use the checkpoint of an optimizer "
                        "of the same kind, for weights or for features, and of the same model"
                    )

    def _fits(self, value: Tensor, param: Tensor, name: str) -> bool:
        """Return whether the tensor can be the state of that name of a parameter."""
        return value.shape == param.shape

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

    # ---------------------------------------------------------------------------------------------------------- noise

    def _perturbs(self, group: dict[str, Any]) -> bool:
        """Return whether the parameters of a group get noise."""
        return bool(group["sigma"] > 0)

    def _needs_seed(self) -> bool:
        """Whether torch's generators cannot be used: parameters are sharded, or tensors are rounded stochastically."""
        return self._has_shards or any(map(self._rounds, self.param_groups))

    def _rounds(self, group: dict[str, Any]) -> bool:
        """Whether state or parameters of a group are rounded stochastically."""
        return group.get("state_dtype") in (torch.bfloat16, torch.uint8) or bool(group.get("stochastic_rounding"))

    def _kept(
        self, group: dict[str, Any], params: list[Tensor], steps: list[float | Tensor], name: str, tensors: list[Tensor]
    ) -> list[Tensor | Kept]:
        """Return the local state of parameters, as a step reads and writes it."""
        if not self._rounds(group):
            return [local(tensor) for tensor in tensors] if self._has_shards else [*tensors]
        numbers, slot = self._numbering(), self._slot(name)
        return [
            narrow.stored(
                tensor,
                self.state[param].get(f"{name}_scale"),
                param,
                narrow.rounding_of(param, group, step, numbers[param], slot),
            )
            for param, step, tensor in zip(params, steps, tensors, strict=bool(tensors))
        ]

    def _slot(self, name: str) -> int:
        """Return the slot of the random numbers with which the state of that name is rounded; 0 is the parameter."""
        return 1 + sorted(self._averages()).index(name)

    def _rounded(self, group: dict[str, Any], params: list[Tensor], steps: list[float | Tensor]) -> list[Tensor | Kept]:
        """Return the parameters to round stochastically; empty if none."""
        if not group.get("stochastic_rounding"):
            return []
        numbers = self._numbering()
        return [
            narrow.stored(param, None, param, narrow.rounding_of(param, group, step, numbers[param], 0))
            if param.dtype == torch.bfloat16
            else local(param)
            for param, step in zip(params, steps, strict=True)
        ]

    def _settle_seed(self) -> None:
        """Before the first noise, draw the seed if one is needed and none was given, and share it among processes.

        Noise is a function of the seed, the step and the entry where a group has a seed, and otherwise comes from torch's
        generators. The seed is an option of the groups, and so a part of ``state_dict()``.
        """
        if self._seed_is_settled or not any(self._perturbs(g) or self._rounds(g) for g in self.param_groups):
            return
        self._seed_is_settled = True
        seed = next((group["seed"] for group in self.param_groups if group["seed"] is not None), None)
        if seed is None and not self._needs_seed():
            return
        if seed is None:
            device = torch.device("cpu") if self.generator is None else self.generator.device
            seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=self.generator))
        seed = of_the_first(self, seed)
        for group in self.param_groups:
            group["seed"] = seed

    def _numbering(self) -> dict[Tensor, int]:
        """The index of each parameter among all parameters, which selects its noise."""
        return {param: number for number, param in enumerate(p for group in self.param_groups for p in group["params"])}

    def _draw(self, param: Tensor) -> Tensor:
        """Return the next white noise of a parameter from torch's generators."""
        generator = self.generator
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if self._replica_noise is None:
                self._replica_noise = ReplicaNoise()
            generator = self._replica_noise.generator(self, param.device, generator)
        return noise.white_(torch.empty_like(param, memory_format=torch.preserve_format), generator)

    def _previous_noise(self, param: Tensor) -> Tensor:
        """Return the white noise of a parameter at the last step, to be subtracted and replaced; zero at the first step."""
        state: dict[str, Tensor] = self.state[param]
        if "previous_noise" not in state:
            state["previous_noise"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["previous_noise"]

    def _diagonal(self, param: Tensor) -> Tensor:
        assert self.curvature is not None
        diagonal = self.curvature.diagonal(param)
        if not isinstance(diagonal, Tensor) or diagonal.shape != param.shape:
            got = f"shape {tuple(diagonal.shape)}" if isinstance(diagonal, Tensor) else repr(diagonal)
            raise ValueError(
                f"curvature.diagonal(param) must give a tensor of the parameter's shape {tuple(param.shape)}, but it gave "
                f"{got}; call loss.backward() before step(), and give the curvature the model that owns the parameter"
            )
        return diagonal


def step_count(param: Tensor, group: dict[str, Any], value: float | Tensor = 0.0) -> Tensor:
    """Return the step count of a parameter, to be counted in place."""
    where = param.device if group["capturable"] else torch.device("cpu")
    return torch.as_tensor(value, dtype=_step_dtype(where), device=where)


def _step_dtype(device: torch.device) -> torch.dtype:
    """Return a type that counts beyond 2**24, if the device has one: seeded noise is a function of the step."""
    return torch.float32 if device.type == "mps" else torch.float64


def _capture_health_check(optimizer: Optimizer) -> None:
    """torch's check for CUDA graph capture with a step that is not capturable; renamed in newer versions."""
    wider, older = "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"
    getattr(optimizer, wider if hasattr(optimizer, wider) else older)()
