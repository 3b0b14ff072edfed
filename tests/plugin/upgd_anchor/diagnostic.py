"""A diagnostic: how far the weights have moved."""

from upgd.networks import initial_parameters
from upgd.population import diagnostics


@diagnostics.register("distance_from_start")
def distance_from_start(network, learner, batch):
    start = initial_parameters(network, [learner.seed])
    moved = [(parameter - start[name][0]).square().sum() for name, parameter in network.named_parameters()]
    return sum(moved).sqrt()
