"""The on-chip kernel, compiled by a C++ compiler and run by fibers: slow, exact in its logic, without a GPU."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from gpu_cases import Problem
from population_on_gpu import clusters_of
from torch import Tensor, nn

from upgd.population import Learner, Population
from upgd.population.backend import Group
from upgd.population.cuda import backend as on_chip
from upgd.population.cuda import convolutional, planner
from upgd.population.cuda.backend import CudaBackend
from upgd.population.cuda.planner import ChipPlan
from upgd.population.cuda.source import source

COMPILER = shutil.which("g++") or shutil.which("clang++")
_MACHINE = Path(__file__).with_name("emulated_machine.h")
_SHARED_BYTES = 232_448
_FOLDER = Path(tempfile.mkdtemp(prefix="upgd-emulated-"))


class Kernel:
    """Replaces :class:`upgd.population.cuda.driver.Kernel`."""

    #: The order in which the fibers run.
    order = 0
    #: The races found, if they are to be detected.
    races: set[str] | None = None

    def __init__(self, plan: ChipPlan, text: str, active: int) -> None:
        self._library, self.active = _compiled(text, Kernel.races is not None), active

    def launch(self, clusters: int, arguments: ctypes.Structure, stream: int) -> None:
        self._library.launch(ctypes.byref(arguments), clusters, ctypes.c_ulonglong(Kernel.order))
        if Kernel.races is not None:
            Kernel.races.update(_races(self._library))


@functools.cache
def _compiled(text: str, with_races: bool) -> ctypes.CDLL:
    assert COMPILER is not None
    path = _FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{with_races:d}.so"
    source, compiled = path.with_suffix(".cpp"), path.with_suffix(".o")
    source.write_text(f"{text}\nvoid call_advance() {{ advance(*passed); }}\n", encoding="utf-8")
    # The functions that the sanitizer calls are in emulated_machine.h, not in its library.
    more = ["-fsanitize=thread", "-g", "-DRACES"] if with_races else []
    compile_ = [COMPILER, "-std=c++17", "-O1", "-w", "-fPIC", f"-I{_MACHINE.parent}", *more, "-c", str(source)]
    for command in ([*compile_, "-o", str(compiled)], [COMPILER, "-shared", "-o", str(path), str(compiled)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(path))


class _Race(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("before", "after")),
        *((name, ctypes.c_int) for name in ("kind_before", "kind_after")),
    )


def _races(library: ctypes.CDLL) -> set[str]:
    """Return the races of the last launch: pairs of accesses, with their places in the source."""
    room = (_Race * 100)()
    found = room[: library.races_found(room, len(room))]

    def access(kind: int, code: int) -> str:
        command = ["addr2line", "-i", "-e", library._name, hex(code - 1)]  # the code is the address after the access
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        places = " in ".join(line.rsplit("/", 1)[-1].split(" ")[0] for line in lines)
        return f"{('read', 'write', 'atomic')[kind]} at {places}"

    return {
        f"{access(race.kind_after, race.after)}, not ordered after the {access(race.kind_before, race.before)}"
        for race in found
    }


def races(problem: Problem, learners: list[Learner], cluster: int, steps: int = 3) -> set[str]:
    """Run some steps on clusters of a size and return the races in shared memory."""
    with patch.object(Kernel, "races", set()) as found, clusters_of(cluster):
        population = run(problem, learners, EmulatedBackend, steps)
        assert population._backends[0].size == cluster
    return found


class EmulatedBackend(CudaBackend):
    """See :class:`upgd.population.backend.Backend`."""

    def __init__(self, network: nn.Module, group: Group, *more: object) -> None:
        with _emulated():
            super().__init__(network, group, *more)  # type: ignore[arg-type]
        self._far = torch.full((16 * self._plan.far_floats,), float("nan"))  # two clusters of up to eight

    def advance(self, *more: object) -> None:
        with _emulated():
            super().advance(*more)  # type: ignore[arg-type]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use fewer threads than on a GPU, so that small networks keep all of them busy and steps are faster."""
    with ExitStack() as patches:
        for module in (planner, on_chip, convolutional):
            patches.enter_context(patch.object(module, "THREADS", count))
        on_chip._plans.cache_clear()
        yield
    on_chip._plans.cache_clear()


@contextmanager
def shared_bytes(count: int) -> Iterator[None]:
    """Less shared memory than on a GPU, so that not all of a small network has room."""
    with patch(f"{__name__}._SHARED_BYTES", count):
        on_chip._plans.cache_clear()
        yield
    on_chip._plans.cache_clear()


@contextmanager
def _emulated() -> Iterator[None]:
    texts = {**on_chip.parts(), "machine.cuh": _MACHINE.read_text(encoding="utf-8")}
    parts = {name: f'#line 1 "{name}"\n{text}' for name, text in texts.items()}

    def kernel(plan: ChipPlan, loss: str, indexed: bool, device: torch.device) -> Kernel:
        return Kernel(plan, source(plan, loss, indexed, parts), 2)  # type: ignore[arg-type]

    with (
        patch.object(on_chip, "unsupported", lambda *_: None),
        patch.object(on_chip, "_indexed", lambda device: device),
        patch.object(on_chip, "_kernel", kernel),
        patch.object(on_chip.driver, "shared_bytes", lambda device: _SHARED_BYTES),
        patch.object(on_chip.driver, "active_clusters", lambda device, cluster, *_: 8 // cluster),
        patch("torch.cuda.device", lambda device: nullcontext()),
        patch("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0)),
    ):
        yield


def state(population: Population) -> dict[str, Tensor]:
    return {name: t for name, t in population.state().items() if name.startswith(("group.", "tally.loss"))}


def run(problem: Problem, learners: list[Learner], backend, *lengths: int, dtype=torch.float32) -> Population:
    population = Population(problem[0], learners, backend=backend, dtype=dtype)
    for length in lengths:
        population.run(problem[1], length, window=1000)
    return population


def assert_right(problem: Problem, cluster: int, steps: int, **settings: object) -> None:
    """As close to float64 as torch's float32; bitwise the same with other learners, in other blocks, and when the threads
    take turns in another order."""
    learners = [Learner(**settings, seed=seed) for seed in (0, 3, 1)]
    with clusters_of(cluster):
        Kernel.order = 1
        exact, rounded = (
            state(run(problem, learners, "torch", steps, dtype=t)) for t in (torch.float64, torch.float32)
        )
        there = run(problem, learners, EmulatedBackend, steps)
        Kernel.order = 2
        other = run(problem, learners[1:], EmulatedBackend, 1, 4, steps - 5)
    found = state(there)
    assert there._backends[0].size == cluster
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        error, usual = (float((t[name].double() - right).norm()) for t in (found, rounded))
        assert error <= 5e-6 * float(right.norm()) + 5 * usual, name
        if name.startswith("group."):
            assert torch.equal(found[name][1:], other.state()[name]), name
