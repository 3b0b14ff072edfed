"""Plug-ins: modules of other people that register methods, streams, networks, data sets and diagnostics.

A plug-in is any module that calls one of the ``register`` functions when it is imported. Python programs import it. Commands
find it through ``--plugin MODULE``, the environment variable ``UPGD_PLUGINS`` (modules separated by commas), or the entry
points of an installed package:

- ``upgd.plugins``: modules that register what they have;
- ``upgd.methods``: subclasses of :class:`upgd.methods.Method`, which are registered if their module does not do so.

The variable and the entry points are looked up when somebody asks for a name that is not there, or for all names. A plug-in
that cannot be imported is left out with a warning.

This module also knows where each registered thing comes from, so that worker processes can import it and results can say it.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module, metadata
from threading import RLock
from typing import Any, TypeVar

__all__ = [
    "GROUPS",
    "VARIABLE",
    "PluginError",
    "add",
    "check_elsewhere",
    "discover",
    "failed",
    "find",
    "is_again",
    "load",
    "load_elsewhere",
    "modules",
    "remember",
    "versions",
]

log = logging.getLogger("upgd.plugins")

VARIABLE = "UPGD_PLUGINS"
GROUPS = ("upgd.plugins", "upgd.methods")

Thing = TypeVar("Thing", bound=Callable[..., Any])
Found = TypeVar("Found")

#: The modules of what is registered and not ours, by kind and name.
_ORIGINS: dict[tuple[str, str], str] = {}
#: The modules that :func:`load` was asked for.
_LOADED: dict[str, None] = {}
#: The modules and entry points that :func:`discover` left out.
_FAILED: dict[str, None] = {}
#: The distributions of entry points, as "NAME VERSION", by their top-level module.
_DISTRIBUTIONS: dict[str, str] = {}
_lock = RLock()
_discovered = False


class PluginError(ImportError):
    """A plug-in that cannot be used; the message says which one and why."""


def load(*names: str) -> None:
    """Import plug-ins by the names of their modules, which may lie in the current folder.

    Raises:
        PluginError: naming the module that cannot be imported, and the reason.
    """
    for name in names:
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise PluginError(f"a plug-in is the name of a module, such as my_method for my_method.py, not {name!r}")
        with _explained(name):
            _make_current_folder_importable()
            import_module(name)
        _LOADED[name] = None


def discover() -> None:
    """Load what ``UPGD_PLUGINS`` and entry points name, once. What cannot be loaded is left out, with a warning."""
    global _discovered
    with _lock:
        if _discovered:  # or on its way: a plug-in may ask for names, too
            return
        _discovered = True
        for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
            with _left_out_if_broken(f"{VARIABLE}={name}"):
                load(name)
        for group in GROUPS:
            for point in metadata.entry_points(group=group):
                if point.dist is not None:
                    _DISTRIBUTIONS.setdefault(point.module.partition(".")[0], f"{point.dist.name} {point.dist.version}")
                with _left_out_if_broken(f"{group}: {point.name}"), _explained(point.value):
                    thing = point.load()
                    if group == "upgd.methods":
                        import_module(group).register(thing)  # a second time if its module did: no harm
                    _LOADED[point.module] = None


def add(registry: dict[str, Any], kind: str, name: str, thing: Thing) -> Thing:
    """Register a thing under a name, which must be free, and remember where it comes from."""
    if name in registry and not is_again(thing, registry[name]):
        raise ValueError(f"a {kind} named {name!r} already exists; choose another name")
    registry[name] = thing
    remember(kind, name, thing)
    return thing


def find(registry: Mapping[str, Found], name: str) -> Found | None:
    """What is registered under a name, if need be by a plug-in that is loaded now."""
    if name not in registry:
        discover()
    return registry.get(name)


def remember(kind: str, name: str, thing: Any) -> None:
    """Note the module that must be imported for this to be registered, unless it is ours."""
    module = _module(thing)
    if _is_ours(module):  # one of our classes, registered by somebody under another name
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
    if not _is_ours(module) and not module.startswith(("importlib.", "_frozen_importlib")):
        _ORIGINS[kind, name] = module


def is_again(new: Callable[..., Any], old: Callable[..., Any]) -> bool:
    """Whether it is the same definition, run again: a notebook's cell, or a module that is loaded anew."""
    names = [(one.__module__, getattr(one, "__qualname__", "<lambda>")) for one in (new, old)]
    return names[0] == names[1] and "<lambda>" not in names[0][1]


def modules() -> tuple[str, ...]:
    """The modules that another process must import to know what this one knows."""
    return tuple(name for name in dict.fromkeys((*_LOADED, *_ORIGINS.values())) if not _is_main(name))


def failed() -> tuple[str, ...]:
    """The plug-ins that could not be loaded: the names of their modules or entry points."""
    return tuple(_FAILED)


def load_elsewhere(names: Iterable[str], path: Iterable[str] = ()) -> None:
    """In another process: load what :func:`modules` gave.

    Args:
        names: the modules.
        path: where the first process looks for modules; looked at last, for those that are not installed here.
    """
    sys.path += [folder for folder in path if folder and folder not in sys.path and os.path.isdir(folder)]
    load(*names)


def check_elsewhere(used: Iterable[tuple[str, str]], *, runs_main: bool) -> None:
    """Refuse things (kind, name) that another process cannot import.

    Args:
        used: what it will need.
        runs_main: whether the other process begins with the main module of this one, as spawned ones do.
    """
    main = sys.modules.get("__main__")
    runs_main = runs_main and (getattr(main, "__file__", None) or getattr(main, "__spec__", None)) is not None
    for kind, name in used:
        if _is_main(_ORIGINS.get((kind, name), "")) and not runs_main:
            raise ValueError(
                f"the {kind} {name!r} is defined in this program or notebook, which other processes cannot import; put it "
                "into a module of its own and import that, or use one worker"
            )


def versions(used: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The modules that those of the things (kind, name) come from that are not ours, each with its distribution and version,
    such as ``{"decay_home.method": "decay-home 0.1.0"}``; an empty text if there is none."""
    found = (_ORIGINS[one] for one in used if one in _ORIGINS)
    return {module: _version(module) for module in sorted(set(found))}


@cache
def _version(module: str) -> str:
    top = module.partition(".")[0]
    if top not in _DISTRIBUTIONS:
        for name in metadata.packages_distributions().get(top, ())[:1]:
            _DISTRIBUTIONS[top] = f"{name} {metadata.version(name)}"
    own = getattr(sys.modules.get(top), "__version__", "")
    return _DISTRIBUTIONS.get(top) or (f"{top} {own}" if own else "")


def _module(thing: Any) -> str:
    while isinstance(thing, partial):
        thing = thing.func
    return getattr(thing, "__module__", None) or type(thing).__module__


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "upgd"


def _is_main(module: str) -> bool:
    return module in ("__main__", "__mp_main__")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever goes wrong in somebody's module becomes one sentence; Ctrl-C stays what it is."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name!r} in this folder or among the installed packages"
        else:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        raise PluginError(f"the plug-in {name} cannot be loaded ({reason})") from error


@contextmanager
def _left_out_if_broken(source: str) -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        _FAILED[source.removeprefix(f"{VARIABLE}=")] = None
        log.warning("upgd: %s, and is left out (%s)", error, source)


def _make_current_folder_importable() -> None:
    """As for ``python -m``, but last on the path, so that nothing is shadowed. An installed command does not have it."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
