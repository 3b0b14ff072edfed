"""Several processes: parameters sharded by FSDP2, where the global maximum, the norms and the noise reach across the
shards, and copies of a model under DistributedDataParallel, which must not drift apart. Optimizers that hold only part of
the parameters, in several processes or during one backward pass."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from fused_checks import interpreted
from optimizer_cases import Example
from processes import WORLD, in_processes
from torch import Tensor, nn

import upgd
from upgd.optim.from_method import MethodOptimizer

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def model(width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(steps)
    ]


# -------------------------------------------------------------------------------------------------------------- sharded


def layout(name: str) -> nn.Module:
    """Return a model that is sharded over all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world = torch.distributed.get_world_size()
    network = model(5 if name.startswith("fsdp") else 8)
    if name == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for part in (network[0], network[2], network):
            fully_shard(part, mesh=mesh)
    elif name == "fsdp, replicated":
        fully_shard(network, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard")))
    elif name == "tensor parallel":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif name == "tensor parallel, one layer":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(network, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    else:
        meshes = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(network, meshes["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(network, mesh=meshes["data"])
    return network


def sharded_model() -> nn.Module:
    return layout("fsdp")


def whole(param: Tensor) -> Tensor:
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def of_method(params: Any, **options: Any) -> Any:
    """The example has all kinds of reductions except a mean."""
    return MethodOptimizer(params, Example, **options)


#: Functions that build optimizers, with options, and the layouts of shards to try.
SHARDED: dict[int, tuple[tuple[str, ...], list[tuple[Any, dict[str, Any]]]]] = {
    2: (
        ("fsdp", "tensor parallel", "tensor parallel, one layer"),
        [
            (upgd.UPGD, {}),
            (upgd.AdaUPGD, {"scaling": "local", "foreach": False}),
            (upgd.PGD, {"noise": "anticorrelated"}),
            (of_method, {"noise": "anticorrelated"}),
        ],
    ),
    # Three rows and four processes: one has no part of a parameter.
    4: (
        ("fsdp", "fsdp, replicated", "tensor parallel, then fsdp"),
        [(upgd.UPGD, {"scaling": "local"}), (upgd.AdaUPGD, {"foreach": False}), (of_method, {"scaling": "local"})],
    ),
}


def check_layouts(rank: int) -> None:
    """One optimizer on a model in one piece and one on its shards learn the same, and have the same gates. Without a seed of
    the optimizer's own the noise is from torch's, or a generator, which differ between the processes."""
    names, builds = SHARDED[torch.distributed.get_world_size()]
    for name, (build, given), own in itertools.product(names, builds, (False, True)):
        if own and build is not upgd.UPGD:
            continue
        options = {"lr": 0.1, "sigma": 0.5, **given}
        if own:
            options["generator"] = torch.Generator().manual_seed(rank)
        parts = layout(name)
        torch.manual_seed(rank)
        optimizer = build(parts.parameters(), **options)
        train(parts, optimizer, steps=4)
        one = model(5 if name.startswith("fsdp") else 8)
        alone = build(one.parameters(), **options, seed=optimizer.param_groups[0]["seed"])
        train(one, alone, steps=4)
        for a, b in zip(one.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(whole(b), a.detach(), rtol=1e-12, atol=1e-14)
        for a, b in zip(alone.gates().values(), optimizer.gates().values(), strict=True):
            torch.testing.assert_close(whole(b), a, rtol=1e-11, atol=1e-13)


def check_accident(rank: int) -> None:
    """A NaN in one shard excludes the whole tensor from the maximum, in all processes."""
    one, parts = model(), layout("fsdp")
    for network in (one, parts):
        optimizer = upgd.UPGD(network.parameters(), lr=0.1, sigma=0.0)
        x, y = batches(1)[0]
        nn.functional.cross_entropy(network(x), y).backward()
        grad = network[0].weight.grad
        if network is one:
            grad[4, 2] = math.nan
        elif rank == 1:
            grad.to_local()[-1, 2] = math.nan
        optimizer.step()
    for a, b in zip(one.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a.detach(), rtol=1e-12, atol=1e-14, equal_nan=True)


def check_monitor(rank: int) -> None:
    """Diagnostics of sharded parameters, gradients and gates are those of the whole ones, here with an odd number of rows."""
    seen = []
    for network in (model(), sharded_model()):
        optimizer = upgd.UPGD(network.parameters(), lr=0.1, seed=1)
        with upgd.Monitor(network, optimizer) as monitor:
            train(network, optimizer, steps=2)
            seen.append((monitor.snapshot(), monitor.summary()))
    (expected, words), (ours, our_words) = seen
    assert ours.keys() == expected.keys()
    assert "gate_histogram/0.weight" in ours
    for name, figure in ours.items():
        assert figure == pytest.approx(expected[name], rel=1e-9), name
    assert our_words == words


def check_two(rank: int) -> None:
    check_layouts(rank)
    check_accident(rank)
    check_monitor(rank)
    with pytest.raises(TypeError, match=r"'0' \(FSDPLinear\): its parameters are sharded.*for first-order utility$"):
        upgd.HesScale(sharded_model(), nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match=r"'0.weight' is sharded over processes.*use the weight-wise optimizer$"):
        upgd.FeatureUPGD(sharded_model())


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")
def test_sharded_parameters_learn_like_unsharded_ones() -> None:
    in_processes(check_two)
    in_processes(check_layouts, world=4)


def check_fused_shards(rank: int) -> None:
    """The GPU's kernels, in Triton's interpreter: as one process with the whole model, also where shards begin with an odd
    entry or are empty. What the kernels do not support is refused or, by default, left to other implementations."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from upgd.optim import _fused, _narrow

    _fused._KINDS["cpu"] = _fused._KINDS["cuda"]
    _narrow.LEAST = 1  # otherwise, all parameters would be too small for 8 bits
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def network(width: int) -> nn.Sequential:
        return model(width).float()

    def in_shards(width: int) -> nn.Sequential:
        network = model(width).float()
        fully_shard(network[0], mesh=mesh)
        fully_shard(network, mesh=mesh)
        return network

    options: dict[str, Any]
    for build, options, tolerance in (
        (upgd.UPGD, {}, 1e-5),
        (upgd.AdaUPGD, {"noise": "anticorrelated", "lr": 0.01}, 1e-5),
        (upgd.PGD, {}, 1e-5),
        (upgd.UPGD, {"state_dtype": torch.bfloat16}, 2e-3),
        (upgd.UPGD, {"state_dtype": torch.uint8}, 1e-5),
        (upgd.UPGD, {"scaling": "local"}, 1e-5),
        (upgd.AdaUPGD, {"scaling": "local", "state_dtype": torch.uint8, "lr": 0.01}, 1e-5),
    ):
        options = {"lr": 0.1, "sigma": 0.5, "seed": 3, **options}
        parts, one = in_shards(5), network(5)
        for learner, own in ((parts, {"fused": True}), (one, {"foreach": False})):
            optimizer = build(learner.parameters(), **options, **own)
            for x, y in batches(2):
                learner.zero_grad()
                nn.functional.cross_entropy(learner(x.float()), y).backward()
                optimizer.step()
        for a, b in zip(one.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(whole(b), a.detach(), rtol=tolerance, atol=tolerance)

    # Some parameters are sharded and others are not, and one has a NaN in one process.
    mixed, one = layout("tensor parallel, one layer").float(), network(8)
    for learner, own in ((mixed, {"fused": True}), (one, {"foreach": False})):
        optimizer = upgd.UPGD(learner.parameters(), lr=0.1, sigma=0.0, **own)
        x, y = batches(1)[0]
        nn.functional.cross_entropy(learner(x.float()), y).backward()
        grad = learner[0].weight.grad
        if learner is one:
            grad[2, 2] = math.nan
        elif rank == 1:
            grad.to_local()[0, 2] = math.nan
        optimizer.step()
    for a, b in zip(one.parameters(), mixed.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)

    wide = nn.Linear(2051, 5, bias=False)  # shards of several blocks
    fully_shard(wide, mesh=mesh)
    drawn = -wide.weight.full_tensor().detach()
    wide(torch.ones(1, 2051)).sum().mul(0).backward()
    upgd.PGD(wide.parameters(), 1.0, sigma=1.0, seed=7, fused=True).step()
    drawn = -(drawn + wide.weight.full_tensor().detach())
    expected = upgd.noise.parameter_normals(7, 1, 0, 0, drawn.numel())
    torch.testing.assert_close(drawn.flatten(), expected, rtol=0, atol=1e-4)

    parts = in_shards(5)
    nn.functional.cross_entropy(parts(batches(1)[0][0].float()), batches(1)[0][1]).backward()

    def groups() -> list[dict[str, Any]]:
        return [{"params": list(parts[n].parameters()), "scaling": kind} for n, kind in ((0, "local"), (2, "global"))]

    with pytest.raises(RuntimeError, match="because parameters are sharded, and the kernels support only"):
        upgd.UPGD(groups(), fused=True).step()
    upgd.UPGD(groups()).step()


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
def test_fused_steps_of_shards() -> None:
    in_processes(check_fused_shards, world=4)


CHECKPOINTED = {
    "AdaUPGD": (upgd.AdaUPGD, {"noise": "anticorrelated"}),
    "UPGD": (upgd.UPGD, {"scaling": "local"}),
    "PGD": (upgd.PGD, {}),
    "16 bits": (upgd.AdaUPGD, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "8 bits": (upgd.AdaUPGD, {"state_dtype": torch.uint8}),
}


def check_checkpoint(rank: int, folder: Path, saves: bool) -> None:
    """Save after three steps and continue, or load and continue."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from upgd.optim import _narrow

    _narrow.LEAST = 1  # otherwise, all parameters would be too small for 8 bits
    for name, (cls, options) in CHECKPOINTED.items():
        network = sharded_model()
        torch.manual_seed(rank if saves else 9)
        optimizer = cls(network.parameters(), lr=0.1, sigma=0.5, **options)
        if saves:
            train(network, optimizer, steps=3)
        parts = dict(zip(("model", "optimizer"), get_state_dict(network, optimizer), strict=True))
        if saves:
            dcp.save(parts, checkpoint_id=folder / name)
        else:
            dcp.load(parts, checkpoint_id=folder / name)
            set_state_dict(network, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        train(network, optimizer, steps=3)
        state = optimizer.state[network[0].weight]
        kinds = {value.dtype for name, value in state.items() if name != "step"}
        assert options["state_dtype"] in kinds if "state_dtype" in options else kinds <= {torch.float64}
        final = [whole(param) for param in network.parameters()]
        if not saves:
            torch.testing.assert_close(final, torch.load(folder / f"{name}.pt"), rtol=1e-12, atol=1e-14)
        elif rank == 0:
            torch.save(final, folder / f"{name}.pt")


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")
def test_a_checkpoint_of_two_processes_resumes_in_one_and_in_four(tmp_path: Path) -> None:
    in_processes(check_checkpoint, tmp_path, True)
    for world in (1, 4):
        in_processes(check_checkpoint, tmp_path, False, world=world)


# --------------------------------------------------------------------------------------------------------------- copies


def average(tensor: Tensor | None) -> None:
    """As in docs/optimizers.md."""
    if tensor is not None:
        torch.distributed.all_reduce(tensor)
        tensor /= torch.distributed.get_world_size()


def final(rank: int | None, build: Callable[..., Any], **options: Any) -> list[Tensor]:
    """The parameters after some steps: of a process which has its share of each batch, or, for None, of one that has all.

    Gates and curvature are averaged over processes, as DistributedDataParallel does it with gradients.
    """
    network, criterion = model(), nn.CrossEntropyLoss()
    learner = network if rank is None else nn.parallel.DistributedDataParallel(network)
    curvature = upgd.HesScale(network, criterion) if options.pop("second", False) else None
    optimizer = build(network, curvature, **options)
    for x, y in batches(5):
        share = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
        optimizer.zero_grad()
        criterion(learner(x[share]), y[share]).backward()
        if rank is not None:
            for feature in getattr(optimizer, "features", []):
                average(feature.grad)
                if curvature is not None:
                    average(curvature.feature_diagonal(feature.module))
            if curvature is not None and not hasattr(optimizer, "features"):
                for param in network.parameters():
                    average(curvature.diagonal(param))
        optimizer.step()
    return [param.detach() for param in network.parameters()]


def weights(network: nn.Module, curvature: Any, **options: Any) -> upgd.UPGD:
    return upgd.UPGD(network.parameters(), lr=0.1, curvature=curvature, **options)


def features(network: nn.Module, curvature: Any, **options: Any) -> upgd.FeatureUPGD:
    return upgd.FeatureUPGD(network, lr=0.1, curvature=curvature, **options)


def from_method(network: nn.Module, _: Any, **options: Any) -> Any:
    return upgd.methods.optimizer("pgd", network.parameters(), lr=0.1, **options)


def check_copies(rank: int) -> None:
    for build in (weights, features):
        for second in (False, True):
            ours, whole = (
                final(who, build, second=second, sigma=0.5, generator=torch.Generator().manual_seed(3))
                for who in (rank, None)
            )
            torch.testing.assert_close(ours, whole, rtol=1e-11, atol=1e-13)


def test_copies_with_one_seed_learn_as_one_process_does() -> None:
    in_processes(check_copies)


def check_unequal_seeds(rank: int) -> None:
    """The processes share the noise, and nothing else."""

    def seeded(build: Callable[..., Any]) -> Callable[..., Any]:
        def seed_and_build(*args: Any, **options: Any) -> Any:
            torch.manual_seed(rank)  # after the model, which is the same in all processes
            return build(*args, **options)

        return seed_and_build

    for build in (weights, features, from_method):
        ours = final(rank, seeded(build), sigma=0.5)
        state = torch.get_rng_state()
        for param in ours:
            first = param.clone()
            torch.distributed.broadcast(first, 0)
            torch.testing.assert_close(param, first, rtol=1e-11, atol=1e-13)
        states = [torch.empty_like(state) for _ in range(WORLD)]
        torch.distributed.all_gather(states, state)
        assert not torch.equal(*states)


def check_unequal_generators(rank: int) -> None:
    message = (
        r"generator of UPGD has another state.*drift apart; seed it equally in all processes, or leave generator out"
    )
    with pytest.warns(UserWarning, match=message) if rank else contextlib.nullcontext():
        final(rank, weights, sigma=0.5, generator=torch.Generator().manual_seed(rank))


def test_copies_with_unequal_seeds_agree_on_the_noise_or_warn() -> None:
    in_processes(check_unequal_seeds)
    in_processes(check_unequal_generators)


# ----------------------------------------------------------------------------------------------------------- partitions


def single() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3, bias=False)).double()


def train(network: nn.Module, *optimizers: Any, steps: int = 20, after: Callable[[], None] | None = None) -> None:
    for x, y in batches(steps):
        network.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if after is not None:
            after()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.detach(), a.detach(), rtol=1e-12, atol=1e-14)


def check_zero(rank: int) -> None:
    """ZeroRedundancyOptimizer gives each process the optimizer of its part; with one parameter the second has nothing."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for build, cls in itertools.product((model, single), (upgd.UPGD, upgd.AdaUPGD)):
        whole, parted = build(), build()
        options = {"lr": 0.1, "beta_utility": 0.9, "sigma": 0.0, "weight_decay": 0.01}
        optimizer = cls(whole.parameters(), **options)
        zero = ZeroRedundancyOptimizer(parted.parameters(), cls, **options)
        train(whole, optimizer)
        train(parted, zero)
        assert_same(whole, parted)
        own = {p for group in zero.optim.param_groups for p in group["params"]}
        assert len(own) < len(list(parted.parameters())) or build is single
        gates = zip(whole.parameters(), parted.parameters(), strict=True)
        if rank == 0:  # calls it in one process only
            for right, found in [(optimizer.gates()[a], zero.optim.gates()[b]) for a, b in gates if b in own]:
                torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


def check_process_group(rank: int) -> None:
    """Two processes with two parameters each, which they exchange after every step."""
    whole, parted = model(), model()
    params, options = list(parted.parameters()), {"lr": 0.1, "beta_utility": 0.9, "sigma": 0.0}
    part = upgd.UPGD(params[2 * rank : 2 * rank + 2], **options, process_group=torch.distributed.group.WORLD)

    def exchange() -> None:
        for number, param in enumerate(params):
            torch.distributed.broadcast(param.detach(), number // 2)

    train(whole, upgd.UPGD(whole.parameters(), **options))
    train(parted, part, after=exchange)
    assert_same(whole, parted)
    with pytest.raises(TypeError, match="cannot pickle"):  # rather than a copy without it
        copy.deepcopy(part)


def check_noise_of_partitions(rank: int) -> None:
    """Processes with equal seeds draw different noise for their parts: within ZeroRedundancyOptimizer that of the whole."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    one, parted = model(), model()
    torch.manual_seed(5)
    zero = ZeroRedundancyOptimizer(parted.parameters(), upgd.UPGD, lr=0.1, sigma=0.5)
    train(parted, zero, steps=3)
    seed = zero.optim.param_groups[0]["seed"]
    train(one, upgd.UPGD(one.parameters(), lr=0.1, sigma=0.5, seed=seed), steps=3)
    assert_same(one, parted)

    moved = nn.Parameter(torch.zeros(100))
    moved.grad = torch.zeros(100)
    upgd.UPGD([moved], lr=1.0, sigma=1.0, process_group=torch.distributed.group.WORLD).step()
    parts = [torch.empty(100) for _ in range(WORLD)]
    torch.distributed.all_gather(parts, moved.detach())
    assert abs(float(torch.corrcoef(torch.stack(parts))[0, 1])) < 0.5


def check_partitions(rank: int) -> None:
    check_zero(rank)
    check_process_group(rank)
    check_noise_of_partitions(rank)


def test_partitions_compare_utilities_with_those_of_other_processes() -> None:
    in_processes(check_partitions)


def test_a_process_group_is_one() -> None:
    with pytest.raises(TypeError, match=r"process_group must be.*it is 'all'; try torch.distributed.group.WORLD$"):
        upgd.UPGD(model().parameters(), process_group="all")


def check_flattened(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    world = torch.distributed.group.WORLD
    for original in (False, True):
        flat = FullyShardedDataParallel(model(), use_orig_params=original, device_id=torch.device("cpu"))
        with pytest.warns(UserWarning, match="compares utilities within that part only; pass process_group="):
            upgd.UPGD(flat.parameters())
        with pytest.raises(ValueError, match=r"scaling='local'.*fully_shard"):
            upgd.UPGD(flat.parameters(), scaling="local", process_group=world)
        with pytest.raises(TypeError, match="is sharded over processes"):
            upgd.FeatureUPGD(flat)
        whole = model()
        train(flat, upgd.UPGD(flat.parameters(), lr=0.1, sigma=0.0, process_group=world))
        train(whole, upgd.UPGD(whole.parameters(), lr=0.1, sigma=0.0))
        with FullyShardedDataParallel.summon_full_params(flat):
            found, expected = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (flat, whole))
            torch.testing.assert_close(found, expected)


def test_flattened_shards_need_a_process_group() -> None:
    in_processes(check_flattened)


# --------------------------------------------------------------------------------- optimizers that step during backward


def step_in_backward(network: nn.Module, *partitions: list[nn.Parameter], **options: Any) -> None:
    """Each optimizer steps as soon as the last of its parameters has a gradient."""
    for params in partitions:
        optimizer, missing = upgd.UPGD(params, **options), {*params}

        def step(param: Tensor, optimizer: Any = optimizer, missing: Any = missing, params: Any = params) -> None:
            missing.discard(param)
            if not missing:
                optimizer.step()
                missing.update(params)

        for param in params:
            param.register_post_accumulate_grad_hook(step)
    train(network)


def test_one_optimizer_per_parameter_in_backward_is_warned_of() -> None:
    network = model()
    with pytest.warns(UserWarning, match=r"several UPGD optimizers step during one backward pass.*scaling='local'"):
        step_in_backward(network, *([param] for param in network.parameters()))


def test_torchs_optimizers_in_backward_need_local_scaling() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    for scaling in ("local", "global"):
        network, (x, y) = model(), batches(1)[0]
        _apply_optimizer_in_backward(upgd.UPGD, network.parameters(), {"scaling": scaling, "sigma": 0.0, "lr": 0.1})
        loss = nn.functional.cross_entropy(network(x), y)
        if scaling == "global":
            with pytest.raises(RuntimeError, match=r"scaling='global' compares.*pass scaling='local', or let one UPGD"):
                loss.backward()
            continue
        loss.backward()
        one = model()
        train(one, upgd.UPGD(one.parameters(), scaling="local", sigma=0.0, lr=0.1), steps=1)
        assert_same(one, network)


@pytest.mark.parametrize("scaling", ["global", "local"])
def test_valid_steps_in_backward_do_not_warn(recwarn: pytest.WarningsRecorder, scaling: str) -> None:
    """One optimizer with all parameters, or optimizers with local scaling."""
    network = model()
    params = list(network.parameters())
    step_in_backward(network, *([params] if scaling == "global" else [params[:2], params[2:]]), scaling=scaling)
    assert not recwarn.list
