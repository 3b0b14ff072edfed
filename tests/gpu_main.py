"""Run the GPU checks with torch and numpy alone: ``PYTHONPATH=src python3 tests/gpu_main.py [NAME …]``."""

import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "population"))

import torch
from population_on_gpu import CHECKS


def main(names: list[str]) -> int:
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    failed = []
    for name in names or CHECKS:
        begin = time.perf_counter()
        try:
            outcome = CHECKS[name]()
        except Exception:
            failed.append(name)
            outcome = "FAILED\n" + traceback.format_exc(limit=-3)
        print(f"{name} ({time.perf_counter() - begin:.1f} s)\n    " + outcome.replace("\n", "\n    "), flush=True)
    print(f"{len(names or CHECKS) - len(failed)} passed, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
