"""Initial weights on a GPU equal those on the CPU."""

import pytest
import torch

from upgd.networks import ConvNet, initial_parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_initial_weights_have_the_same_bits() -> None:
    here, there = (initial_parameters(network, range(3)) for network in (ConvNet(), ConvNet().cuda()))
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)
