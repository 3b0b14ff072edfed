"""Compile CUDA C++ at run time, cached on disk: with NVRTC, part of torch's CUDA packages, or else with nvcc."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from upgd.kernels.folder import kernels

__all__ = ["compiled", "missing", "name"]

log = logging.getLogger("upgd.population")

_OPTIONS = ("--std=c++17",)


def compiled(source: str, architecture: str) -> bytes:
    """Return the machine code (a cubin) of CUDA C++ source, from the cache if possible.

    Args:
        source: the source, without includes.
        architecture: such as ``sm_90``.
    """
    key = hashlib.sha256("\n".join((architecture, str(_version()), *_OPTIONS, source)).encode()).hexdigest()
    path = kernels() / f"{key[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    log.info("compiling a kernel for %s, once; it will be stored in %s", architecture, path.parent)
    code = _by_nvrtc(source, architecture) if _nvrtc() is not None else _by_nvcc(source, architecture)
    _keep(path, code)
    return code


def missing() -> str | None:
    """Return why nothing can be compiled here; ``None`` if it can."""
    if _nvrtc() is None and shutil.which("nvcc") is None:
        return "neither NVRTC (part of torch for CUDA) nor nvcc was found"
    return None


def _keep(path: Path, code: bytes) -> None:
    """Write a file atomically; errors, such as a read-only folder, are only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as error:
        log.info("the compiled kernel cannot be stored: %s", error)


def name() -> str:
    """Return the name of the compiler, such as "NVRTC 12.8"."""
    version = _version()
    return "nvcc" if version is None else f"NVRTC {version[0]}.{version[1]}"


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    for name in _nvrtc_names():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def _nvrtc_names() -> Iterator[str]:
    major = (torch.version.cuda or "13").split(".")[0]
    names = [f"nvrtc64_{major}0_0.dll"] if sys.platform == "win32" else [f"libnvrtc.so.{major}", "libnvrtc.so"]
    yield from names
    packages = Path(torch.__file__).parents[1]
    for folder in (packages / "nvidia", packages / "torch" / "lib"):
        yield from sorted(str(path) for path in folder.rglob(names[0]))


@functools.cache
def _version() -> tuple[int, int] | None:
    if (library := _nvrtc()) is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _by_nvrtc(source: str, architecture: str) -> bytes:
    library = _nvrtc()
    assert library is not None
    program = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        if status := getattr(library, name)(*arguments):
            raise RuntimeError(f"{name}: {library.nvrtcGetErrorString(status).decode()}\n{log_text()}")

    def log_text() -> str:
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return text.value.decode()

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"onchip.cu", 0, None, None)
    options = [option.encode() for option in (*_OPTIONS, "-default-device", f"--gpu-architecture={architecture}")]
    call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, code)
    call("nvrtcDestroyProgram", ctypes.byref(program))
    return code.raw


def _by_nvcc(source: str, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, code = Path(folder, "onchip.cu"), Path(folder, "onchip.cubin")
        text.write_text(source, encoding="utf-8")
        command = ["nvcc", "-cubin", *_OPTIONS, f"-arch={architecture}", "-o", str(code), str(text)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr}")
        return code.read_bytes()
