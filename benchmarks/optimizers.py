"""The time of ``step()`` relative to torch's AdamW.

Target: on 10 M parameters, UPGD takes at most 2.8 times as long as AdamW(foreach) with noise, and 2.2 times without.
AdamW(fused) is the reference for a fused kernel.
"""

from collections.abc import Callable

import torch
from torch import nn

import upgd
from benchmarks.timing import interleaved

NETWORKS = {
    "784-300-150-10": [(300, 784), (300,), (150, 300), (150,), (10, 150), (10,)],
    "10 M parameters": [(1000, 1000)] * 10,
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW(foreach)": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, fused=True),
    "UPGD σ=0": lambda params: upgd.UPGD(params, sigma=0.0, foreach=True),
    "UPGD": lambda params: upgd.UPGD(params, foreach=True),
    "UPGD local": lambda params: upgd.UPGD(params, scaling="local", foreach=True),
    "UPGD anticorrelated": lambda params: upgd.UPGD(params, noise="anticorrelated", foreach=True),
    "UPGD for-loop": lambda params: upgd.UPGD(params, foreach=False),
    "AdaUPGD σ=0": lambda params: upgd.AdaUPGD(params, sigma=0.0, foreach=True),
    "AdaUPGD": lambda params: upgd.AdaUPGD(params, foreach=True),
    "PGD": lambda params: upgd.PGD(params, 0.01, sigma=0.1, foreach=True),
}


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape) * 0.05) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def main() -> None:
    torch.manual_seed(0)
    for network, shapes in NETWORKS.items():
        jobs = {name: make(parameters(shapes)).step for name, make in OPTIMIZERS.items()}
        size = sum(torch.Size(shape).numel() for shape in shapes)
        noise = torch.empty(size)
        times = interleaved({**jobs, "normal_ alone": noise.normal_}, rounds=9 if size > 1_000_000 else 60)
        print(f"{network}, {torch.get_num_threads()} threads")
        print("| | ms | of AdamW(foreach) |\n|---|---|---|")
        for name, seconds in times.items():
            print(f"| {name} | {1e3 * seconds:.3f} | {seconds / times['AdamW(foreach)']:.2f} |")
        print()


if __name__ == "__main__":
    main()
