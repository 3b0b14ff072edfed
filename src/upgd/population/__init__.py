"""Train hundreds of online learners at once, each with the same results as on its own.

>>> from upgd.networks import MLP
>>> from upgd.population import Learner, Population
>>> from upgd.streams import make
>>> learners = [Learner(method="upgd", lr=0.01, sigma=0.01, seed=seed) for seed in range(3)]
>>> population = Population(MLP((64, 32, 10)), learners, backend="torch")
>>> population.run(make("input-permuted-digits"), steps=20).loss.shape
(1, 3)

``engine`` defines :class:`Population` and ``spec`` :class:`Learner`. ``choose`` selects a backend for each group of learners
of one kind; ``backend`` defines the interface. ``torch_backend`` runs every method, with derivatives from ``chain``
(hand-written) or ``functional`` (any module), and ``graphed`` replays it on a GPU. ``kernel`` and ``cuda`` contain compiled
backends for the CPU and for GPUs. ``network`` parses a network for all of them. ``diagnostics`` computes diagnostics of the
learners.
"""

from upgd.population.diagnostics import Diagnostics
from upgd.population.engine import Population
from upgd.population.result import Result
from upgd.population.spec import METHODS, Learner

__all__ = ["METHODS", "Diagnostics", "Learner", "Population", "Result"]
