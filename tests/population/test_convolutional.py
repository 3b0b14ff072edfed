"""The on-chip layout of a learner with convolutions, without a GPU."""

import shutil

import pytest
import torch
from test_cuda_planner import GENERATED, H200
from torch import nn

from upgd.networks import ConvNet
from upgd.population import Learner
from upgd.population.backend import Group
from upgd.population.cuda import backend, compiler, convolutional, unsupported
from upgd.population.cuda.generated import program
from upgd.population.cuda.source import source
from upgd.population.spec import groups

SUPPORTED = [group for group in GENERATED if not hasattr(group.method, "reset_units")]


def test_stages_of_the_papers_convnet() -> None:
    first, second, *dense = convolutional.stages(ConvNet((3, 32, 32), 10), "output")
    assert (first.inputs, first.windows, second.inputs, second.windows) == (75, (14, 14), 150, (5, 5))
    assert [stage.inputs for stage in dense] == [400, 120, 84]
    assert [stage.gated for stage in (first, second, *dense)] == [False] * 4 + [True]
    assert sum(stage.parameters for stage in (first, second, *dense)) == 62_006


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), "knows the shape of its images"),
        (ConvNet((16, 16), 2, "crelu"), "is another CReLU"),
        (nn.Sequential(nn.Conv1d(1, 2, 3)), "is a Conv1d"),
    ],
)
def test_convolutions_that_are_not_supported(network: nn.Module, reason: str) -> None:
    found = convolutional.stages(network)
    assert isinstance(found, str)
    assert reason in found


def test_places_of_a_convnet_do_not_overlap_and_fit() -> None:
    stages = convolutional.stages(ConvNet((3, 32, 32), 10))
    for group in SUPPORTED:
        made = program(group.method)
        plans = [p for n in convolutional.CLUSTERS if (p := convolutional.plan(stages, group.kind, n, H200, made))]
        assert plans, group.method.name
        for plan in plans:
            assert plan.shared_bytes <= H200
            assert sum(layer.rows * plan.cluster for layer in plan.layers) >= sum(stage.outputs for stage in stages)
            text = source(plan, "mse", False, backend.parts())
            assert f"CLUSTER = {plan.cluster}," in text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.slow
@pytest.mark.parametrize("group", SUPPORTED, ids=lambda group: group.method.name)
def test_a_convnet_compiles(group: Group) -> None:
    stages = convolutional.stages(ConvNet((3, 32, 32), 10))
    plan = convolutional.plan(stages, group.kind, 6, H200, program(group.method))
    assert len(compiler._by_nvcc(source(plan, "cross_entropy", True, backend.parts()), "sm_90")) > 1000


def test_resets_and_convolutions_do_not_go_together(monkeypatch) -> None:
    monkeypatch.setattr(backend, "program", lambda method: None)
    (group, _), *_ = groups([Learner(method="redo", lr=0.01, seed=0)], [0])
    reason = unsupported(ConvNet((3, 32, 32), 10), group, torch.device("cuda"), torch.float32)
    assert "resets hidden units" in reason
