"""Run simple tests where pytest is not installed: they may ask for ``parametrize`` over one name, and for ``tmp_path``."""

import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def run_tests(path: Path) -> str:
    """Run the tests of a file; an error of a test is raised. In words: how many there were."""
    done = []
    for name, test in vars(_loaded(path)).items():
        if name.startswith("test_") and inspect.isfunction(test):
            for case in getattr(test, "cases", [{}]):
                _run(test, case)
                done.append(f"{name}{list(case.values()) or ''}")
    assert done, f"no tests in {path.name}"
    return "\n".join(done)


def _run(test: Callable[..., None], case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = {"tmp_path": Path(folder), **case}
        test(**{name: given[name] for name in inspect.signature(test).parameters})


def _loaded(path: Path) -> ModuleType:
    """The file as a module that takes our stand-in for pytest."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_without_pytest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("pytest")
    sys.modules["pytest"] = _stand_in()
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["pytest"]
        if before is not None:
            sys.modules["pytest"] = before
    return module


def _stand_in() -> ModuleType:
    module: Any = ModuleType("pytest")

    def as_it_is(test: Any) -> Any:
        return test

    def parametrize(name: str, values: Iterable[Any]) -> Callable[[Any], Any]:
        def with_cases(test: Any) -> Any:
            test.cases = [{name: value} for value in values]
            return test

        return with_cases

    module.mark = SimpleNamespace(gpu=as_it_is, skipif=lambda *_, **__: as_it_is, parametrize=parametrize)
    return module
