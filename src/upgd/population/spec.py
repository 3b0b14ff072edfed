"""The specification of a learner (a method, its settings and a seed), and the grouping of learners."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import torch

from upgd import methods
from upgd.methods import METHODS, Method, Setting
from upgd.methods._declared import check_declared
from upgd.methods.method import switches_of
from upgd.methods.registry import canonical
from upgd.population.backend import Group, Kind

__all__ = ["METHODS", "Learner", "groups"]

#: The settings of which hand-written kernels know the values, with these values; all values if there are none.
_OF_KERNELS = {name: get_args(get_type_hints(Kind)[name]) for name in ("granularity", "scaling", "order", "gated")}


@dataclass(frozen=True, init=False, repr=False)
class Learner:
    """One online learner: a method, its settings and a seed.

    Omitted settings have the method's defaults; settings that the method does not have are an error. Equal learners compute
    the same results. Settings are attributes, such as ``learner.lr``; they are ``None`` if the method does not have them.

    Args:
        method: One of :data:`upgd.methods.METHODS`, such as ``upgd``, ``sgdw`` or ``adamw``.
        seed: Determines initial weights, stream and noise. Default: 0.
        settings: The method's settings by name, such as ``lr`` and ``sigma``.

    Example:
        >>> Learner(method="upgd", lr=0.01, sigma=0.1).settings()["scaling"]
        'global'
        >>> Learner(method="sgd", lr=0.01, sigma=0.1)
        Traceback (most recent call last):
        ...
        ValueError: sigma=0.1 does not apply to method='sgd', which takes only lr; leave it out, or use method='pgd'
    """

    method: str
    seed: int
    values: tuple[tuple[str, Any], ...]

    def __init__(
        self,
        *,
        method: str,
        seed: int = 0,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        **settings: Any,
    ) -> None:
        # `values` is passed by dataclasses.replace; its changes are among the settings.
        shown = {canonical(name): name for name in (*dict(values), *settings)}
        given = {canonical(name): value for name, value in {**dict(values), **settings}.items()}
        own = methods.get(method).settings
        for name, value in given.items():
            if name not in own:
                _refuse(method, name, shown[name], value)
        chosen = tuple(
            (name, _chosen(method, shown.get(name, name), setting, given.get(name))) for name, setting in own.items()
        )
        for name, value in (("method", method), ("seed", _seed(seed)), ("values", chosen)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        values = dict(self.__dict__.get("values", ()))
        name = canonical(name)
        if name in values:
            return values[name]
        if not name.startswith("_") and any(name in method.settings for method in METHODS.values()):
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings().items())
        return f"Learner(method={self.method!r}{settings}, seed={self.seed})"

    def but(self, **changes: Any) -> "Learner":
        """Return a copy with another seed or other settings."""
        if changes.keys() == {"seed"}:  # fast path: experiments create thousands of these, with validated settings
            other = object.__new__(Learner)
            other.__dict__.update(method=self.method, seed=_seed(changes["seed"]), values=self.values)
            return other
        return Learner(**{"method": self.method, "seed": self.seed, "values": self.values, **changes})

    def settings(self) -> dict[str, Any]:
        """Return the settings of the method, ``lr`` first, without the seed."""
        own = METHODS[self.method].settings
        return {name: value for name, value in self.values if not (own[name].quiet and value == own[name].default)}

    @property
    def variant(self) -> Method:
        """Return the method, in the variant selected by the settings."""
        return methods.get(self.method)(**dict(self.values))

    @property
    def kind(self) -> Kind:
        """Return the kind of computation that the learner needs."""
        return _kind(METHODS[self.method], self.values)  # type: ignore[arg-type]  # classes are hashable


@lru_cache(maxsize=1 << 14)
def _kind(cls: type[Method], settings: tuple[tuple[str, Any], ...]) -> Kind:
    """Return the kind; cached, because learners that differ only in the seed share it."""
    values = dict(settings)
    method = cls(**values)
    check_declared(method)
    switches = switches_of(method)
    if method.needs("noise"):
        switches.pop("noise", None)  # the kind of noise has it
    known: dict[str, Any] = {
        name: switches.pop(name)
        for name, allowed in _OF_KERNELS.items()
        if name in switches and (not allowed or switches[name] in allowed)
    }
    return Kind(
        method.rule,
        noise=method.noise_of(values),
        normalize={**method.constants, **values}["normalize"] > 0,
        others=tuple(sorted(switches.items())),
        **known,
    )


def groups(learners: Sequence[Learner], rows: Sequence[int]) -> list[tuple[Group, list[int]]]:
    """Group learners by kind and by the class that defines their rule.

    Args:
        learners: the population.
        rows: the row of a chunk that each learner uses.

    Returns:
        In the order of their first learners, each group and its learners' indices in ``learners``.
    """
    places: dict[tuple[Kind, Any], list[int]] = {}
    for place, learner in enumerate(learners):
        places.setdefault((learner.kind, METHODS[learner.method]._origin), []).append(place)
    return [
        (_group(kind, [learners[i] for i in own], [rows[i] for i in own]), own) for (kind, _), own in places.items()
    ]


def _group(kind: Kind, learners: list[Learner], rows: list[int]) -> Group:
    numbers = [_numbers(learner) for learner in learners]
    return Group(
        kind=kind,
        method=learners[0].variant,
        seeds=torch.tensor([learner.seed for learner in learners]),
        rows=torch.tensor(rows),
        values={
            name: torch.tensor([own.get(name, 0.0) for own in numbers], dtype=torch.float64)
            for name in dict.fromkeys(name for own in numbers for name in own)
        },
    )


def _numbers(learner: Learner) -> dict[str, float]:
    """Return the numbers in ``h``: numeric settings, and the constants that replace others."""
    method = METHODS[learner.method]
    numbers = dict(method.constants)
    for name, value in learner.values:
        if pair := method.settings[name].pair:
            numbers |= dict(zip(pair, value, strict=True))
        elif isinstance(value, float):
            numbers[name] = value
    return numbers


def _chosen(method: str, name: str, setting: Setting, value: Any) -> Any:
    if value is not None:
        return setting.check(name, value)
    if setting.default is ...:
        raise ValueError(f"method={method!r} needs {name}; pass a value, such as {name}={setting.example!r}")
    return setting.default


def _refuse(method: str, name: str, given_as: str, value: Any) -> None:
    """Raise ValueError for a setting that the method does not have, unless its value disables it."""
    having = [cls for cls in METHODS.values() if name in cls.settings]
    own = METHODS[method]
    harmless = [getattr(own, name)] if hasattr(own, name) else [cls.settings[name].off for cls in having]
    if value is None or value in harmless:
        return
    alike = [cls for cls in METHODS.values() if getattr(cls, name, None) == value or cls in having]
    alike.sort(key=lambda cls: cls.rule != own.rule)  # methods with the same rule come first
    takes = ", ".join(n for n, setting in own.settings.items() if not setting.quiet)
    takes = takes if " " in takes else f"only {takes}"
    instead = f", or use method={alike[0].name!r}" if alike else ""
    raise ValueError(
        f"{given_as}={value!r} does not apply to method={method!r}, which takes {takes}; leave it out{instead}"
    )


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2⁶³ − 1, not {value!r}")
    return int(value)
