"""How useful a weight or a feature is: the truth, its cheap approximations, and how well these order things.

The utility of a weight (or of a feature, that is, of a hidden unit or channel) is what the loss would rise by without it.
:func:`true_weights` and :func:`true_features` measure exactly that, one removal at a time. The approximations cost one
backward pass at most:

====================  =====================================  ==========================================
measure               of a weight ``w``                      of a feature ``h`` with a gate ``m`` = 1
====================  =====================================  ==========================================
first_order           ``−g·w``                               ``−∂L/∂m``
second_order          ``½·h_w·w² − g·w``                     ``½·∂²L/∂m² − ∂L/∂m``
magnitude             ``|w|``                                mean ``|h|`` over the batch
squared_gradient      ``g²``                                 ``(∂L/∂m)²``
random                standard normal                        standard normal
====================  =====================================  ==========================================

All take ``(model, criterion, x, y)`` and return a dict: names of parameters to tensors of their shapes, or names of the
modules whose outputs are the features to vectors with one entry per unit or channel. None of them touches the model's
parameters, gradients or buffers. :func:`correlation` compares two such dicts by rank.

:func:`propagate` and :func:`conservation` are the paper's two theorems about the approximations.
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
