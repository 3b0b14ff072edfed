import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from population_on_gpu import CHECKS


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_on_the_gpu(check) -> None:
    check()
