"""Experiments on a GPU."""

import numpy as np
import pytest
import torch

import upgd.experiments as ex

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EXPERIMENT = ex.Experiment(
    "output-permuted-digits",
    {"sgd": {"lr": [0.03, 0.01]}, "upgd": {"lr": 0.03, "sigma": 0.001}, "adamw": {"lr": 0.001}},
    seeds=4,
    steps=1_000,
    options={"task_length": 250},
)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gpu_gives_the_results_of_a_cpu(tmp_path, workers):
    on_cpu = ex.run(EXPERIMENT, device="cpu", backend="torch")
    on_gpu = ex.run(EXPERIMENT, store=tmp_path / "r.db", device="cuda", workers=workers)
    assert all(torch.cuda.get_device_name() == record.device for record in on_gpu.records)
    for ours, theirs in zip(on_gpu.records, on_cpu.records, strict=True):
        assert ours.key == theirs.key
        np.testing.assert_allclose(ours.accuracy, theirs.accuracy, atol=0.05)
    assert len(ex.run(EXPERIMENT, store=tmp_path / "r.db", device="cpu")) == len(on_gpu)  # nothing is computed again
