"""Fused kernels for a GPU with clusters (Hopper and newer).

From the outside in: ``backend`` brings learners and samples to the GPU, ``network`` says which networks it runs,
``planner`` where each number of a learner lies, ``schedule`` which cluster computes which learner. ``generated`` writes a
method's rule in CUDA C++, unless it is one of those in ``by_hand.cuh``. ``compiler`` and ``driver`` compile and start
``onchip.cu``, the kernel.
"""

from upgd.population.cuda.backend import CudaBackend, missing, unsupported

__all__ = ["CudaBackend", "missing", "unsupported"]
