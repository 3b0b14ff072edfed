"""Registry of methods."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from upgd import plugins
from upgd.methods.method import PHASES, Method

__all__ = ["ALIASES", "METHODS", "canonical", "get", "register"]

AnyMethod = TypeVar("AnyMethod", bound=type[Method])

#: Former names of settings, which may occur in scripts, commands and stores.
ALIASES = {"wise": "granularity"}
_REGISTERED: dict[str, type[Method]] = {}


class _Methods(Mapping[str, type[Method]]):
    """All methods by name, including those of plugins; methods that are registered later appear as well."""

    def __getitem__(self, name: str) -> type[Method]:
        found = plugins.find(_REGISTERED, name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        plugins.discover()
        return iter(_REGISTERED)

    def __len__(self) -> int:
        plugins.discover()
        return len(_REGISTERED)


METHODS: Mapping[str, type[Method]] = _Methods()


def register(cls: AnyMethod) -> AnyMethod:
    """Register a method; use it as a class decorator, ``@upgd.methods.register``."""
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"a method is a subclass of upgd.methods.Method, not {cls!r}")
    if not cls.name or not all(part.isidentifier() or part.isdigit() for part in cls.name.split("-")):
        raise ValueError(
            f"{cls.__name__} needs a name such as 'l2-init', in letters, digits and hyphens; it has {cls.name!r}"
        )
    known = _REGISTERED.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"a method named {cls.name!r} already exists, {known.__module__}.{known.__qualname__}; choose another name"
        )
    if former := [name for name in cls.settings if name in ALIASES]:
        raise ValueError(
            f"{cls.__name__} has a setting {former[0]!r}, the former name of {ALIASES[former[0]]!r}; give it another name"
        )
    alike = next((own for own in _REGISTERED.values() if own.rule == cls.name and not issubclass(own, cls)), None)
    if known is None and alike is not None:  # learners of one rule run in one batch
        raise ValueError(f"{cls.name!r} is the name of the rule of the method {alike.name!r}; choose another name")
    if not hasattr(cls, "update") and not hasattr(cls, "optimizer_class"):
        raise TypeError(f"{cls.__name__} needs a rule: a method update(self, {', '.join(PHASES['update'][:4])}, …)")
    cls.rule = cls.rule or cls.name  # if it has its base's name and another computation
    _REGISTERED[cls.name] = cls
    plugins.remember("method", cls.name, cls)
    return cls


def canonical(name: str) -> str:
    """Return the current name of a setting."""
    return ALIASES.get(name, name)


def get(name: str) -> type[Method]:
    """Return the method of that name, or raise ValueError with a suggestion."""
    found = plugins.find(_REGISTERED, name)
    if found is None:
        near = get_close_matches(str(name), _REGISTERED, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(_REGISTERED)}, or {plugins.REMEDY}"
        raise ValueError(f"there is no method {name!r}; {hint}")
    return found
