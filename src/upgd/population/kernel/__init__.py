"""The fast CPU backend: one learner per core at a time, in loops that numba compiles to vector instructions.

From the outside in: ``backend.py`` passes learners and samples to the kernels, ``network.py`` determines the supported
networks, ``learner.py`` advances one learner through its samples, ``sample.py`` computes the derivatives for a sample and
``updates.py`` applies the update. ``generated.py`` generates the update from the rule of any other method, and ``resets.py``
its resets of hidden units, which ``generated_backend.py`` runs. ``layers.py`` and ``convolution.py`` contain the loops over
weights, and ``layout.py`` the memory layout. Noise, the functions that rules may call, and numba's settings are in
:mod:`upgd.kernels`.
"""

from upgd.population.kernel.backend import KernelBackend, by_hand, unsupported
from upgd.population.kernel.generated_backend import GeneratedBackend

__all__ = ["GeneratedBackend", "KernelBackend", "by_hand", "unsupported"]
