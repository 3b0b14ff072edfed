"""What a learner is: a method, its settings and a seed. And which learners can be computed side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from upgd.population.backend import Group, Kind

__all__ = ["METHODS", "Learner", "groups"]


class Method(NamedTuple):
    """One row of the table in :mod:`upgd.rules`: the switches, and the settings that the method has besides ``lr``.

    A setting is written with its default; ``...`` means that it has none and must be given.
    """

    rule: Literal["plain", "utility", "adamw"]
    c: float
    p: float
    q: float
    settings: dict[str, Any]


_UTILITY = {"beta_utility": 0.999, "wise": "weight", "scaling": "global", "order": 1, "sigma": 1e-3, "noise": "white"}

#: The methods by name.
METHODS: dict[str, Method] = {
    "sgd": Method("plain", 1, 0, 0, {}),
    "sgdw": Method("plain", 1, 0, 0, {"weight_decay": ...}),
    "adamw": Method("adamw", 1, 0, 0, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    "pgd": Method("plain", 1, 0, 0, {"sigma": ...}),
    "anti-pgd": Method("plain", 1, 0, 0, {"sigma": ...}),
    "shrink-and-perturb": Method("plain", 1, 0, 0, {"sigma": ..., "weight_decay": ...}),
    "upgd": Method("utility", 1, 1, 1, {**_UTILITY, "weight_decay": 0.0}),
    "upgd-nonprotecting": Method("utility", 1, 0, 1, {**_UTILITY, "weight_decay": 0.0}),
    "ups": Method("utility", 0, 0, 1, _UTILITY),
    # What UPS is compared with: it searches, too, but perturbs everything evenly, useful or not.
    "ups-even": Method("utility", 0, 0, 0, {name: _UTILITY[name] for name in ("wise", "sigma", "noise")}),
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "wise": ("weight", "feature"),
    "scaling": ("global", "local"),
    "order": (1, 2),
    "noise": ("white", "anticorrelated"),
}
#: What a method that lacks the setting does anyway; to say so is no mistake.
_WITHOUT = {"sigma": (0,), "weight_decay": (0,), "wise": ("weight",), "scaling": ("global",), "order": (1,)}


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One online learner: a method, its settings and a seed.

    A setting that is left out takes the method's default. A setting that the method does not have is ``None`` afterwards,
    and an error if it was given; so two learners that are equal compute the same.

    Args:
        method: one of :data:`METHODS`: ``sgd``, ``sgdw``, ``adamw``, ``pgd``, ``anti-pgd``, ``shrink-and-perturb``,
            ``upgd``, ``upgd-nonprotecting``, ``ups``, ``ups-even``.
        lr: learning rate.
        seed: what initial weights, stream and noise are a function of.
        beta_utility: β, how long utility remembers.
        sigma: σ, the standard deviation of the perturbation.
        weight_decay: decoupled weight decay.
        wise: ``"weight"`` or ``"feature"``: whose utility is looked at.
        scaling: ``"global"`` or ``"local"``: next to whom.
        order: 1, or 2 for utility with HesScale's curvature.
        noise: ``"white"`` or ``"anticorrelated"``.
        betas, eps: AdamW's.

    Example:
        >>> Learner(method="upgd", lr=0.01, sigma=0.1).settings()["beta_utility"]
        0.999
        >>> Learner(method="sgd", lr=0.01, sigma=0.1)
        Traceback (most recent call last):
        ...
        ValueError: sigma=0.1 has no meaning for method='sgd', which takes lr alone; leave it out, or use method='pgd'
    """

    method: str
    lr: float
    seed: int = 0
    beta_utility: float | None = None
    sigma: float | None = None
    weight_decay: float | None = None
    wise: Literal["weight", "feature"] | None = None
    scaling: Literal["global", "local"] | None = None
    order: Literal[1, 2] | None = None
    noise: Literal["white", "anticorrelated"] | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            near = get_close_matches(str(self.method), METHODS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(METHODS)}"
            raise ValueError(f"there is no method={self.method!r}; {hint}")
        own = METHODS[self.method].settings
        self._set("lr", _at_least_zero("lr", self.lr))
        self._set("seed", _seed(self.seed))
        for name in (f.name for f in fields(self) if f.name not in ("method", "lr", "seed")):
            value = getattr(self, name)
            if name not in own:
                self._refuse(name, value)
                self._set(name, None)
            elif value is None:
                if own[name] is ...:
                    raise ValueError(f"method={self.method!r} needs {name}; give it a number, such as {name}=0.01")
                self._set(name, own[name])
            else:
                self._set(name, _checked(name, value))

    def settings(self) -> dict[str, Any]:
        """The settings that the method has, ``lr`` first; not the seed. What names a learner's row in a table."""
        return {"lr": self.lr, **{name: getattr(self, name) for name in METHODS[self.method].settings}}

    @property
    def kind(self) -> Kind:
        """Which computation the learner needs."""
        rule = METHODS[self.method].rule
        noise = "none"
        if self.sigma:
            noise = "anticorrelated" if self.method == "anti-pgd" else self.noise or "white"
        switches = {"wise": self.wise, "scaling": self.scaling, "order": self.order} if rule == "utility" else {}
        utility = {name: value for name, value in switches.items() if value is not None}
        return Kind(rule, noise=noise, **utility)  # type: ignore[arg-type]  # mypy does not see what the checks have shown

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse(self, name: str, value: Any) -> None:
        own_noise = "anticorrelated" if self.method == "anti-pgd" else "white"
        if value is None or value in _WITHOUT.get(name, ()) or (name == "noise" and value == own_noise):
            return
        takes = " and ".join(("lr", *METHODS[self.method].settings)) if METHODS[self.method].settings else "lr alone"
        others = [m for m, method in METHODS.items() if name in method.settings]
        relative = {"weight_decay": "sgdw", "sigma": "pgd"}.get(name, others[0])
        if name == "noise" and self.method == "pgd":
            relative = "anti-pgd"
        raise ValueError(
            f"{name}={value!r} has no meaning for method={self.method!r}, which takes {takes}; leave it out, "
            f"or use method={relative!r}"
        )


def groups(learners: Sequence[Learner], rows: Sequence[int]) -> list[tuple[Group, list[int]]]:
    """Put learners of one kind together.

    Args:
        learners: the population.
        rows: which row of a chunk each learner sees.

    Returns:
        For each kind, in the order of its first learner, the group and its learners' places in ``learners``.
    """
    places: dict[Kind, list[int]] = {}
    for place, learner in enumerate(learners):
        places.setdefault(learner.kind, []).append(place)
    return [(_group(kind, [learners[i] for i in own], [rows[i] for i in own]), own) for kind, own in places.items()]


def _group(kind: Kind, learners: list[Learner], rows: list[int]) -> Group:
    methods = [METHODS[learner.method] for learner in learners]
    betas = [learner.betas or (0.0, 0.0) for learner in learners]
    return Group(
        kind=kind,
        seeds=torch.tensor([learner.seed for learner in learners]),
        rows=torch.tensor(rows),
        lr=_vector([learner.lr for learner in learners]),
        beta=_vector([learner.beta_utility for learner in learners]),
        sigma=_vector([learner.sigma for learner in learners]),
        weight_decay=_vector([learner.weight_decay for learner in learners]),
        c=_vector([method.c for method in methods]),
        p=_vector([method.p for method in methods]),
        q=_vector([method.q for method in methods]),
        beta1=_vector([beta1 for beta1, _ in betas]),
        beta2=_vector([beta2 for _, beta2 in betas]),
        eps=_vector([learner.eps for learner in learners]),
    )


def _vector(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([value or 0.0 for value in values], dtype=torch.float64)


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            choices = " or ".join(repr(choice) for choice in _CHOICES[name])
            raise ValueError(f"{name} must be {choices}, not {value!r}")
        return _CHOICES[name][_CHOICES[name].index(value)]  # 2 and not 2.0, which is as good but has another name
    if name == "betas":
        if not isinstance(value, Sequence) or len(value) != 2:
            raise ValueError(f"betas must be two numbers in [0, 1), such as (0.9, 0.999), not {value!r}")
        return tuple(_share("betas", beta) for beta in value)
    return _share(name, value) if name == "beta_utility" else _at_least_zero(name, value)


def _at_least_zero(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
    return float(value)


def _share(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), not {value!r}; try 0.999")
    return float(value)


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2⁶³ − 1, not {value!r}")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
