import general_on_gpu  # noqa: F401 (here and below: they put their checks among CHECKS)
import population_on_gpu  # noqa: F401
import pytest
import torch
from gpu_cases import CHECKS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str) -> None:
    CHECKS[name].run("cuda")
