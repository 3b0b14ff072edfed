"""Utility-based perturbed gradient descent and search, feature-wise."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from upgd import noise, rules
from upgd.curvature._backward import if_compiled
from upgd.optim import features as hidden
from upgd.optim._arguments import check_dense
from upgd.optim._base import step_count
from upgd.optim._phases import global_scales, on, utility_dtype
from upgd.optim._weightwise import WeightwiseOptimizer


class FeatureCurvature(Protocol):
    """Provides the curvature of gates on a module's output after ``loss.backward()``, as HesScale does."""

    def diagonal(self, param: Tensor) -> Tensor: ...
    def feature_diagonal(self, module: nn.Module) -> Tensor: ...
    def watch(self, *modules: nn.Module) -> None: ...


class FeaturewiseOptimizer(hidden.SeesFeatures, WeightwiseOptimizer):
    """Base class of optimizers with utility per unit."""

    _gated = True

    def __init__(
        self,
        model: nn.Module,
        defaults: dict[str, Any],
        *,
        features: hidden.Pairs | None,
        curvature: FeatureCurvature | None,
        scaler: "torch.amp.GradScaler | None",
        generator: torch.Generator | None,
    ) -> None:
        hidden.check_model(model)
        _check_curvature(curvature)
        super().__init__(list(model.named_parameters()), defaults, curvature=curvature, generator=generator)
        self._hidden = hidden.Features(model, features, scaler)
        if curvature is not None:
            try:
                curvature.watch(*self._hidden.modules)
            except Exception:
                self.remove()
                raise

    def _fits(self, value: Tensor, param: Tensor, name: str) -> bool:
        return value.shape == param.shape[:1] if name == "utility" else super()._fits(value, param, name)

    def _fuses(self) -> bool:
        return False

    def _advance(self) -> None:
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for param in groups:
            check_dense(param, self)
        gates = self._gates(groups, self._trace(groups))
        for param, group in groups.items():
            if param.grad is not None and param.numel():
                plain = group["foreach"] is False
                (_update_plain if plain else _update_in_place)(self, param, group, gates.get(param))

    @torch.no_grad()
    def gates(self) -> dict[Tensor, Tensor]:
        """Return the gate ū in [0, 1] of each feature by the weight of its layer; empty before the first step.

        Example:
            >>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
            >>> optimizer = upgd.FeatureUPGD(model)
            >>> model(torch.ones(1, 3)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.gates()[model[0].weight].shape
            torch.Size([5])
        """
        groups = {param: group for group in self.param_groups for param in group["params"]}
        every = self._hidden.all
        unbiased = [self._unbiased(f, groups) if self._carrier(f) is not None else None for f in every]
        of_params = self._gates(groups, unbiased)
        return {f.params[0]: of_params[f.params[0]].flatten() for f in every if f.params[0] in of_params}

    def _carrier(self, feature: hidden.Feature) -> Tensor | None:
        """The parameter whose state holds the features' utility: the weights, or the bias if they are frozen."""
        return next((param for param in feature.params if "utility" in self.state.get(param, {})), None)

    def _trace(self, groups: dict[Tensor, dict[str, Any]]) -> list[Tensor | None]:
        """Update the running average of the features' utility and return it without bias; None for layers without a
        gradient."""
        gradients: dict[hidden.Feature, tuple[Tensor, Tensor, Tensor]] = {}
        is_left_out = False
        # All utilities before the first change, because a gradient or a curvature may be missing.
        for feature in self._hidden.all:
            trainable = [param for param in feature.params if param in groups and param.grad is not None]
            if not trainable:
                continue
            gradient = feature.use_grad()
            if gradient is None and not self._hidden.expects(feature):
                is_left_out = True
                continue
            if gradient is None:
                raise RuntimeError(_no_gradient(feature))
            known = self._carrier(feature)
            carrier = trainable[0] if known is None else known
            dtype = utility_dtype(carrier) if known is None else self.state[carrier]["utility"].dtype
            gradients[feature] = carrier, gradient, self._utility(feature, gradient.to(dtype), groups[carrier])
        unbiased: list[Tensor | None] = []
        for feature in self._hidden.all:
            if feature not in gradients:
                unbiased.append(None)
                continue
            carrier, gradient, utility = gradients[feature]
            if self._carrier(feature) is None:
                self.state[carrier]["step"] = step_count(carrier, groups[carrier])
                self.state[carrier]["utility"] = torch.zeros_like(gradient, dtype=utility_dtype(carrier))
            state, group = self.state[carrier], groups[carrier]
            state["step"] += 1
            state["utility"].copy_(rules.trace(state["utility"], utility, group["beta_utility"]))
            unbiased.append(self._unbiased(feature, groups))
        if is_left_out and not any(feature.is_seen for feature in self._hidden.all):
            raise RuntimeError(
                "no activation module was called after any layer of the model, so it has no hidden features; write "
                "nn.ReLU() for F.relu, name the modules with features={...}, or use the weight-wise optimizer"
            )
        return unbiased

    def _utility(self, feature: hidden.Feature, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the utility of each feature, ``½·∂²L/∂gate² − ∂L/∂gate``, at gates of 1."""
        curvature = None
        if self.curvature is not None:
            if feature.is_shared:
                raise RuntimeError(
                    f"curvature cannot distinguish the features of {feature.name!r}, because {feature.module_name!r} is "
                    "called more than once; give each layer its own activation module, or leave curvature out"
                )
            curvature = feature.curvature_by(self.curvature).to(gradient.dtype)
        utility = rules.utility(torch.ones_like(gradient), gradient, curvature)
        return -utility if group["maximize"] else utility

    def _unbiased(self, feature: hidden.Feature, groups: dict[Tensor, dict[str, Any]]) -> Tensor:
        carrier = self._carrier(feature)
        assert carrier is not None
        state, group = self.state[carrier], groups[carrier]
        on_device = group["capturable"] or torch.compiler.is_compiling()
        return rules.unbiased(
            state["utility"], group["beta_utility"], state["step"] if on_device else state["step"].item()
        )

    def _gates(self, groups: dict[Tensor, dict[str, Any]], unbiased: list[Tensor | None]) -> dict[Tensor, Tensor]:
        """Return the gates ū of parameters that enter features, reshaped to broadcast."""
        scale = global_scales([u.amax() for u in unbiased if u is not None])
        gates: dict[Tensor, Tensor] = {}
        for feature, u in zip(self._hidden.all, unbiased, strict=True):
            if u is None:
                continue
            carrier = self._carrier(feature)
            assert carrier is not None
            local = groups[carrier]["scaling"] == "local"
            gate = rules.gate(u, rules.local_scale(u) if local else scale[u.device].to(u.dtype))
            for param in feature.params:
                gates[param] = gate.view(-1, *[1] * (param.ndim - 1))
        return gates

    def _noise(self, param: Tensor, group: dict[str, Any]) -> Tensor | None:
        """Return the next perturbation of a parameter, or None."""
        if group["sigma"] == 0:
            return None
        drawn = self._draw(param)
        if group["noise"] == "white":
            return drawn
        previous = self._previous_noise(param)
        xi = noise.anticorrelated(drawn, previous)
        previous.copy_(drawn)
        return xi


def _update_plain(optimizer: FeaturewiseOptimizer, param: Tensor, group: dict[str, Any], gate: Tensor | None) -> None:
    """Update one parameter; the reference implementation. Without a gate this is plain gradient descent."""
    wide = utility_dtype(param)
    assert param.grad is not None
    grad = param.grad.to(wide)
    settings = {"lr": on(group["lr"], param.device), "weight_decay": group["weight_decay"]}
    gates: dict[str, Any] = {}
    if gate is not None:
        c, p, q = optimizer._switches(group)
        xi = optimizer._noise(param, group)
        settings |= {"sigma": group["sigma"], "c": c, "p": p, "q": q}
        gates = {"gate": gate, "noise": 0.0 if xi is None else xi}
        if not c:
            grad = torch.zeros_like(grad)  # 0·∞ would be NaN
    param.copy_(rules.update(param.to(wide), -grad if group["maximize"] else grad, **gates, **settings))


def _update_in_place(
    optimizer: FeaturewiseOptimizer, param: Tensor, group: dict[str, Any], gate: Tensor | None
) -> None:
    """The same update without temporaries of the parameter's size, except one for weight decay."""
    wide = utility_dtype(param)
    assert param.grad is not None
    lr, sign = on(group["lr"], param.device), -1.0 if group["maximize"] else 1.0
    weight, grad = param.to(wide), param.grad.to(wide)
    moved, rate = weight, lr
    if group["weight_decay"] != 0:  # it is added to the rest of the step; see rules.update
        moved, rate = weight * -group["weight_decay"], 1.0
    if gate is None:
        _subtract(moved, rate * sign, grad, None)
    else:
        useless = 1 - gate
        c, p, q = optimizer._switches(group)
        xi = optimizer._noise(param, group)
        if c:
            _subtract(moved, rate * sign * c, grad, useless if p else None)
        if xi is not None:
            _subtract(moved, rate * group["sigma"], xi.to(wide), useless if q else None)
    if moved is not weight:
        _subtract(weight, -lr, moved, None)
    if weight is not param:
        param.copy_(weight)


def _subtract(weight: Tensor, lr: float | Tensor, term: Tensor, factor: Tensor | None) -> None:
    """In place: ``weight − lr·term·factor``."""
    if factor is not None:
        weight.addcmul_(term, factor * -lr)
    elif isinstance(lr, Tensor):
        weight.addcmul_(term, -lr.to(weight.dtype))
    else:
        weight.sub_(term, alpha=lr)


def _no_gradient(feature: hidden.Feature) -> str:
    """Return the error message for features with a gradient of the weights but not of the gates."""
    if feature.is_shared and not feature.is_seen:
        return (
            f"features names the {type(feature.module).__name__} {feature.module_name!r} for {feature.name!r}, but it is not "
            f"called with the output of that layer; name the module after the layer: features={{{feature.name!r}: ...}}."
        )
    return (
        f"the parameters of {feature.name!r} have a gradient, but its features have none; run the forward and backward pass "
        f"through the model that was passed to the optimizer, after creating the optimizer.{if_compiled()}"
    )


def _check_curvature(curvature: Any) -> None:
    missing = [name for name in ("feature_diagonal", "watch") if not callable(getattr(curvature, name, None))]
    if curvature is not None and missing:
        raise TypeError(
            f"curvature must have the methods feature_diagonal(module) and watch(module), but it is {curvature!r}; pass "
            "upgd.HesScale(model, criterion), or leave it out for first-order utility"
        )


class FeatureUPGD(FeaturewiseOptimizer):
    """Utility-based perturbed gradient descent, feature-wise: protects useful hidden units and perturbs the others.

    Every hidden unit, or channel of a convolution, is multiplied by a gate with the constant value 1. At step ``t``::

        m  = −∂L/∂gate   (+ ½·∂²L/∂gate² with curvature)   utility on this sample
        u ← β·u + (1−β)·m,   û = u / (1 − βᵗ)              running average, without initial bias
        ū  = sigmoid(û / scale)                            gate
        w ← w − lr·[(g + σ·ξ)·(1 − ū) + λ·w]               incoming weights and bias of the unit

    Gates exist only inside the optimizer: they are not in ``model.parameters()`` or the state dict, and hooks on the
    activations compute their gradient in the ordinary backward pass. All other parameters (output layer, normalization,
    embeddings) use plain gradient descent with weight decay and without noise.

    Args:
        model: the network. The features of a Linear or Conv layer are the output of the first activation module after it.
            Layers without one, such as heads, and the last layer have no features. ``optimizer.features`` shows the result.
        lr, beta_utility, sigma, weight_decay, protect_gradient, noise, maximize, generator: as for :class:`upgd.UPGD`.
        scaling: ``"global"`` divides utilities by the largest one of all hidden layers; ``"local"`` by the norm over the
            layer.
        features: overrides this search: the activation module of each hidden layer, by name, ``{"fc1": "act1", "fc2":
            "act2"}``, or as pairs. Other layers use plain gradient descent.
        curvature: :class:`upgd.HesScale`, for second-order utility.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if any.
        foreach: ``False`` for the plain implementation that mirrors :mod:`upgd.rules`. Default: an in-place implementation.
        capturable: as for :class:`upgd.UPGD`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = upgd.FeatureUPGD(model, lr=0.01, sigma=0.001)
        >>> nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.02,
        *,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        weight_decay: float = 0.0,
        scaling: str = "global",
        protect_gradient: bool = True,
        noise: str = "white",
        features: hidden.Pairs | None = None,
        curvature: FeatureCurvature | None = None,
        scaler: "torch.amp.GradScaler | None" = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "weight_decay": weight_decay,
            "scaling": scaling,
            "protect_gradient": protect_gradient,
            "noise": noise,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(model, defaults, features=features, curvature=curvature, scaler=scaler, generator=generator)


class FeatureUPS(FeaturewiseOptimizer):
    """Utility-based perturbed search, feature-wise: perturbs the incoming weights of hidden units according to utility.

    ::

        w ← w − lr·σ·ξ·(1 − ū)      incoming weights and biases of hidden units
        w ← w − lr·g                all others, such as the output layer

    with the gate ū of :class:`upgd.FeatureUPGD`. Only the features are searched; the output layer learns by gradient.

    Args:
        model: as for :class:`upgd.FeatureUPGD`.
        lr: learning rate; the paper uses 1 and searches over ``sigma``.
        sigma: σ, the standard deviation of the perturbation.
        beta_utility, scaling, noise, features, curvature, scaler, maximize, foreach, capturable, generator: as for
            :class:`upgd.FeatureUPGD`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = upgd.FeatureUPS(model, lr=0.1, sigma=0.01)
        >>> nn.functional.mse_loss(model(torch.randn(1, 4)), torch.zeros(1, 2)).backward()
        >>> optimizer.step()
    """

    _c = 0.0

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        *,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        scaling: str = "global",
        noise: str = "white",
        features: hidden.Pairs | None = None,
        curvature: FeatureCurvature | None = None,
        scaler: "torch.amp.GradScaler | None" = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "weight_decay": 0.0,
            "scaling": scaling,
            "noise": noise,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(model, defaults, features=features, curvature=curvature, scaler=scaler, generator=generator)
