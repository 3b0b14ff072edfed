"""Learning from streams that never stop changing."""

from upgd import utility
from upgd.curvature import HesScale
from upgd.monitor import Monitor
from upgd.optim import PGD, UPGD, UPS, FeatureUPGD, FeatureUPS, ShrinkAndPerturb

__version__ = "0.1.0"

__all__ = [
    "PGD",
    "UPGD",
    "UPS",
    "FeatureUPGD",
    "FeatureUPS",
    "HesScale",
    "Monitor",
    "ShrinkAndPerturb",
    "__version__",
    "utility",
]
