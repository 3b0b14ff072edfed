"""Fused kernels for a GPU with clusters (Hopper and newer).

From top to bottom: ``backend`` passes learners and samples to the GPU, ``network`` determines which networks it supports,
``planner`` defines where each number of a learner is stored, and ``schedule`` which cluster computes which learner.
``convolutional`` is network and planner for networks that start with convolutions, and ``convolution.cu`` their kernel; both
planners use ``places``.
``generated`` prints a method's rule in CUDA C++, unless it is one of those in ``by_hand.cuh``. ``compiler`` and ``driver``
compile and launch ``onchip.cu``, the kernel.
"""

from upgd.population.cuda.backend import CudaBackend, missing, unsupported

__all__ = ["CudaBackend", "missing", "unsupported"]
