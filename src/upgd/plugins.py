"""Plugins: third-party modules that register methods, streams, networks, data sets and diagnostics.

A plugin is any module that calls one of the ``register`` functions on import. Python programs import it directly. Commands
find it through ``--plugin MODULE``, the environment variable ``UPGD_PLUGINS`` (modules separated by commas), or the entry
points of an installed package:

- ``upgd.plugins``: modules that register their components;
- ``upgd.methods``: subclasses of :class:`upgd.methods.Method`, which are registered if their module does not do so.

The variable and the entry points are evaluated when an unknown name, or the list of all names, is requested. A plugin that
cannot be imported is skipped with a warning.

This module also records the origin of everything that is registered, so that worker processes can import it and results can
refer to it.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

__all__ = [
    "GROUPS",
    "REMEDY",
    "VARIABLE",
    "PluginError",
    "add",
    "changed",
    "check_elsewhere",
    "discover",
    "failed",
    "find",
    "is_again",
    "is_installed",
    "load",
    "load_elsewhere",
    "modules",
    "remember",
    "third_party",
    "versions",
]

log = logging.getLogger("upgd.plugins")

VARIABLE = "UPGD_PLUGINS"
GROUPS = ("upgd.plugins", "upgd.methods")
#: How to make an unknown name known, for messages.
REMEDY = "load the plug-in that registers it (--plugin MODULE, or import it in Python)"

Thing = TypeVar("Thing", bound=Callable[..., Any])
Found = TypeVar("Found")

#: The modules of registered third-party components, by kind and name.
_ORIGINS: dict[tuple[str, str], str] = {}
#: Digests of the sources of these modules, by name; and what precedes a digest in a version.
_SOURCES: dict[str, str] = {}
_SOURCE = "source "
#: The modules that were passed to :func:`load`.
_LOADED: dict[str, None] = {}
#: The modules and entry points that :func:`discover` skipped.
_FAILED: dict[str, None] = {}
#: Distributions of entry points, as "NAME VERSION", by top-level module.
_DISTRIBUTIONS: dict[str, str] = {}
_lock = RLock()
_discovered = False


class PluginError(ImportError):
    """A plugin cannot be used; the message names the plugin and the reason."""


def load(*names: str) -> None:
    """Import plugins by module name. The modules may be in the current folder.

    Raises:
        PluginError: If a module cannot be imported; the message names the module and the reason.
    """
    for name in names:
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise PluginError(f"a plugin is the name of a module, such as my_method for my_method.py, not {name!r}")
        with _explained(name):
            _make_current_folder_importable()
            import_module(name)
        _LOADED[name] = None


def discover() -> None:
    """Load the plugins in ``UPGD_PLUGINS`` and in entry points, once. Plugins that cannot be loaded cause a warning."""
    global _discovered
    with _lock:
        if _discovered:  # or in progress, because plugins may request names as well
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
                        import_module(group).register(thing)  # registering twice is harmless
                    _LOADED[point.module] = None


def add(registry: dict[str, Any], kind: str, name: str, thing: Thing) -> Thing:
    """Register an object under an unused name, and record its origin."""
    if name in registry and not is_again(thing, registry[name]):
        raise ValueError(f"a {kind} named {name!r} already exists; choose another name")
    registry[name] = thing
    remember(kind, name, thing)
    return thing


def find(registry: Mapping[str, Found], name: str) -> Found | None:
    """Return the object registered under a name, after loading plugins if necessary; None if there is none."""
    if name not in registry:
        discover()
    return registry.get(name)


def remember(kind: str, name: str, thing: Any) -> None:
    """Record the module that must be imported to register this object, unless it is part of upgd."""
    module = _module(thing)
    if _is_ours(module):  # one of our classes, registered by a plugin under another name
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
    if not _is_ours(module) and not module.startswith(("importlib.", "_frozen_importlib")):
        _ORIGINS[kind, name] = module
        _SOURCES[module] = _digest(module)


def is_again(new: Callable[..., Any], old: Callable[..., Any]) -> bool:
    """Return whether this is the same definition, executed again in a notebook cell or a reloaded module."""
    names = [(one.__module__, getattr(one, "__qualname__", "<lambda>")) for one in (new, old)]
    return names[0] == names[1] and "<lambda>" not in names[0][1]


def modules() -> tuple[str, ...]:
    """Return the modules that another process must import to have the same registrations."""
    return tuple(name for name in dict.fromkeys((*_LOADED, *_ORIGINS.values())) if not _is_main(name))


def failed() -> tuple[str, ...]:
    """Return the names of the modules or entry points of plugins that could not be loaded."""
    return tuple(_FAILED)


def third_party(used: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the components (kind, name) that are not part of upgd and that another process must register by name."""
    return [one for one in used if one in _ORIGINS and one[0] != "backend"]  # backends are passed as classes


def load_elsewhere(names: Iterable[str], needed: Iterable[tuple[str, str]], path: Iterable[str] = ()) -> None:
    """Load the result of :func:`modules` in another process.

    Args:
        names: the modules.
        needed: the result of :func:`third_party` in the first process.
        path: the module search path of the first process; searched last, for modules that are not installed here.

    Raises:
        ValueError: If one of the components is still missing, because the first process registered it in a function.
    """
    sys.path += [folder for folder in path if folder and folder not in sys.path and os.path.isdir(folder)]
    load(*names)
    for kind, name in needed:
        if (kind, name) not in _ORIGINS:
            raise ValueError(
                f"the {kind} {name!r} is registered by a function that other processes do not call; register it at the top "
                "level of a module, or use one worker"
            )


def check_elsewhere(used: Iterable[tuple[str, str]], *, runs_main: bool) -> None:
    """Raise an error if another process cannot import one of the components (kind, name).

    Args:
        used: the required components.
        runs_main: whether the other process runs the main module of this one, as spawned processes do.
    """
    main = sys.modules.get("__main__")
    runs_main = runs_main and (getattr(main, "__file__", None) or getattr(main, "__spec__", None)) is not None
    for kind, name in used:
        if _is_main(_ORIGINS.get((kind, name), "")) and not runs_main:
            raise ValueError(
                f"the {kind} {name!r} is defined in this program or notebook, which other processes cannot import; move it "
                "to a module and import that, or use one worker"
            )


def versions(used: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the modules of third-party components (kind, name) with their distribution and version and a digest of the
    source, such as ``{"decay_home.method": "decay-home 0.1.0, source 5f1c2a90"}``; what is unknown is left out."""
    found = (_ORIGINS[one] for one in used if one in _ORIGINS)
    return {module: _version(module) for module in sorted(set(found))}


def is_installed(version: str) -> bool:
    """Return whether a version of :func:`versions` is that of an installed distribution."""
    return bool(version) and not version.startswith(_SOURCE)


def changed(former: Mapping[str, str]) -> list[str]:
    """Return the modules of former :func:`versions` that are in use with another source or distribution."""
    now = {module: _version(module) for module in former if module in _SOURCES}
    return [module for module, version in now.items() if _SOURCE in former[module] and former[module] != version]


def _version(module: str) -> str:
    source = _SOURCES.get(module, "")
    return ", ".join(filter(None, [_distribution(module), source and f"{_SOURCE}{source}"]))


def _digest(module: str) -> str:
    """Return a digest of a module's source; none of the main program or notebook, which changes for other reasons."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or _is_main(module):
        return ""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]
    except OSError:  # in an archive
        return ""


@cache
def _distribution(module: str) -> str:
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
    """Context manager that turns any error in a third-party module into a one-sentence PluginError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            reason = f"no module {error.name!r} in this folder or among the installed packages"
        else:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        raise PluginError(f"the plugin {name} cannot be loaded ({reason})") from error


@contextmanager
def _left_out_if_broken(source: str) -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        _FAILED[source.removeprefix(f"{VARIABLE}=")] = None
        log.warning("upgd: %s, so it is skipped (%s)", error, source)


def _make_current_folder_importable() -> None:
    """Add the current folder to the end of the module path, so that nothing is shadowed. Console scripts lack it."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
