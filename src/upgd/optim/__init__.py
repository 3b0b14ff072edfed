"""The methods as torch optimizers.

``upgd``, ``ada_upgd``, ``ups`` and ``pgd`` are weight-wise, ``feature_upgd`` is feature-wise; ``features`` finds the hidden
units of a model. ``from_method`` derives an optimizer from any other method, and ``unit_method`` from one that acts on hidden
units; ``choosing`` selects one of them. Modules with an underscore contain shared code.
"""

from upgd.optim.ada_upgd import AdaUPGD
from upgd.optim.feature_upgd import FeatureUPGD, FeatureUPS
from upgd.optim.pgd import PGD, ShrinkAndPerturb
from upgd.optim.upgd import UPGD
from upgd.optim.ups import UPS

__all__ = ["PGD", "UPGD", "UPS", "AdaUPGD", "FeatureUPGD", "FeatureUPS", "ShrinkAndPerturb"]
