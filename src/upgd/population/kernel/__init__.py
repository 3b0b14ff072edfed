"""The fast backend on the CPU: one learner per core at a time, with loops that numba compiles to vector instructions.

From the outside in: ``backend.py`` brings learners and samples to the kernels, ``network.py`` says which networks they run,
``learner.py`` takes one learner through its samples, ``sample.py`` has what a sample says and ``updates.py`` what the
learner does about it, ``layers.py`` and ``convolution.py`` the loops over weights, ``normals.py`` the noise, ``layout.py``
where everything lies in memory, and ``machine.py`` what numba needs to be told.
"""

from upgd.population.kernel.backend import KernelBackend, unsupported

__all__ = ["KernelBackend", "unsupported"]
