"""The methods as torch optimizers.

``upgd``, ``ada_upgd``, ``ups`` and ``pgd`` compare weights, ``feature_upgd`` hidden units, which ``features`` finds
in a model. ``from_method`` makes an optimizer of any other method, ``unit_method`` of one that acts
on hidden units. Modules with an underscore have what they share.
"""

from upgd.optim.ada_upgd import AdaUPGD
from upgd.optim.feature_upgd import FeatureUPGD, FeatureUPS
from upgd.optim.pgd import PGD, ShrinkAndPerturb
from upgd.optim.upgd import UPGD
from upgd.optim.ups import UPS

__all__ = ["PGD", "UPGD", "UPS", "AdaUPGD", "FeatureUPGD", "FeatureUPS", "ShrinkAndPerturb"]
