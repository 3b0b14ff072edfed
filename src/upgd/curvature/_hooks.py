"""Hooks whose lifetime is bound to their owner.

A module holds its hooks. If a hook held a strong reference to its owner, the owner would stay alive and be called as long
as the module exists. Hooks therefore hold weak references, and they are removed as soon as the owner is deleted, without
waiting for the garbage collector.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Hook:
    """A forward hook, or forward pre-hook, that calls a method of its owner.

    Copying a module copies its hooks. The copied hook has no owner and removes itself on the first call, unless a copy of
    the owner adopts it; see :meth:`Hooks.adopt`.

    Args:
        method: the name of the method.
        context: positional arguments of the method, before those that torch passes to hooks.
    """

    def __init__(self, method: str, *context: Any) -> None:
        self.owner: Callable[[], Any] = nobody
        self._method = method
        self._context = context

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        owner = self.owner()
        if owner is None:
            _leave(module, self)
            return None
        return getattr(owner, self._method)(*self._context, module, *args)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"owner": nobody}


class Hooks:
    """All hooks of one owner. An owner that supports copying calls :meth:`adopt` in its ``__setstate__``."""

    def __init__(self, owner: object) -> None:
        self._hooks: list[Hook] = []
        self._handles: list[RemovableHandle] = []
        self.adopt(owner)

    def adopt(self, owner: object) -> None:
        """Make ``owner`` the owner of the hooks."""
        self._owner = weakref.ref(owner)
        for hook in self._hooks:
            hook.owner = self._owner
        remove_with(owner, self._handles)

    def add(self, register: Callable[..., RemovableHandle], method: str, *context: Any) -> RemovableHandle:
        """Register a hook with ``register``, such as ``module.register_forward_hook``, that calls a method of the owner."""
        hook = Hook(method, *context)
        hook.owner = self._owner
        handle = register(hook)
        self._hooks.append(hook)
        self._handles.append(handle)
        return handle

    def remove(self) -> None:
        """Remove the hooks from their modules."""
        remove_all(self._handles)
        self._hooks.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}


def remove_with(owner: object, handles: list[RemovableHandle]) -> None:
    """Remove the hooks that are in the list when ``owner`` is deleted."""
    weakref.finalize(owner, remove_all, handles).atexit = False


def remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def nobody() -> None:
    """Stand in for the weak reference of a hook without an owner."""


def _leave(module: nn.Module, hook: Hook) -> None:
    registries = (
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    )
    for hooks, *marks in registries:
        for number in [number for number, other in hooks.items() if other is hook]:
            for registry in (hooks, *marks):
                registry.pop(number, None)  # type: ignore[attr-defined]
