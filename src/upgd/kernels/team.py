"""Run a compiled function on all threads at once, using torch's threads if its OpenMP library can be called.

After a parallel operation, OpenMP's threads spin for a while and wait for the next one. A second pool of threads would
compete with them for the cores.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["number_of_thread", "run_on_all"]

_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_process = os.getpid()


def run_on_all(threads: int, address: int, argument: int) -> None:
    """Call the C function at an address once in each thread, including the calling one.

    Args:
        threads: the number of threads.
        address: of a function with one argument, a pointer.
        argument: the address that is passed to it.
    """
    if threads == 1:
        _Function(address)(argument)
    elif (start := _openmp()) is not None and os.getpid() == _process:  # OpenMP's threads do not survive a fork
        start(address, argument, threads, 0)
    else:
        call = _Function(address)
        others = [_pool(os.getpid(), threads - 1).submit(call, argument) for _ in range(threads - 1)]
        call(argument)
        for other in others:
            other.result()


@functools.cache
def number_of_thread() -> int:
    """Return the address of a function that returns the number of the calling thread in OpenMP; 0 if there is none."""
    if _openmp() is None:
        return 0
    return ctypes.cast(ctypes.CDLL(torch._C.__file__).omp_get_thread_num, ctypes.c_void_p).value or 0


@functools.cache
def _openmp() -> Callable[..., Any] | None:
    """Return the function that starts a parallel region, from the OpenMP library that torch uses."""
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # the search includes the dependencies of this library
    except (AttributeError, OSError):
        return None
    start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return start


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="upgd-step")
