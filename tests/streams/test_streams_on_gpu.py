"""Samples on a GPU equal those on the CPU."""

import pytest
import torch

from upgd.streams import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["stationary", "input-permuted", "output-permuted", "random-label", "class-pairs"])
def test_images_have_the_same_bits(family: str) -> None:
    options = {"examples": 70, "epochs": 10} if family == "random-label" else {"task_length": 700}
    stream = make(f"{family}-digits", **options)
    here, there = (stream.chunk(range(40), 3_000, 1_500, device) for device in ("cpu", "cuda"))
    assert there.targets.is_cuda
    assert torch.equal(here.index, there.index.cpu())
    assert torch.equal(here.targets, there.targets.cpu())
    assert torch.equal(here.inputs(), there.inputs().cpu())
    assert torch.equal(here.inputs_at(900), there.inputs_at(900).cpu())
    assert there.source.data_ptr() == stream.chunk([0], 0, 1, "cuda").source.data_ptr()


@pytest.mark.parametrize("name", ["input-permuted-digits", "output-permuted-digits", "bit-flipping"])
def test_mixtures_and_bits_have_the_same_bits(name: str) -> None:
    options = {"task_length": 100} if name == "bit-flipping" else {"task_length": 700, "drift": 300}
    here, there = (make(name, **options).chunk(range(40), 3_000, 1_500, device) for device in ("cpu", "cuda"))
    assert torch.equal(here.targets, there.targets.cpu())
    assert torch.equal(here.inputs(), there.inputs().cpu())


@pytest.mark.parametrize("name", ["toy-changing-inputs", "toy-changing-outputs", "utility-quality"])
def test_computed_inputs_differ_by_rounding_alone(name: str) -> None:
    here, there = (make(name).chunk(range(40), 150, 500, device) for device in ("cpu", "cuda"))
    assert torch.allclose(here.dense, there.dense.cpu(), rtol=3e-7, atol=1e-9)
    assert torch.allclose(here.targets, there.targets.cpu(), rtol=1e-6, atol=1e-6)


def test_stepping_through_a_chunk_never_waits_for_the_device() -> None:
    chunk = make("input-permuted-digits", task_length=10).chunk(range(4), 0, 30, "cuda")
    chunk.inputs_at(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for offset in range(30):
            chunk.inputs_at(offset)
    finally:
        torch.cuda.set_sync_debug_mode("default")
