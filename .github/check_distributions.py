"""Check what the wheel and the sdist in a folder contain: ``python .github/check_distributions.py dist``."""

import sys
import tarfile
import zipfile
from pathlib import Path

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
    # All files, because without a kernel's source, data or the programs of the report, no import would fail.
    sources = {file.relative_to("src/upgd").as_posix() for file in Path("src/upgd").rglob("*") if file.is_file()}
    missing = {name for name in sources if "__pycache__" not in name} - {name.removeprefix(package) for name in names}
    assert not missing, f"{path.name} lacks {sorted(missing)}"
    assert (other := {name.split("/")[0] for name in names} - allowed) == set(), f"{path.name} also has {other}"
    assert not [name for name in names if "__pycache__" in name or name.endswith(".db")], f"{path.name} has leftovers"
    assert path.stat().st_size < 2 * MEBIBYTE, f"{path.name} has grown beyond 2 MiB"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
