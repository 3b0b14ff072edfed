"""Compile the kernels of optimizers for an H200, without one: ``python tests/optim/compile_for_gpu.py [CASE ...]``.

Triton's interpreter accepts programs that its compiler does not. Steps on tensors of the CPU therefore run with kernels that
are compiled instead of launched. Triton must not be interpreted, so this is a program of its own.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import fused_checks as checks
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from upgd.kernels import cuda_layout
from upgd.optim import _fused

H200 = GPUTarget("cuda", 90, 32)
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
_TYPES |= {torch.bfloat16: "bf16", torch.float16: "fp16"}

#: Types of parameters and of their state.
KINDS = ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.uint8))


class Compiled:
    """A kernel that is compiled for the arguments with which it is called."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.binaries: dict[str, bytes] = {}

    def __getitem__(self, grid: Any) -> Any:
        return self._call

    def _call(self, *args: Any, num_warps: int = 4, **options: Any) -> None:
        given = inspect.signature(self._kernel.fn).bind(*args, **options).arguments
        constants = {param.name: given[param.name] for param in self._kernel.params if param.is_constexpr}
        signature = {name: "constexpr" if name in constants else _type(value) for name, value in given.items()}
        key = f"{signature} {constants} {num_warps}"
        if key not in self.binaries:
            source = ASTSource(self._kernel, signature, constants)
            self.binaries[key] = triton.compile(source, target=H200, options={"num_warps": num_warps}).asm["cubin"]


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return {float: "fp32", int: "i32"}[type(value)]


def compiled(case: str, options: dict[str, Any], dtype: torch.dtype) -> list[Compiled]:
    """Take steps in which all kernels are compiled, and return these."""
    found: dict[int, Compiled] = {}

    def instead(*arguments: Any) -> SimpleNamespace:
        module = generated(*arguments)
        names = ("prepare", "observe", "combine", "conclude", "update")
        return SimpleNamespace(
            **{name: found.setdefault(id(getattr(module, name)), Compiled(getattr(module, name))) for name in names}
        )

    generated, cuda_layout.kernels = cuda_layout.kernels, instead
    try:
        params = checks.parameters("cpu", dtype)
        optimizer = checks.built(case, params, True, **options)
        for step in range(2):
            checks.put_gradients(params, step)
            if step == 1:  # as torch.amp.GradScaler does
                optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.zeros(1)
            optimizer.step()
    finally:
        cuda_layout.kernels = generated
    return list(found.values())


def main(cases: list[str]) -> None:
    _fused._KINDS["cpu"] = _fused._KINDS["cuda"]
    for case in cases or checks.CASES:
        takes = inspect.signature(checks.CASES[case][0]).parameters
        for dtype, state_dtype in KINDS if {"state_dtype", "options"} & {*takes} else KINDS[:1]:
            options = {} if state_dtype is None else {"state_dtype": state_dtype}
            binaries = [one for kernel in compiled(case, options, dtype) for one in kernel.binaries.values()]
            assert binaries
            assert all(binary.startswith(b"\x7fELF") for binary in binaries)
            print(f"{case}, {dtype}, state {state_dtype}: {len(binaries)} kernels", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
