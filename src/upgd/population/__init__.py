"""Hundreds of online learners at once, each exactly what it would be alone.

>>> from upgd.networks import MLP
>>> from upgd.population import Learner, Population
>>> from upgd.streams import make
>>> learners = [Learner(method="upgd", lr=0.01, sigma=0.01, seed=seed) for seed in range(3)]
>>> population = Population(MLP((64, 32, 10)), learners, backend="torch")
>>> population.run(make("input-permuted-digits"), steps=20).loss.shape
(1, 3)
"""

from upgd.population.diagnostics import Diagnostics
from upgd.population.engine import Population
from upgd.population.result import Result
from upgd.population.spec import METHODS, Learner

__all__ = ["METHODS", "Diagnostics", "Learner", "Population", "Result"]
