"""Fused kernels for a GPU with clusters (Hopper and newer): see :mod:`.backend`, :mod:`.planner` and ``onchip.cu``."""

from upgd.population.cuda.backend import CudaBackend, missing, unsupported

__all__ = ["CudaBackend", "missing", "unsupported"]
