import gpu_checks
import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", gpu_checks.CHECKS.values(), ids=gpu_checks.CHECKS.keys())
def test_on_the_gpu(check: object) -> None:
    assert callable(check)
    check()
