"""Learning from streams that never stop changing."""

from upgd.optim import PGD, UPGD, UPS, ShrinkAndPerturb

__version__ = "0.1.0"

__all__ = ["PGD", "UPGD", "UPS", "ShrinkAndPerturb", "__version__"]
