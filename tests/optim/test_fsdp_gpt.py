"""The example that trains a GPT on several processes."""

import argparse
import runpy
from pathlib import Path

import pytest
import torch
from processes import in_processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_gpt.py"


def check_example(rank: int, folder: Path) -> None:
    """It learns, and a resumed run gives the same results."""
    example = runpy.run_path(str(EXAMPLE))

    def losses(steps: int, *, saved: bool) -> list[float]:
        given = ["--steps", str(steps), "--task-length", "8", "--batch", "2", "--state-dtype", "bfloat16"]
        given += ["--checkpoint", str(folder), "--save-every", "6"] if saved else []
        options: argparse.Namespace = example["parser"]().parse_args(given)
        found = dict(example["train"](options))
        assert list(found) == list(range(steps - len(found) + 1, steps + 1))
        return list(found.values())

    whole = losses(7, saved=False)
    assert sum(whole[4:]) < 0.95 * sum(whole[:3])
    assert losses(5, saved=True) == whole[:5]
    assert losses(7, saved=True) == whole[5:]


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")
def test_the_example_learns_and_resumes(tmp_path: Path) -> None:
    in_processes(check_example, tmp_path)
