"""The methods as torch optimizers."""

from upgd.optim.ada_upgd import AdaUPGD
from upgd.optim.feature_upgd import FeatureUPGD, FeatureUPS
from upgd.optim.pgd import PGD, ShrinkAndPerturb
from upgd.optim.upgd import UPGD
from upgd.optim.ups import UPS

__all__ = ["PGD", "UPGD", "UPS", "AdaUPGD", "FeatureUPGD", "FeatureUPS", "ShrinkAndPerturb"]
