"""Number of threads that torch uses for a step.

A step of small learners consists of a hundred operations of a few microseconds each. Threads do not speed them up, and if
other processes use the same cores, every operation waits for its slowest thread, which takes ten to twenty times longer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["share", "worth"]

#: Learners × parameters of a step above which threads pay off.
SMALL = 1 << 20

#: Environment variables by which users set the number of threads.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: Default numbers of torch: one per core or processor, or the number set by :func:`share`.
_usual: set[int] = set()


@contextmanager
def worth(work: int) -> Iterator[None]:
    """Context manager that uses one thread if a step is small, unless the user has chosen a number of threads.

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
    """Use this number of threads, because other processes compute at the same time."""
    torch.set_num_threads(threads)
    _usual.add(threads)


def _chosen_by_user(threads: int) -> bool:
    """Return whether the user chose this number: a variable is set, or the number is not one of torch's defaults."""
    return any(os.environ.get(name) for name in _VARIABLES) or threads not in _usual_numbers()


def _usual_numbers() -> set[int]:
    cores = {os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        cores.add(len(os.sched_getaffinity(0)))
    return cores | {count // 2 for count in cores} | _usual  # half, because a core may have two hardware threads
