"""Run the GPU checks with torch and numpy alone: ``PYTHONPATH=src python3 tests/gpu_main.py [--jobs N] [--small] [NAME …]``.

Most of a check's time goes to the truth on the CPU and to compilers, so several checks run at once, each in a process of its
own, and those that take longest begin first. ``--small`` are checks that take every path of the kernels in few steps, in
this process: for compute-sanitizer.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "population"))
sys.path.insert(0, str(Path(__file__).parent / "optim"))

import convolutions_on_gpu  # noqa: F401 (here and below: they put their checks among CHECKS)
import general_on_gpu  # noqa: F401
import gpu_checks
import population_on_gpu  # noqa: F401
import torch
from gpu_cases import CHECKS, Check, compiling

from without_pytest import run_tests

#: Tests of other parts that pytest runs on a GPU; they are also run as checks.
OTHERS = (
    "experiments/execution/test_running_gpu.py",
    "curvature/test_curvature_gpu.py",
    "streams/test_streams_on_gpu.py",
    "test_networks_on_gpu.py",
)
FIRST = "kernels_compile"
OPTIMIZERS = [f"optimizers: {name}" for name in gpu_checks.CHECKS]
#: They use torch.compile.
LONGEST = ("long_runs_of_weights", "long_runs_of_moments_and_features", "compiled_steps_of_a_convnet")
SMALL = (*(name for name in CHECKS if name.startswith("few steps: ")), "same_answers_of_small_convolutions")


def run_others(path: str, device: str) -> str:
    with compiling(False):
        return run_tests(Path(__file__).parent / path) if device == "cuda" else "needs a GPU"


def run_optimizers(name: str, device: str) -> str:
    if device != "cuda":
        return "needs a GPU"
    gpu_checks.CHECKS[name]()
    return "passed"


ALL = CHECKS | {Path(path).stem: Check(partial(run_others, path), needs_kernels=False) for path in OTHERS}
ALL |= {f"optimizers: {name}": Check(partial(run_optimizers, name), needs_kernels=False) for name in gpu_checks.CHECKS}


def outcome(name: str, device: str) -> tuple[bool, str]:
    """Whether a check passed, and its report."""
    begin = time.perf_counter()
    try:
        passed, words = True, ALL[name].run(device)
    except Exception:
        passed, words = False, "FAILED\n" + traceback.format_exc(limit=-3)
    return passed, f"{name} ({time.perf_counter() - begin:.1f} s)\n    " + words.replace("\n", "\n    ")


def outcomes(names: Sequence[str], device: str, jobs: int) -> Iterator[tuple[bool, str]]:
    """Yield the outcomes of the checks. Checks that need kernels wait until these are compiled."""
    if jobs == 1:
        yield from (outcome(name, device) for name in names)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    spawn = multiprocessing.get_context("spawn")
    names = sorted(names, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))
    with ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:

        def submitted(kernels: bool) -> list[Future[tuple[bool, str]]]:
            some = [name for name in names if name != FIRST and ALL[name].needs_kernels == kernels]
            return [pool.submit(outcome, name, device) for name in some]

        waiting = submitted(kernels=False)
        if FIRST in names:
            yield outcome(FIRST, device)
        for future in as_completed(waiting + submitted(kernels=True)):
            yield future.result()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of them, or optimizers: {', '.join(ALL)}")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="how many checks at once")
    parser.add_argument("--small", action="store_true", help="in this process; if no NAME is given, those of few steps")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--device", default="cuda", help="cpu tries out the checks where there is no GPU")
    given = parser.parse_args(arguments)
    names = given.names or list(SMALL if given.small else ALL)
    names = [one for name in names for one in (OPTIMIZERS if name == "optimizers" else [name])]
    if unknown := set(names) - ALL.keys():
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    if given.list:
        print("\n".join(names))
        return 0
    begin = time.perf_counter()
    where = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    print(f"torch {torch.__version__} on {where}", flush=True)
    failed = 0
    for passed, report in outcomes(names, given.device, 1 if given.small or len(names) == 1 else given.jobs):
        failed += not passed
        print(report, flush=True)
    print(f"{len(names) - failed} passed, {failed} failed, in {time.perf_counter() - begin:.0f} s", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
