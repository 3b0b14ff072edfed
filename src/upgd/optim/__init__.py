"""The methods as torch optimizers."""

from upgd.optim.pgd import PGD, ShrinkAndPerturb
from upgd.optim.upgd import UPGD
from upgd.optim.ups import UPS

__all__ = ["PGD", "UPGD", "UPS", "ShrinkAndPerturb"]
