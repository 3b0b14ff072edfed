"""Continual learning from non-stationary streams.

The subpackages, from top to bottom; each imports only those below it:

- ``cli`` is the command line, and ``report`` the HTML report.
- ``experiments`` declares, runs, compares and reproduces experiments; ``store`` holds their results.
- ``population`` trains many online learners at once, each on a stream of ``streams``.
- ``optim`` provides the methods as torch optimizers; ``Monitor`` and ``utility`` inspect a network.
- ``methods`` has one class per method, ``curvature`` implements HesScale, and ``networks`` and ``data`` provide networks
  and data sets.
- ``rules`` contains the mathematics, ``noise`` the random numbers.

``plugins`` finds third-party components, and ``writing`` writes files atomically.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upgd import methods as methods
    from upgd import rules as rules
    from upgd import utility
    from upgd.curvature import HesScale
    from upgd.experiments.analysis.stores import open as open
    from upgd.experiments.analysis.stores import record
    from upgd.monitor import Monitor
    from upgd.normalization import OnlineNorm
    from upgd.optim import PGD, UPGD, UPS, AdaUPGD, FeatureUPGD, FeatureUPS, ShrinkAndPerturb

__version__ = "0.2.0"

__all__ = [
    "PGD",
    "UPGD",
    "UPS",
    "AdaUPGD",
    "FeatureUPGD",
    "FeatureUPS",
    "HesScale",
    "Monitor",
    "OnlineNorm",
    "ShrinkAndPerturb",
    "__version__",
    "record",
    "utility",
]

# Importing torch takes a second or two, and `upgd --help` does not need it, so names are resolved on first use.
_MODULES = ("curvature", "methods", "monitor", "noise", "optim", "rules", "utility")
_HOMES = {
    "HesScale": "upgd.curvature",
    "Monitor": "upgd.monitor",
    "OnlineNorm": "upgd.normalization",
    "open": "upgd.experiments.analysis.stores",  # not in __all__: a star import must not replace the built-in open
    "record": "upgd.experiments.analysis.stores",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"upgd.{name}")
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'upgd' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES.get(name, "upgd.optim")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES, *_MODULES})
