"""Utility of weights and features: the true utility, cheap approximations, and their rank correlation.

The utility of a weight (or of a feature, that is, a hidden unit or channel) is the increase of the loss when it is removed.
:func:`true_weights` and :func:`true_features` compute it exactly, one removal at a time. The approximations cost at most
one backward pass:

====================  =====================================  ==========================================
measure               of a weight ``w``                      of a feature ``h`` with a gate ``m`` = 1
====================  =====================================  ==========================================
first_order           ``−g·w``                               ``−∂L/∂m``
second_order          ``½·h_w·w² − g·w``                     ``½·∂²L/∂m² − ∂L/∂m``
magnitude             ``|w|``                                mean ``|h|`` over the batch
squared_gradient      ``g²``                                 ``(∂L/∂m)²``
random                standard normal                        standard normal
====================  =====================================  ==========================================

All functions take ``(model, criterion, x, y)`` and return a dict. It maps parameter names to tensors of the parameters'
shapes, or the names of the modules whose outputs are the features to vectors with one entry per unit or channel. They do not
modify the model's parameters, gradients or buffers. :func:`correlation` compares two such dicts by rank.

The gate of a feature is behind its activation; ``at="input"`` puts it before the activation, as in section 3.2 of the paper.

:func:`propagate` and :func:`conservation` implement the paper's two theorems about the approximations.
"""

from upgd.utility.approximations import first_order, magnitude, random, second_order, squared_gradient
from upgd.utility.ranks import average_ranks, correlation, spearman
from upgd.utility.theorems import Balance, Terms, conservation, propagate
from upgd.utility.truth import true_features, true_weights

__all__ = [
    "Balance",
    "Terms",
    "average_ranks",
    "conservation",
    "correlation",
    "first_order",
    "magnitude",
    "propagate",
    "random",
    "second_order",
    "spearman",
    "squared_gradient",
    "true_features",
    "true_weights",
]
