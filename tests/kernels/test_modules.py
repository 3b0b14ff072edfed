"""Modules of generated kernels are written to the cache, or elsewhere if it cannot be written."""

from pathlib import Path

import pytest

from upgd.kernels import modules


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    modules._temporary.cache_clear()


def test_modules_are_written_to_the_cache_alone(tmp_path: Path) -> None:
    module = modules.module_of("answer = 42\n")
    assert module.answer == 42
    assert module.__file__ is not None
    assert Path(module.__file__).parent == tmp_path / "cache" / "upgd" / "kernels"
    assert not list((tmp_path / "temporary").iterdir())


def test_modules_share_one_temporary_folder_if_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    made = [modules.module_of(f"answer = {n}\n") for n in (43, 44)]
    assert [module.answer for module in made] == [43, 44]
    assert len({Path(module.__file__ or "").parent for module in made}) == 1
    assert len(list((tmp_path / "temporary").iterdir())) == 1
