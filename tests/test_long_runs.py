"""The comparison of long runs on two devices."""

import csv
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks import gpu_page, long_runs
from benchmarks.long_runs import FIELDS, VARIANTS, Runs, command, differences, read

from upgd.methods import METHODS
from upgd.population import Learner

ENDS = (100, 150)
#: Without differences between devices, accuracies of five seeds differ by these.
CHANCE = np.array([0.002, -0.001, 0.0, 0.001, -0.002])


def written(path: Path, accuracies: dict[str, list], **other: str) -> str:
    """Write a file with these accuracies for each seed in both windows; losses are twice as large."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for name, values in accuracies.items():
            common = {
                "name": name,
                "problem": "p",
                "network": "n",
                "settings": "{}",
                "device": "d",
                "backend": "kernel",
            }
            for seed, value in enumerate(values):
                for end in ENDS:
                    writer.writerow({**common, "seed": seed, "end": end, "accuracy": value, "loss": 2 * value, **other})
    return str(path)


def compared(tmp_path: Path, one: dict[str, list], other: dict[str, list], capsys) -> tuple[int, str]:
    """Compare two files on the command line; return the exit status and what is printed."""
    paths = [written(tmp_path / name, values) for name, values in (("a.csv", one), ("b.csv.gz", other))]
    status = command(["compare", *paths])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


BASE = np.linspace(0.7, 0.8, 5)


def test_numbers_by_hand(tmp_path, capsys) -> None:
    # The differences 1, 2, 3, 4, 5 thousandths have the mean 3 and the variance 2.5, so the standard error is √(2.5/5).
    status, text = compared(tmp_path, {"x": list(BASE)}, {"x": list(BASE + np.arange(1, 6) / 1000)}, capsys)
    error = math.sqrt(0.5) / 1000
    found = row(text, "x")
    assert found[:2] == ["0.7500", "0.7530"]
    assert found[2].strip("*") == f"+0.00300 ± {error:.5f} (+{0.003 / error:.1f})"
    assert found[3:5] == ["1.5000", "1.5060"]
    # Student's t with 4 degrees of freedom beyond ±4.243 has p = 0.0132, of which Holm's correction takes two.
    assert status == 1
    assert "0 are within two standard errors and 2 are not" in text


def test_a_variant_that_differs_is_named(tmp_path, capsys) -> None:
    one = {"same": list(BASE), "other": list(BASE)}
    status, text = compared(tmp_path, one, {"same": list(BASE + CHANCE), "other": list(BASE + 0.05 + CHANCE)}, capsys)
    assert status == 1
    assert "These variants differ: other, by" in text
    assert "**" in row(text, "other")[2]
    assert "**" not in row(text, "same")[2]


def test_variants_that_agree(tmp_path, capsys) -> None:
    status, text = compared(tmp_path, {"x": list(BASE)}, {"x": list(BASE + CHANCE)}, capsys)
    assert status == 0
    assert "Of 2 differences, 2 are within two standard errors" in text
    assert "No variant differs" in text


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (1e-6, 0), (1e-2, 1)])
def test_ties(tmp_path, capsys, shift: float, status: int) -> None:
    """Runs whose differences are all equal have no standard error of their own; only rounding is allowed."""
    found, text = compared(tmp_path, {"x": list(BASE)}, {"x": list(BASE + shift)}, capsys)
    assert found == status, text


def test_windows_are_weighted_by_their_lengths() -> None:
    curve = np.array([[0.5, 0.8], [0.2, 0.2]])
    runs = Runs(("",), "kernel", (0, 1), ENDS, {"accuracy": curve, "loss": curve})
    assert runs.means("accuracy") == pytest.approx([0.6, 0.2])


def test_a_diverged_learner_differs(tmp_path, capsys) -> None:
    status, text = compared(tmp_path, {"x": list(BASE)}, {"x": [*BASE[:4], float("nan")]}, capsys)
    assert status == 1
    assert row(text, "x")[2] == "**diverged**"


def test_holm_corrects_for_the_number_of_comparisons() -> None:
    """Equal devices: in at most 5% of the comparisons, some variant differs. Many are outside two standard errors."""
    random = np.random.default_rng(0)

    def runs() -> dict[str, Runs]:
        draws = random.normal(0.7, 0.01, (20, 10, 1))
        return {
            str(i): Runs(("",), "kernel", tuple(range(10)), (1,), {"accuracy": d, "loss": d})
            for i, d in enumerate(draws)
        }

    found = [differences(runs(), runs()) for _ in range(60)]
    assert sum(any(own.differs for own in one) for one in found) <= 8  # P(X > 8) is 0.4% for Binomial(60, 0.05)
    sizes = np.abs([own.in_errors for one in found for own in one])
    assert np.mean(sizes > 2) == pytest.approx(
        0.0766, abs=0.03
    )  # two-sided tail of Student's t with 9 degrees of freedom


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": list(BASE)}, "the second file has no runs of 'y'; compute them with --names 'y'"),
        ({"x": list(BASE), "y": list(BASE), "z": list(BASE)}, "the first file has no runs of 'z'"),
        (
            {"x": list(BASE), "y": list(BASE[:3])},
            "'y' has other seeds in the second file ((0, 1, 2)) than in the first",
        ),
    ],
    ids=["missing", "missing in the first", "seeds"],
)
def test_files_that_cannot_be_compared(tmp_path, capsys, other, message: str) -> None:
    status, text = compared(tmp_path, {"x": list(BASE), "y": list(BASE)}, other, capsys)
    assert status == 2
    assert message in text


def test_other_settings_cannot_be_compared(tmp_path) -> None:
    one, other = written(tmp_path / "a", {"x": list(BASE)}), written(tmp_path / "b", {"x": list(BASE)}, settings="{1}")
    with pytest.raises(ValueError, match="'x' has other problem, network or settings in the second file"):
        differences(read(one), read(other))


def test_one_seed_is_not_enough(tmp_path) -> None:
    runs = read(written(tmp_path / "a", {"x": [0.5]}))
    with pytest.raises(ValueError, match="'x' has one seed"):
        differences(runs, runs)


def test_a_file_that_ends_early(tmp_path) -> None:
    path = Path(written(tmp_path / "a", {"x": list(BASE)}))
    path.write_text(path.read_text().rsplit("x,", 1)[0])
    with pytest.raises(ValueError, match="a is incomplete for 'x'; remove its rows"):
        read(path)


def test_another_table_is_refused(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("name,accuracy\nx,1\n")
    with pytest.raises(ValueError, match=r"a.csv is not a table of long runs; write it with"):
        read(tmp_path / "a.csv")


# ------------------------------------------------------------------------------------------------------------- compute

RESETTING = ["64-100-50-10: ReDo", "64-100-50-10: Continual Backprop"]


def computed(output: Path, *more: str) -> int:
    arguments = ["compute", "--device", "cpu", "--data", "digits", "--backend", "torch", "--output", str(output)]
    return command([*arguments, "--seeds", "2", *more])


def test_computed_variants_are_kept(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "cpu.csv"
    assert computed(path, "--steps", "12", "--names", RESETTING[0]) == 0
    before = path.read_text()
    assert computed(path, "--steps", "12", "--names", *RESETTING) == 0
    assert path.read_text().startswith(before)
    assert f"1 of 2 variants are already in {path}" in capsys.readouterr().out
    runs = read(path)
    assert list(runs) == RESETTING
    assert {own.ends for own in runs.values()} == {(12,)}
    assert computed(tmp_path / "together.csv", "--steps", "12", "--together", "2", "--names", *RESETTING) == 0
    assert command(["compare", str(path), str(tmp_path / "together.csv")]) == 0
    assert computed(path, "--steps", "13", "--names", *RESETTING) == 2
    assert "has 2 seeds from 0 × 12 steps of '64-100-50-10: ReDo', not 2 from 0 × 13;" in capsys.readouterr().err
    assert computed(path, "--steps", "12", "--first-seed", "5", "--names", *RESETTING) == 2
    assert "not 2 from 5 × 12" in capsys.readouterr().err
    monkeypatch.setitem(VARIANTS, RESETTING[0], {"method": "redo", "lr": 1.0})
    assert computed(path, "--steps", "12", "--names", *RESETTING) == 2
    assert "cpu.csv has other settings of '64-100-50-10: ReDo': " in capsys.readouterr().err


def test_other_seeds(tmp_path) -> None:
    assert computed(tmp_path / "a.csv", "--steps", "9", "--seeds", "3", "--names", RESETTING[0]) == 0
    assert computed(tmp_path / "b.csv", "--steps", "9", "--first-seed", "1", "--names", RESETTING[0]) == 0
    three, two = (read(tmp_path / name)[RESETTING[0]] for name in ("a.csv", "b.csv"))
    assert two.seeds == (1, 2)
    np.testing.assert_allclose(two.curves["loss"], three.curves["loss"][1:], rtol=1e-5)


def test_a_variant_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(VARIANTS, RESETTING[0], {"method": "redo", "lr": -1.0})
    path = tmp_path / "cpu.csv"
    assert computed(path, "--steps", "5", "--together", "2", "--names", *RESETTING) == 1
    assert list(read(path)) == RESETTING[1:]
    assert f"These variants failed: {RESETTING[0]}" in capsys.readouterr().err


def test_an_unknown_variant(tmp_path, capsys) -> None:
    assert computed(tmp_path / "cpu.csv", "--names", "nothing") == 2
    assert "there is no variant 'nothing'; choose from 'UPGD', " in capsys.readouterr().err


@pytest.mark.parametrize("kind", range(len(long_runs.KINDS)))
def test_problems_fit_their_networks(kind: int) -> None:
    _, network, stream = long_runs.problem("digits", kind)
    inputs = stream.chunk([0], 0, 2).inputs()[0]
    assert network(inputs).shape == (2, 10)
    assert inputs.std() > 0


def test_every_method_has_long_runs() -> None:
    """Except methods that are special cases of others, or whose search does not get better than chance in a few steps."""
    compared = {Learner(**settings).method for settings in VARIANTS.values()}
    built_in = {name for name, method in METHODS.items() if method.__module__.startswith("upgd.")}
    assert built_in - compared == {"sgd", "adam", "ups", "ups-even"}


def test_variants_without_cpu_kernels_have_shorter_runs() -> None:
    runs = {name: long_runs.runs_of(name, 50_000, 12) for name in VARIANTS}
    assert [runs[next(iter(kind))] for kind in long_runs.KINDS] == [
        (50_000, 12),
        (50_000, 12),
        (10_000, 10),
        (3_000, 5),
    ]
    assert long_runs.runs_of("Short: ReDo", 100, 2) == (100, 2)


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_page_has_the_table_of_the_shipped_runs() -> None:
    page = (gpu_page.DOCS / "gpu.md").read_text(encoding="utf-8")
    assert f"<!-- long runs -->\n\n{gpu_page.long_runs()}\n\n<!-- end of long runs -->" in page


def test_the_page_has_the_table_of_the_shipped_studies() -> None:
    page = (gpu_page.DOCS / "gpu.md").read_text(encoding="utf-8")
    speeds = json.loads((gpu_page.DOCS / "results" / "gpu.json").read_text(encoding="utf-8"))
    assert f"<!-- studies -->\n\n{gpu_page.studies(speeds)}\n\n<!-- end of studies -->" in page


def test_the_shipped_runs_are_those_of_the_benchmark() -> None:
    for device, backend in (("cpu", None), ("gpu", "kernel")):
        runs = read(gpu_page.DOCS / "results" / f"long-runs-{device}.csv.gz")
        for name, own in runs.items():
            assert own.what[-1] == json.dumps(VARIANTS[name])
            assert (own.ends[-1], len(own.seeds)) == long_runs.runs_of(name, 20_000, 10)
            assert backend in (None, own.backend)
