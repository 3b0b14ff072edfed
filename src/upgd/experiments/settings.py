"""What a learner may have besides a method and a seed.

These are :class:`upgd.population.Learner`'s, written out, so that those who only read results need not load torch.
"""

__all__ = ["MOST_LEARNERS", "SETTINGS", "SWITCHES"]

SETTINGS = ("lr", "beta_utility", "sigma", "weight_decay", "wise", "scaling", "order", "noise", "betas", "eps")
#: Those that make a variant of a method, each with what it is unless somebody says otherwise.
SWITCHES = {"wise": "weight", "scaling": "global", "order": 1, "noise": "white"}
#: The most learners of one experiment, and so the most seeds: to list and plan these takes half a minute.
MOST_LEARNERS = 200_000
