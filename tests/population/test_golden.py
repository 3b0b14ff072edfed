"""Results of the methods stay bitwise the same."""

import json

import golden
import pytest

STORED = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("problem", golden.PROBLEMS)
@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_results_are_those_of_golden_json(backend, problem):
    here = golden.machine()
    if here != STORED["machine"]:
        pytest.skip(f"golden.json was written on {STORED['machine']}, and this machine rounds sums otherwise: {here}")
    assert golden.computed(backend, problem) == STORED[f"{backend} {problem}"]
