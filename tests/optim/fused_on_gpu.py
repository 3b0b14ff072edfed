"""Fused steps on a CUDA device: the checks of ``fused_checks.py``, and GPU-specific ones."""

from functools import partial

import torch
from fused_checks import (
    CASES,
    CODED,
    assert_close,
    built,
    check_accidents_stay_where_they_are,
    check_coded_state,
    check_equals_the_for_loop,
    check_gated_and_local_groups,
    check_gradient_scaling,
    check_lower_precision,
    check_overlap,
    has_noise,
    parameters,
    put_gradients,
)
from torch import Tensor, nn

import upgd
from upgd import noise


def check_special_cases() -> None:
    check_gated_and_local_groups("cuda", steps=20)
    check_accidents_stay_where_they_are("cuda")
    check_gradient_scaling("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        check_lower_precision("cuda", dtype, steps=20)


def check_fused_is_the_default() -> None:
    params = parameters("cuda")
    put_gradients(params, 0)
    optimizer = upgd.UPGD(params)
    optimizer.step()
    assert optimizer.param_groups[0]["seed"] is not None
    assert optimizer.state[params[0]]["step"].is_cuda


def check_noise_is_that_of_the_definition() -> None:
    """Including the last, partial block of a tensor."""
    params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((100_003,), (513, 1029))]
    optimizer = upgd.PGD(params, 1.0, sigma=1.0, seed=2**40 + 5, fused=True)
    for step in (1, 2, 3):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        for number, (param, old) in enumerate(zip(params, before, strict=True)):
            expected = noise.parameter_normals(2**40 + 5, step, number, 0, param.numel(), dtype=torch.float64)
            drawn = (old - param.detach()).cpu().double().reshape(-1)
            assert float((drawn - expected).abs().max()) < 1e-5


def captured(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> torch.cuda.CUDAGraph:
    """Capture a graph of one step, after three eager steps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            put_gradients(params, step, keep=True)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def check_graph_replays_equal_eager_steps() -> None:
    for case in ("UPGD", "UPGD, everything", "AdaUPGD, local, with noise", "a method's own reductions"):
        eager, replayed = parameters("cuda"), parameters("cuda")
        lr = torch.tensor(0.05, device="cuda")
        own, other = built(case, eager, True, lr=0.05), built(case, replayed, True, lr=lr, capturable=True)
        graph = captured(other, replayed)
        for step in range(3):
            put_gradients(eager, step)
            own.step()
        for step in range(3, 30):
            rate = 0.05 / (1 + step)
            lr.fill_(rate)
            own.param_groups[0]["lr"] = rate
            put_gradients(eager, step)
            put_gradients(replayed, step, keep=True)
            graph.replay()
            own.step()
        assert_close(replayed, eager, ulps=50, dtype=torch.float32)


def check_eager_steps_after_replays() -> None:
    """Replays increment the step count, and later eager steps must use it."""
    eager, mixed = parameters("cuda"), parameters("cuda")
    own, other = (built("UPGD with noise", params, True, capturable=True) for params in (eager, mixed))
    graph = captured(other, mixed)
    for step in range(3):
        put_gradients(eager, step)
        own.step()
    for step in range(3, 20):
        put_gradients(eager, step)
        put_gradients(mixed, step, keep=True)
        own.step()
        graph.replay() if step % 4 else other.step()
    assert_close(mixed, eager, ulps=50, dtype=torch.float32)


def check_temporaries() -> None:
    """Fused steps have none. Those of foreach have the size of the largest parameter, or an eighth more with noise."""
    shapes = [(4096, 4096), *[(2048, 2048), (2048,)] * 8]  # 16 M entries and 33 M
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    largest = params[0].nbytes
    for build, options, allowed in (
        (upgd.UPGD, {"fused": True}, 0.01),
        (upgd.AdaUPGD, {"fused": True}, 0.01),
        (upgd.UPGD, {"foreach": True, "sigma": 0.0}, 1.02),
        (upgd.UPGD, {"foreach": True}, 1.14),
        (upgd.AdaUPGD, {"foreach": True, "weight_decay": 0.1, "sigma": 0.0}, 1.27),
    ):
        optimizer = build(params, **options)
        for _ in range(2):
            optimizer.step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        needed = (torch.cuda.max_memory_allocated() - before) / largest
        assert needed <= allowed, (options, needed)


def check_narrow_state() -> None:
    """Equal to the for-loop, except where the last bit determines the rounding."""
    for dtype in (torch.float32, torch.bfloat16):
        finals = []
        for fused in (True, False):
            params = parameters("cuda", dtype)
            optimizer = built("AdaUPGD", params, fused, sigma=0.1, state_dtype=torch.bfloat16, stochastic_rounding=True)
            for step in range(5):
                put_gradients(params, step)
                optimizer.step()
            finals.append([*params, *(optimizer.state[p]["utility"] for p in params)])
        agree = torch.cat([(a == b).flatten() for a, b in zip(*finals, strict=True)]).double().mean()
        assert float(agree) > (0.9 if dtype == torch.bfloat16 else 0.4), float(agree)
        for one, other in zip(*finals, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=5e-3)


def check_compiled_step() -> None:
    eager, compiled = parameters("cuda"), parameters("cuda")
    own, other = built("UPGD with noise", eager, True), built("UPGD with noise", compiled, True)
    step = torch.compile(other.step)
    for n in range(5):
        put_gradients(eager, n)
        put_gradients(compiled, n)
        own.step()
        step()
    assert_close(compiled, eager, ulps=4, dtype=torch.float32)


def check_nothing_waits_for_the_gpu() -> None:
    params = parameters("cuda")
    optimizers = [built("AdaUPGD, local, with noise", params, True), built("UPGD with noise", params, True)]
    for step in range(6):
        put_gradients(params, step)
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        for optimizer in optimizers:
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        if step >= 1:
            torch.cuda.set_sync_debug_mode("error")
            for optimizer in optimizers:
                optimizer.step()
            torch.cuda.set_sync_debug_mode("default")


def check_gradient_scaler() -> None:
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda())
    optimizers = [upgd.UPGD(model.parameters(), seed=1, fused=True) for model in models]
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).cuda()
        losses: list[Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(x).square().mean())
        losses[0].backward()
        scaler.scale(losses[1]).backward()
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
    assert_close(models[1].parameters(), models[0].parameters(), ulps=8, dtype=torch.float32)


CHECKS = {
    # The for-loop computes noise in many small operations.
    **{
        f"fused equals the for-loop: {case}": partial(
            check_equals_the_for_loop, case, "cuda", steps=40 if has_noise(case) else 200
        )
        for case in CASES
    },
    "fused: special cases": check_special_cases,
    "fused is the default": check_fused_is_the_default,
    "fused: noise is that of the definition": check_noise_is_that_of_the_definition,
    "fused: graph replays equal eager steps": check_graph_replays_equal_eager_steps,
    "fused: eager steps after replays": check_eager_steps_after_replays,
    "fused: bfloat16 state": check_narrow_state,
    **{
        f"fused: 8-bit state, {case}": partial(check_coded_state, case, "cuda", dtype, steps=5)
        for case, dtype in zip(CODED, (torch.float32, torch.bfloat16, torch.bfloat16), strict=True)
    },
    "temporaries of fused and foreach steps": check_temporaries,
    "fused: compiled step": check_compiled_step,
    "fused: nothing waits for the GPU": check_nothing_waits_for_the_gpu,
    "fused: gradient scaler": check_gradient_scaler,
    "fused: overlap changes nothing": lambda: check_overlap("cuda", steps=20),
}
