"""The time of ``step()`` relative to torch's AdamW, on the CPU and, where there is one, on a GPU.

``python -m benchmarks.optimizers [FILE]`` prints tables and puts the times into FILE as JSON. ``python -m
benchmarks.optimizers_page FILE …`` keeps them in docs/results/optimizers.json and writes them into docs/large-models.md.

Targets, relative to AdamW(fused):

- on a GPU with 124 M parameters in fp32: UPGD 1.20 with noise and 1.08 without, AdaUPGD 1.8, an overlapped step less than 1;
- on a GPU with 1.56 B parameters in bf16: UPGD 1.30 with noise and 1.25 without;
- on the CPU with 10 M parameters and 2 threads: UPGD 2 with noise and 1.3 without.

On a GPU UPGD(foreach) without noise takes at most 1.6 times AdamW(foreach).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import upgd

Shapes = list[tuple[int, ...]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def gpt2(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """The shapes of GPT-2's parameters."""
    shapes: Shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


#: On a GPU: shapes, dtype, and whether foreach is measured.
MODELS: dict[str, tuple[Shapes, torch.dtype, bool]] = {
    "124 M parameters, fp32": (gpt2(12, 768), torch.float32, True),
    "1.56 B parameters, bf16": (gpt2(48, 1600), torch.bfloat16, False),
}
#: On the CPU.
NETWORKS: dict[str, Shapes] = {
    "784-300-150-10": [(300, 784), (300,), (150, 300), (150,), (10, 150), (10,)],
    "10 M parameters": [(1000, 1000)] * 10,
}
FUSED: dict[str, Make] = {
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, fused=True),
    "UPGD(fused)": lambda params: upgd.UPGD(params, fused=True),
    "UPGD(fused), σ = 0": lambda params: upgd.UPGD(params, sigma=0.0, fused=True),
    "UPGD(fused), local": lambda params: upgd.UPGD(params, scaling="local", fused=True),
    "UPGD(fused), anticorrelated": lambda params: upgd.UPGD(params, noise="anticorrelated", fused=True),
    "UPGD(fused), overlap": lambda params: upgd.UPGD(params, fused=True, overlap=True),
    "AdaUPGD(fused)": lambda params: upgd.AdaUPGD(params, fused=True),
    "AdaUPGD(fused), σ = 0": lambda params: upgd.AdaUPGD(params, sigma=0.0, fused=True),
}
_BF16: dict[str, Any] = {"state_dtype": torch.bfloat16, "stochastic_rounding": True}
_UINT8: dict[str, Any] = {"state_dtype": torch.uint8, "stochastic_rounding": True}
#: For bf16 parameters on a GPU.
NARROW: dict[str, Make] = {
    "UPGD(fused), bf16 state": lambda params: upgd.UPGD(params, fused=True, **_BF16),
    "AdaUPGD(fused), bf16 state": lambda params: upgd.AdaUPGD(params, fused=True, **_BF16),
    "UPGD(fused), 8-bit state": lambda params: upgd.UPGD(params, fused=True, **_UINT8),
    "AdaUPGD(fused), 8-bit state": lambda params: upgd.AdaUPGD(params, fused=True, **_UINT8),
}
FOREACH: dict[str, Make] = {
    "AdamW(foreach)": lambda params: torch.optim.AdamW(params, foreach=True),
    "UPGD(foreach)": lambda params: upgd.UPGD(params, foreach=True),
    "UPGD(foreach), σ = 0": lambda params: upgd.UPGD(params, sigma=0.0, foreach=True),
}
#: Bytes that a step reads and writes for each parameter of 4 and of 2 bytes, where that is known.
BYTES = {
    "AdamW(fused)": (28, 14),
    "UPGD(fused)": (32, 22),
    "UPGD(fused), σ = 0": (32, 22),
    "UPGD(fused), anticorrelated": (32, 22),
    "UPGD(fused), local": (32, 22),
    "UPGD(fused), overlap": (20, 14),
    "AdaUPGD(fused)": (48, 38),
    "AdaUPGD(fused), σ = 0": (48, 38),
    "UPGD(fused), bf16 state": (None, 16),
    "AdaUPGD(fused), bf16 state": (None, 24),
    "UPGD(fused), 8-bit state": (None, 13),
    "AdaUPGD(fused), 8-bit state": (None, 17),
}


def parameters(shapes: Shapes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = [nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def on_cpu(shapes: Shapes, rounds: int) -> dict[str, float]:
    """Milliseconds; the median of rounds in which each optimizer steps once, in turn."""
    makes = {name: make for name, make in {**FUSED, **FOREACH}.items() if "overlap" not in name}
    jobs = {name: make(parameters(shapes)).step for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(rounds):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def elapsed(job: Callable[[], Any], times: int) -> float:
    """Milliseconds that a job takes several times, with no gap between launches."""
    torch.cuda._sleep(2_000_000)  # so that the launches are there before the GPU gets to them
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        job()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def on_gpu(
    shapes: Shapes, dtype: torch.dtype, foreach: bool, rounds: int = 11, inner: int = 4
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Milliseconds on the GPU, by CUDA events; milliseconds that Python takes to launch a step; megabytes of temporaries.

    All optimizers share the parameters.
    """
    params = parameters(shapes, "cuda", dtype)
    makes = FUSED | (FOREACH if foreach else {}) | ({} if dtype == torch.float32 else NARROW)
    optimizers = {name: make(params) for name, make in makes.items()}
    jobs: dict[str, Callable[[], Any]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    source = torch.empty(sum(param.numel() for param in params), device="cuda")
    target = torch.empty_like(source)
    jobs["copy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        for _ in range(3):
            job()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, job in jobs.items():
            total = 0.0
            if "overlap" in name:  # what the backward pass would do is not part of the time
                for _ in range(inner):
                    for param in params:
                        optimizers[name]._observe_early(param)  # type: ignore[attr-defined]
                    total += elapsed(job, 1)
            else:
                total = elapsed(job, inner)
            times[name].append(total / inner)
    host, memory = {}, {}
    for name, job in jobs.items():
        launches = []
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            job()
            launches.append(time.perf_counter() - begin)
        host[name] = 1e3 * statistics.median(launches)
        memory[name] = 1e-6 * (torch.cuda.max_memory_allocated() - before)
    return {name: statistics.median(found) for name, found in times.items()}, host, memory


def table(
    times: Mapping[str, float],
    narrow: bool,
    host: Mapping[str, float] | None = None,
    memory: Mapping[str, float] | None = None,
) -> str:
    """Rows for a page: milliseconds, times AdamW; on a GPU also bytes per parameter, share of a copy's bandwidth, launch and
    temporaries."""
    copy = times.get("copy")
    more = " bytes per parameter | of a copy's bandwidth | ms to launch | MB of temporaries |" if host else ""
    lines = ["| | ms | of AdamW(fused) |" + more, "|---|---:|---:|" + ("---:|---:|---:|---:|" if host else "")]
    for name, milliseconds in times.items():
        if name == "copy":
            continue
        line = f"| {name} | {milliseconds:.3f} | {milliseconds / times['AdamW(fused)']:.2f} |"
        if host and copy:
            moved = BYTES.get(name, (None, None))[narrow]
            line += f" {moved} | {moved / milliseconds / (8 / copy):.0%} |" if moved else " | |"
            line += f" {host[name]:.2f} | {memory[name]:.0f} |" if memory else f" {host[name]:.2f} | |"
        lines.append(line)
    return "\n".join(lines)


def main(path: str | None = None) -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": {}, "gpu": {}}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        for name, (shapes, dtype, foreach) in MODELS.items():
            times, host, memory = on_gpu(shapes, dtype, foreach)
            narrow = dtype != torch.float32
            found["gpu"][name] = {"times": times, "narrow": narrow, "host": host, "memory": memory}
            torch.cuda.empty_cache()
            print(f"{name}, {found['device']}\n{table(**found['gpu'][name])}\n", flush=True)
    else:
        for name, shapes in NETWORKS.items():
            size = sum(torch.Size(shape).numel() for shape in shapes)
            times = on_cpu(shapes, rounds=15 if size > 1_000_000 else 100)
            found["cpu"][name] = {"times": times, "narrow": False}
            print(f"{name}, {torch.get_num_threads()} threads\n{table(times, False)}\n", flush=True)
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", metavar="FILE", help="where to write the times as JSON")
    main(**vars(parser.parse_args()))
