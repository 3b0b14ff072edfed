"""The functions of the CUDA driver for launching kernels on clusters, which torch does not provide."""

import ctypes
import functools
import sys
from typing import Any

import torch

__all__ = ["Kernel", "active_clusters", "shared_bytes"]

_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_…
_NON_PORTABLE_CLUSTER_SIZE = 14
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_…
_SHARED_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_…

#: An empty kernel, for querying how many clusters of a size fit.
_PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0"


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    if status := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory available to a thread block, in bytes."""
    value = ctypes.c_int()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()
        _call("cuDeviceGetAttribute", ctypes.byref(value), _SHARED_PER_BLOCK_OPTIN, torch.cuda.current_device())
    return value.value


@functools.cache
def active_clusters(device: torch.device, cluster: int, threads: int, shared: int) -> int:
    """Return how many clusters of this number of blocks the device runs at once; 0 if none."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()
        return Kernel(_PROBE, b"probe", cluster, threads, shared).active


class Kernel:
    """A kernel launched on clusters, in the current context.

    Args:
        code: a cubin or PTX.
        name: the name of the function.
        cluster: blocks per cluster.
        threads: threads per block.
        shared: bytes of shared memory per block.

    Attributes:
        active: number of clusters that the device runs at once.
    """

    def __init__(self, code: bytes, name: bytes, cluster: int, threads: int, shared: int) -> None:
        self._cluster, self._threads, self._shared = cluster, threads, shared
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._module), code)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name)
        _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_SIZE, shared)
        if cluster > 8:
            _call("cuFuncSetAttribute", self._function, _NON_PORTABLE_CLUSTER_SIZE, 1)
        self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        self.active = self._count_active()

    def launch(self, clusters: int, arguments: ctypes.Structure, stream: int) -> None:
        """Launch this number of clusters on a stream; ``arguments`` is the kernel's only parameter."""
        configuration = self._configuration(clusters, stream)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _call("cuLaunchKernelEx", ctypes.byref(configuration), self._function, parameters, None)

    def _configuration(self, clusters: int, stream: int = 0) -> _Launch:
        grid, block = (ctypes.c_uint * 3)(clusters * self._cluster, 1, 1), (ctypes.c_uint * 3)(self._threads, 1, 1)
        return _Launch(grid, block, self._shared, stream, ctypes.pointer(self._attribute), 1)

    def _count_active(self) -> int:
        count = ctypes.c_int()
        # Query with the grid of one cluster: the answer depends on the device, not on the grid.
        _call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._function, ctypes.byref(self._configuration(1)))
        return count.value
