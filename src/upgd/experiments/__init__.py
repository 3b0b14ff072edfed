"""Experiments: declared in a few lines, run once, killed without loss, compared fairly.

>>> import upgd.experiments as ex
>>> result = ex.run("output-permuted-digits", {"upgd": {"lr": 0.03}, "sgd": {"lr": 0.03}}, seeds=2, steps=100)
>>> sorted(result.frame())[:3]
['accuracy', 'backend', 'beta_utility']
"""

from upgd.experiments.declare import Experiment
from upgd.experiments.files import load
from upgd.experiments.results import Results
from upgd.experiments.running import run

__all__ = ["Experiment", "Results", "load", "run"]
