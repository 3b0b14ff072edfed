"""What a learner may have besides a method and a seed.

These are :class:`upgd.population.Learner`'s, written out, so that those who only read results need not load torch.
"""

__all__ = ["SETTINGS"]

SETTINGS = ("lr", "beta_utility", "sigma", "weight_decay", "wise", "scaling", "order", "noise", "betas", "eps")
