"""How many threads torch is given for a step.

A step of small learners is a hundred operations of a few microseconds each. Threads make them no faster, and where other
processes want the same cores, every operation waits for the thread that is late: ten to twenty times longer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["share", "worth"]

#: Learners × parameters of a step from which on threads are worth it.
SMALL = 1 << 20

#: How users tell the libraries below torch.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: What torch takes by itself: one for each core or processor, or what :func:`share` has set.
_usual: set[int] = set()


@contextmanager
def worth(work: int) -> Iterator[None]:
    """One thread if a step is small, and then as many as before. A number that the user has chosen stays.

    Args:
        work: learners × parameters.
    """
    before = torch.get_num_threads()
    if work >= SMALL or before == 1 or _chosen_by_user(before):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def share(threads: int) -> None:
    """Use so many threads in this process, because others compute beside it."""
    torch.set_num_threads(threads)
    _usual.add(threads)


def _chosen_by_user(threads: int) -> bool:
    """Whether somebody wants just so many: a variable says so, or the number is not one that torch takes by itself."""
    return any(os.environ.get(name) for name in _VARIABLES) or threads not in _usual_numbers()


def _usual_numbers() -> set[int]:
    cores = {os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        cores.add(len(os.sched_getaffinity(0)))
    return cores | {count // 2 for count in cores} | _usual  # half: a core may be two processors
