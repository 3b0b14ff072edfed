"""The fast CPU backend: one learner per core at a time, in loops that numba compiles to vector instructions.

From the outside in: ``backend.py`` brings learners and samples to the kernels, ``network.py`` says which networks they run,
``learner.py`` takes one learner through its samples, ``sample.py`` has what a sample says and ``updates.py`` what the
learner does about it. ``generated.py`` makes a kernel from the rule of any other method; ``generated_backend.py`` runs it.
``layers.py`` and ``convolution.py`` have the loops over weights, ``layout.py`` where everything lies in memory. Noise, the
functions that rules may call and what numba needs to be told are in :mod:`upgd.kernels`.
"""

from upgd.population.kernel.backend import BY_HAND, KernelBackend, unsupported
from upgd.population.kernel.generated_backend import GeneratedBackend, cannot_generate

__all__ = ["BY_HAND", "GeneratedBackend", "KernelBackend", "cannot_generate", "unsupported"]
