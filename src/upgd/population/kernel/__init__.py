"""The fast backend on the CPU: one learner per core at a time, with loops that numba compiles to vector instructions.

``network.py`` says which networks it can run, ``backend.py`` brings learners and samples to it, ``learner.py`` takes one
learner through its samples, ``layers.py`` has the passes over the weights, ``normals.py`` the noise, and ``machine.py``
what numba needs to be told.
"""

from upgd.population.kernel.backend import KernelBackend, unsupported

__all__ = ["KernelBackend", "unsupported"]
