"""Ctrl-C at the right moment."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["interrupts_wait", "say_stopping"]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the ``with`` block; then it has the effect that it would have had.

    Where it would end the program, it is answered at once: a block that compiles takes longer than people wait.
    Only the main thread receives signals; in other threads, and where somebody outside Python handles the signal, this
    does nothing.
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
    """Tell people that Ctrl-C was heard."""
    with suppress(OSError):  # the terminal may be gone
        print("stopping as soon as the steps in work are done …", file=sys.stderr, flush=True)
