"""Check what the wheel and the sdist in a folder contain: ``python .github/check_distributions.py dist``."""

import sys
import tarfile
import zipfile
from pathlib import Path

#: Without these the installed package works only in part, and no import would fail.
NEEDED = [
    "py.typed",
    "data/digits.npz",
    "data/digits.txt",
    "population/cuda/onchip.cu",
    "population/cuda/basics.cuh",
    "report/page.css",
    "report/page.js",
    "report/live.js",
    "report/plotly/plotly-basic.min.js",
    "report/plotly/LICENSE",
]
MEBIBYTE = 2**20


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        check(wheel, file.namelist(), "upgd/", {"upgd", wheel.name.partition("-py3")[0] + ".dist-info"})
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in file.namelist()), "no licence in the wheel"
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    ours = {"src", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO"}
    ours |= {"pyproject.toml", "hatch_build.py", ".gitignore"}
    check(sdist, names, "src/upgd/", ours)
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / MEBIBYTE:.1f} MiB, complete")


def check(path: Path, names: list[str], package: str, allowed: set[str]) -> None:
    missing = [name for name in NEEDED if package + name not in names]
    assert not missing, f"{path.name} lacks {missing}"
    sources = {str(file.relative_to("src/upgd").as_posix()) for file in Path("src/upgd").rglob("*.py")}
    assert sources <= {name.removeprefix(package) for name in names}, f"{path.name} lacks modules"
    assert (other := {name.split("/")[0] for name in names} - allowed) == set(), f"{path.name} also has {other}"
    assert not [name for name in names if "__pycache__" in name or name.endswith(".db")], f"{path.name} has leftovers"
    assert path.stat().st_size < 2 * MEBIBYTE, f"{path.name} has grown beyond 2 MiB"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
