"""The checks of `upgd doctor`: versions, hardware, kernels, data sets, caches and plug-ins.

It needs only the standard library, and reports failed imports instead of failing. Paths in the home folder are
written with ``~``, and neither environment variables nor error messages of other packages are shown, because the output is
meant to be posted.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from upgd import __version__

__all__ = ["checkup", "examine", "text"]

#: The packages that bug reports are most often about.
_PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "triton",
    "ray",
    "cyclopts",
    "rich",
    "matplotlib",
    "pooch",
    "filelock",
    "pyarrow",
)
#: What `upgd demo` imports, and what installs it.
_NEEDED = {
    "torch": "upgd",
    "numpy": "upgd",
    "cyclopts": "upgd[run]",
    "rich": "upgd[run]",
    "matplotlib": "upgd[report]",
}


def checkup(*, as_json: bool) -> int:
    """Print what :func:`examine` finds; the exit status is 1 if `upgd demo` cannot run here."""
    found = examine()
    print(json.dumps(found, indent=2, ensure_ascii=False) if as_json else text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Return facts about this installation, ready for JSON."""
    return {
        "upgd": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {name: _version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "processor": _processor(),
        "memory": _memory(),
        "gpus": _gpus(),
        "kernels": _kernels(),
        "data": _data(),
        "caches": _caches(),
        "plugins": _plugins(),
        "problems": list(_problems()),
    }


def text(found: dict[str, Any]) -> str:
    """Format the facts for one screen."""
    there = [f"{name} {version}" for name, version in found["packages"].items() if version]
    absent = [name for name, version in found["packages"].items() if not version]
    cpu, sets = found["processor"], found["data"]["sets"]
    here = [name if state == "present" else f"{name} ({state})" for name, state in sets.items() if state != "absent"]
    plugins = [*found["plugins"]["loaded"], *(f"{one} (cannot be loaded)" for one in found["plugins"]["broken"])]
    parts: list[tuple[str, list[str]]] = [
        ("upgd", [found["upgd"]]),
        ("python", [found["python"]]),
        ("packages", [*_filled(there), *([f"not installed: {', '.join(absent)}"] if absent else [])]),
        ("system", [found["system"]]),
        ("processor", [f"{cpu['name']}, {cpu['vectors']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"]),
        ("memory", [_memory_text(found["memory"])]),
        ("gpu", [_gpu_text(one) for one in found["gpus"]] or ["none"]),
        ("kernels", [f"{name}: {_state_text(state)}" for name, state in found["kernels"].items()]),
        ("data", [f"in {found['data']['folder']}: {', '.join(here) or 'nothing'}"]),
        ("caches", [_cache_text(one) for one in found["caches"]]),
        ("plug-ins", plugins or ["none"]),
        ("problems", found["problems"] or ["none; `upgd demo` can run here"]),
    ]
    return "\n".join(f"{name:<11}{(chr(10) + ' ' * 11).join(lines)}" for name, lines in parts)


def _filled(words: list[str]) -> list[str]:
    """Return the words in lines of at most 100 characters."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{word}"
    return lines


def _state_text(state: dict[str, Any]) -> str:
    return str(state["how"]) if state["available"] else f"not available, because {state['reason']}"


def _gpu_text(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {_gib(gpu['memory'])}, compute capability {gpu['capability']}"


def _memory_text(memory: dict[str, Any]) -> str:
    if memory["total"] is None:
        return "unknown"
    free = "" if memory["available"] is None else f", {_gib(memory['available'])} available"
    return _gib(memory["total"]) + free


def _cache_text(cache: dict[str, Any]) -> str:
    size = "empty" if not cache["bytes"] else f"{cache['bytes'] / 1e6:,.1f} MB"
    return f"{cache['what']}: {cache['folder']}, {size}, {'writable' if cache['writable'] else 'NOT WRITABLE'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _version(package: str) -> str | None:
    """Return installed versions without importing packages; torch's version includes the build."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    if package == "torch" and (torch := _imported("torch")) is not None:
        return str(torch.__version__)
    return version


def _imported(name: str) -> Any:
    """Import a module; None if that fails for any reason."""
    try:
        return import_module(name)
    except Exception:  # a broken installation may raise anything
        return None


def _processor() -> dict[str, Any]:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    vectors = "vector instructions unknown"
    if (torch := _imported("torch")) is not None:
        with suppress(Exception):
            vectors = torch.backends.cpu.get_cpu_capability()
    return {"name": _processor_name(), "vectors": vectors, "cores": cores, "usable_cores": usable}


def _processor_name() -> str:
    with suppress(Exception):
        if platform.system() == "Linux":
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> dict[str, int | None]:
    """Return total and available memory in bytes; None if unknown."""
    total = available = None
    with suppress(Exception):
        if sys.platform == "win32":
            # MEMORYSTATUSEX: its length and a percentage in 32 bits each, then seven sizes in 64.
            status = (ctypes.c_uint64 * 8)()
            ctypes.c_uint32.from_buffer(status).value = ctypes.sizeof(status)
            if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
                total, available = int(status[1]), int(status[2])
        else:
            page = os.sysconf("SC_PAGE_SIZE")
            total = page * os.sysconf("SC_PHYS_PAGES")
            available = page * os.sysconf("SC_AVPHYS_PAGES")  # not on macOS
    with suppress(Exception):  # includes reclaimable file cache, unlike free pages
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return {"total": total, "available": available}


def _gpus() -> list[dict[str, Any]]:
    torch = _imported("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        with suppress(Exception):
            facts = torch.cuda.get_device_properties(index)
            capability = f"{facts.major}.{facts.minor}"
            found.append({"name": facts.name, "memory": int(facts.total_memory), "capability": capability})
    return found


def _kernels() -> dict[str, dict[str, Any]]:
    """Return which fast backends are available, and the reasons for the others."""
    return {"CPU": _cpu_kernel(), "CUDA": _cuda_kernel(), "torch.compile on CUDA": _compiled_steps()}


def _cpu_kernel() -> dict[str, Any]:
    try:
        import_module("upgd.population.kernel")
    except ModuleNotFoundError as error:
        return _no(f"{error.name} is not installed; run pip install 'upgd[run]'")
    except Exception as error:
        return _no(f"numba or llvmlite cannot be imported ({type(error).__name__}); reinstall them")
    return {"available": True, "how": "loops compiled by numba"}


def _cuda_kernel() -> dict[str, Any]:
    if reason := _no_cuda():
        return _no(reason)
    try:
        cuda, compiler = import_module("upgd.population.cuda"), import_module("upgd.population.cuda.compiler")
        reason = cuda.missing(import_module("torch").device("cuda"))
        return _no(reason) if reason else {"available": True, "how": f"compiled by {compiler.name()}"}
    except Exception as error:
        return _no(f"it cannot be loaded ({type(error).__name__})")


def _compiled_steps() -> dict[str, Any]:
    if reason := _no_cuda():
        return _no(reason)
    version = _version("triton")
    if version is None:
        return _no("triton is not installed; CUDA graphs are used without fusion")
    return {"available": True, "how": f"triton {version}"}


def _no_cuda() -> str | None:
    torch = _imported("torch")
    if torch is None:
        return "torch cannot be imported"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no(reason: str) -> dict[str, Any]:
    return {"available": False, "reason": reason}


def _data() -> dict[str, Any]:
    if (cache := _imported("upgd.data.cache")) is None:
        return {"folder": None, "sets": {}}
    with suppress(OSError):
        rows = import_module("upgd.cli.data_sets").states()
        return {"folder": _shown(cache.folder()), "sets": {row["name"]: row["state"] for row in rows}}
    return {"folder": _shown(cache.folder()), "sets": {}}


def _caches() -> list[dict[str, Any]]:
    found = []
    kernels, data = _imported("upgd.kernels.folder"), _imported("upgd.data.cache")
    inside = kernels.kernels() if kernels is not None else None
    if data is not None:
        found.append(_cache("data sets", data.folder(), inside))
    if inside is not None:
        found.append(_cache("kernels", inside))
    return found


def _cache(what: str, folder: Path, without: Path | None = None) -> dict[str, Any]:
    size = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if Path(place, one) != without]
        for file in files:
            with suppress(OSError):
                size += os.lstat(Path(place, file)).st_size
    nearest = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return {"what": what, "folder": _shown(folder), "bytes": size, "writable": writable}


def _plugins() -> dict[str, list[str]]:
    from upgd import plugins

    plugins.discover()
    return {"loaded": list(plugins.modules()), "broken": list(plugins.failed())}


def _problems() -> Iterator[str]:
    """Return what prevents `upgd demo` from running, one sentence per problem."""
    for name, extra in _NEEDED.items():
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            yield f"{error.name} is not installed; run pip install '{extra}'."
        except Exception as error:
            yield f"{name} is installed but cannot be imported ({type(error).__name__}); reinstall it."
    if not os.access(Path.cwd(), os.W_OK | os.X_OK):
        yield "the current folder is not writable; change to another one, or give `upgd demo --output FOLDER`."


def _shown(path: Path) -> str:
    """Return a path with the home folder as ``~``."""
    with suppress(ValueError, RuntimeError):
        return str(Path("~", path.relative_to(Path.home())))
    return str(path)
