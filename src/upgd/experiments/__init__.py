"""Experiments: declared in a few lines, run once, killed without loss, compared fairly.

>>> import upgd.experiments as ex
>>> methods = {"upgd": {"lr": 0.03}, "sgd": {"lr": [0.1, 0.03]}}
>>> result = ex.run("output-permuted-digits", methods, seeds=2, steps=100, backend="torch")
>>> len(result), [best.entry.method for best in result.best()]
(6, ['upgd', 'sgd'])
"""

from upgd.experiments.declare import Experiment
from upgd.experiments.files import load
from upgd.experiments.results import Results
from upgd.experiments.running import run

__all__ = ["Experiment", "Results", "load", "run"]
