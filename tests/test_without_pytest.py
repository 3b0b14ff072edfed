from pathlib import Path

import pytest

import gpu_main
from without_pytest import run_tests

TESTS = """
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(True, reason="none")]
seen = []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_numbers(tmp_path, number):
    (tmp_path / "number").write_text(str(number))
    assert number < {limit}


@pytest.mark.gpu
def test_nothing():
    assert True
"""


def written(folder: Path, limit: int) -> Path:
    path = folder / "test_written.py"
    path.write_text(TESTS.format(limit=limit), encoding="utf-8")
    return path


def test_every_case_is_run(tmp_path) -> None:
    assert run_tests(written(tmp_path, 4)).splitlines() == [*(f"test_numbers[{n}]" for n in (1, 2, 3)), "test_nothing"]


def test_a_failure_is_raised(tmp_path) -> None:
    with pytest.raises(AssertionError):
        run_tests(written(tmp_path, 3))


def test_a_file_without_tests_is_not_a_success(tmp_path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"no tests in empty\.py"):
        run_tests(path)


@pytest.mark.parametrize("path", gpu_main.OTHERS)
def test_the_files_of_the_gpu_run_can_be_loaded(path: str, monkeypatch) -> None:
    """They need nothing that is missing; only their tests are skipped."""
    seen = []
    monkeypatch.setattr("without_pytest._run", lambda test, case: seen.append((test, case)))
    run_tests(Path(gpu_main.__file__).parent / path)
    for test, case in seen:
        names = set(test.__code__.co_varnames[: test.__code__.co_argcount])
        assert names - {"tmp_path"} == set(case)
