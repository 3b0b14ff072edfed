"""Ctrl-C at the right moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interrupts_wait"]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the ``with`` block; then it has the effect that it would have had.

    Only the main thread receives signals; in other threads, and where somebody outside Python handles the signal, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    pressed = False

    def remember(*_: Any) -> None:
        nonlocal pressed
        pressed = True

    usual = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:
            signal.raise_signal(signal.SIGINT)
