"""Deferred handling of Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["interrupts_wait", "say_stopping"]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Context manager that defers Ctrl-C to the end of the ``with`` block.

    If Ctrl-C would end the program, a message is printed at once, because a block that compiles can take long. Only the main
    thread receives signals; in other threads, or if the signal is not handled by Python, this does nothing.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    pressed = False

    def remember(*_: Any) -> None:
        nonlocal pressed
        first, pressed = not pressed, True
        if first and usual is signal.default_int_handler:
            say_stopping()

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def say_stopping() -> None:
    """Tell the user that Ctrl-C was received."""
    with suppress(OSError):  # the terminal may be gone
        print("stopping after the current block of steps …", file=sys.stderr, flush=True)
