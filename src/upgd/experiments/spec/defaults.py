"""Default network, length, number of runs and grid of every problem.

Methods that share a hyperparameter get the same values for it, and only hyperparameters that they have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upgd.methods import METHODS

__all__ = ["PROBLEMS", "Defaults", "defaults", "grid"]

Values = tuple[Any, ...]

#: For the toy problems and stationary MNIST. The paper lists weight decay for the methods that have it; 0 is plain UPGD.
_STATIONARY = {
    "lr": (0.1, 0.01, 0.001, 0.0001),
    "beta_utility": (0.0, 0.9, 0.99, 0.999),
    "sigma": (1.0, 0.1, 0.01, 0.001, 0.0001),
    "weight_decay": (0.0, 0.1, 0.01, 0.001),
}
_PERMUTED = {
    "lr": (0.01, 0.001, 0.0001),
    "beta_utility": (0.999, 0.9999),
    "sigma": (0.01, 0.1, 1.0),
    "weight_decay": (0.0, 0.1, 0.01, 0.001, 0.0001),
}
#: Not from the paper: the embedded digits are small and fast, so the grid is finer where it matters.
_DIGITS = {
    "lr": (0.1, 0.03, 0.01, 0.003, 0.001),
    "beta_utility": (0.9, 0.99, 0.999),
    "sigma": (0.1, 0.01, 0.001),
    "weight_decay": (0.0, 0.01, 0.001, 0.0001),
}
_ADAMW = {
    "betas": tuple((beta1, beta2) for beta1 in (0.0, 0.9) for beta2 in (0.99, 0.999, 0.9999)),
    "eps": (1e-4, 1e-8, 1e-16),
}
_UPS = {
    "lr": (1.0,),
    "sigma": (0.1, 0.01, 0.001, 0.0001, 0.00001),
    "beta_utility": (0.0, 0.9, 0.99, 0.999, 0.9999),
}


@dataclass(frozen=True)
class Defaults:
    """The paper's values for a problem.

    Attributes:
        network: see :mod:`upgd.experiments.spec.architecture`.
        steps: number of steps per run.
        seeds: number of runs.
        grid: values for every hyperparameter that a method may have.
    """

    network: str
    steps: int
    seeds: int
    grid: Mapping[str, Values]


PROBLEMS: dict[str, Defaults] = {
    "toy-changing-inputs": Defaults("300-150:identity", 1_000_000, 20, _STATIONARY),
    "toy-changing-outputs": Defaults("300-150:identity", 1_000_000, 20, _STATIONARY),
    "stationary-mnist": Defaults("300-150", 1_000_000, 20, _STATIONARY),
    "stationary-emnist": Defaults("300-150", 1_000_000, 20, _STATIONARY),
    "input-permuted-mnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "input-permuted-emnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "output-permuted-mnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "output-permuted-emnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "output-permuted-cifar10": Defaults("conv", 1_000_000, 10, _PERMUTED),
    "stationary-cifar10": Defaults("conv", 1_000_000, 10, _STATIONARY),
    # Permuted pixels have no spatial structure for a convolution to use, so use an MLP, as for MNIST.
    "input-permuted-cifar10": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "bit-flipping": Defaults("5", 1_000_000, 20, _STATIONARY),
    "random-label-mnist": Defaults("300-150", 1_500_000, 20, _PERMUTED),
    "random-label-emnist": Defaults("300-150", 1_500_000, 20, _PERMUTED),
    "random-label-cifar10": Defaults("conv", 1_500_000, 10, _PERMUTED),
    "class-pairs-mnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "class-pairs-emnist": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "class-pairs-cifar10": Defaults("conv", 1_000_000, 10, _PERMUTED),
    "label-permuted-features": Defaults("300-150", 1_000_000, 20, _PERMUTED),
    "stationary-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "input-permuted-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "output-permuted-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "random-label-digits": Defaults("100-50", 30_000, 20, _DIGITS),
    "class-pairs-digits": Defaults("100-50", 30_000, 20, _DIGITS),
}


def defaults(problem: str) -> Defaults:
    """Return the paper's values for this problem; for other problems, those for the permuted ones."""
    return PROBLEMS.get(problem, PROBLEMS["input-permuted-mnist"])


def grid(problem: str, method: str) -> dict[str, Values]:
    """Return the values to try for every hyperparameter of the method.

    Example:
        >>> grid("toy-changing-outputs", "sgdw")
        {'lr': (0.1, 0.01, 0.001, 0.0001), 'weight_decay': (0.1, 0.01, 0.001)}
    """
    own = METHODS[method].settings
    if method in ("ups", "ups-even"):
        return {name: choices for name, choices in _UPS.items() if name in own}
    shared = defaults(problem).grid
    values = {
        name: setting.grid
        for name, setting in own.items()
        if setting.grid and name not in shared and name not in _ADAMW
    }
    values = {name: choices for name, choices in shared.items() if name in own} | values
    if "weight_decay" in values and METHODS[method].rule != "utility" and shared is _STATIONARY:
        values["weight_decay"] = tuple(decay for decay in shared["weight_decay"] if decay)
    # Quiet settings are not searched: they belong to Adam, which the method need not use.
    return values | {name: choices for name, choices in _ADAMW.items() if name in own and not own[name].quiet}
