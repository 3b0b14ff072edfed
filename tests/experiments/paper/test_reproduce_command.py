"""`upgd reproduce`."""

import gzip
import json
import re
from dataclasses import replace

import pytest
from made_records import record

from upgd.experiments.analysis import figures
from upgd.experiments.execution.progress import duration
from upgd.experiments.paper.catalogue import STUDIES
from upgd.store import Store


@pytest.fixture
def upgd(tmp_path, monkeypatch, capsys):
    from upgd.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPGD_DATA", str(tmp_path / "no-data"))
    monkeypatch.delenv("UPGD_STORE", raising=False)

    def type_(line):
        with pytest.raises(SystemExit) as exit_:
            main(line.split())
        return exit_.value.code, capsys.readouterr()

    return type_


def test_it_runs_reports_progress_and_rewrites_the_page(upgd, tmp_path):
    what = "reproduce ups-stationary-mnist --scale smoke --panels weight-white --sweep-steps 20 --steps 40"
    code, said = upgd(f"{what} --dry-run")
    assert code == 0
    assert "left of the search: 5 learners, 100 learner-steps" in said.out
    assert not (tmp_path / "upgd.db").exists()
    code, said = upgd(f"{what} --quiet --workers 1")
    assert code == 0, said.err
    assert "Weight-wise, white noise, online accuracy:" in said.out
    page = tmp_path / "reproduced" / "ups-stationary-mnist.md"
    first = page.read_text(encoding="utf-8")
    assert f"Command: `upgd {what}`" in first
    assert "**Settings were chosen by runs of 20 steps instead of 40:**" in first
    assert "nothing is left to compute; all results are in upgd.db and reproduced/data" in (
        upgd(f"{what} --dry-run")[1].out
    )
    page.unlink()
    (data,) = (tmp_path / "reproduced" / "data").iterdir()
    data.write_bytes(gzip.compress(gzip.decompress(data.read_bytes()), 1))  # as by another version of zlib
    before = data.read_bytes(), data.stat().st_mtime_ns
    assert upgd(f"{what} --write-only")[0] == 0
    assert page.read_text(encoding="utf-8") == first
    assert (data.read_bytes(), data.stat().st_mtime_ns) == before


def test_what_is_computed_and_left_by_panel(upgd, tmp_path):
    small = "--scale smoke --steps 20"
    code, said = upgd(f"reproduce ups-stationary-mnist {small} --panels weight-white --quiet --workers 1")
    assert code == 0, said.err
    what = f"reproduce ups-stationary-mnist {small} --panels weight-white,feature-white --dry-run --workers 1"
    code, said = upgd(what)
    assert code == 0
    assert said.out.splitlines()[1:4] == [
        "  weight-white: search 5, final runs 10",
        "  feature-white: search 0 of 6, final runs 0 of 12",
        "  left of the search: 6 learners, 120 learner-steps",
    ]
    code, said = upgd(f"{what} --shortlist 1 --json")
    assert code == 0
    (found,) = json.loads(said.out)
    assert found["study"] == "ups-stationary-mnist"
    assert found["panels"]["weight-white"] == {
        "search": {"computed": 5, "wanted": 5},
        "shortlist": {"computed": 10, "wanted": 15},  # the two seeds of the final runs without a shortlist
        "final runs": {"computed": 0, "wanted": 10},
    }
    assert found["left"]["search"] == {"learners": 6, "learner_steps": 120}
    assert found["seconds"] > 0
    code, said = upgd("reproduce ablation --scale smoke --json")
    assert code == 2
    assert "--json applies to --dry-run only" in said.err


def test_what_is_left_is_counted_without_the_data(upgd):
    code, said = upgd("reproduce input-permuted-mnist --panels weight-global --dry-run")
    assert code == 0
    assert "  weight-global: search 0 of 519, shortlist 0 of 90, final runs 0 of 120\n" in said.out
    assert re.search("no estimate of the time: .*upgd data fetch mnist", said.out)


def test_only_some_values(upgd, tmp_path):
    what = "reproduce ups-stationary-mnist --scale smoke --grid paper --panels weight-white --steps 20"
    code, said = upgd(f"{what} --only sigma=0.1,0.01 --only beta-utility=0.9 --quiet --workers 1")
    assert code == 0, said.err
    page = (tmp_path / "reproduced" / "ups-stationary-mnist.md").read_text(encoding="utf-8")
    assert "--steps 20 --only sigma=0.1,0.01 --only beta-utility=0.9`" in page
    assert "Search: 10 settings, 1 run each" in page  # two σ for UPS, global and local, of both orders, and the control
    twice = "--only sigma=0.1 --only beta-utility=0.9 --only sigma=0.01"
    assert "nothing is left to compute" in upgd(f"{what} {twice} --workers 1 --dry-run")[1].out
    code, said = upgd(f"{what} --only sigma")
    assert code != 0
    assert "--only takes NAME=VALUES, such as sigma=0.1,0.01, not 'sigma'" in said.err


def test_missing_data_are_requested(upgd):
    code, said = upgd("reproduce input-permuted-mnist --scale small")
    assert code == 1
    assert "upgd data fetch mnist" in said.err


def test_nothing_to_write_is_one_sentence(upgd):
    with Store.write("upgd.db") as store:
        store.add([record()])
    code, said = upgd("reproduce ablation --scale smoke --write-only")
    assert code == 1
    assert "upgd.db has no results of ablation at this scale" in said.err


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ("toy-changing-inputs", "--data emnist=digits: 'emnist' is not a data set of these experiments; leave it out"),
        (
            "input-permuted-mnist",
            "--data emnist=digits: 'emnist' is not a data set of these experiments; choose among mnist",
        ),
    ],
)
def test_data_that_an_experiment_does_not_have_have_no_stand_in(upgd, study, says):
    code, said = upgd(f"reproduce {study} --scale smoke --data emnist=digits --dry-run")
    assert code == 2
    assert says in said.err
    assert upgd(f"reproduce {study} output-permuted-emnist --scale smoke --data emnist=digits --dry-run")[0] == 0


def test_of_several_studies_those_without_results_are_left_out(upgd, tmp_path):
    small = "--scale smoke --panels weight-white --steps 20"
    assert upgd(f"reproduce ups-stationary-mnist {small} --quiet --workers 1")[0] == 0
    page = tmp_path / "reproduced" / "ups-stationary-mnist.md"
    page.unlink()
    code, said = upgd("reproduce ablation ups-stationary-mnist --scale smoke --steps 20 --write-only")
    assert code == 1
    assert "left out: upgd.db and reproduced/data have no results of ablation at this scale" in said.err
    assert page.exists()


def test_a_folder_that_cannot_be_written_to_is_found_before_the_work(upgd, tmp_path):
    (tmp_path / "file").touch()
    code, said = upgd("reproduce toy-changing-inputs --scale smoke --output file")
    assert code == 2
    assert "--output file: nothing can be written there" in said.err
    assert not (tmp_path / "upgd.db").exists()


@pytest.mark.parametrize(
    "command",
    [
        "reproduce toy-changing-inputs --scale smoke",
        "reproduce utility-quality --scale smoke",
        "run utility-quality-weights --seeds 1 --steps 20",
        "demo",
    ],
)
def test_without_matplotlib_nothing_is_computed_for_a_figure(upgd, tmp_path, monkeypatch, command):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    code, said = upgd(command)
    assert code == 1
    assert "figures need matplotlib: pip install 'upgd[report]'" in said.err
    assert not list(tmp_path.rglob("*.db"))


def test_long_runs_print_an_estimate_first(upgd):
    what = "reproduce ups-stationary-mnist --data mnist=digits --grid tiny --panels weight-white --steps 20"
    code, said = upgd(f"{what} --final-seeds 2 --workers 1")
    assert code == 0, said.err
    assert said.out.index("measured on 1 × cpu now") < said.out.index("search: stationary-digits")


@pytest.mark.parametrize("mode", ["", " --dry-run"])
def test_zero_workers_are_an_error(upgd, mode):
    code, said = upgd("reproduce toy-changing-inputs --scale smoke --workers 0" + mode)
    assert code == 2
    assert "--workers must be at least 1, not 0" in said.err


def test_without_a_name_it_lists(upgd):
    code, said = upgd("reproduce")
    assert code == 0
    assert all(name in said.out for name in STUDIES)
    code, said = upgd("reproduce --json")
    assert code == 0
    panels = {study["name"]: [panel["name"] for panel in study["panels"]] for study in json.loads(said.out)}
    assert panels == {name: [panel.key for panel in study.panels] for name, study in STUDIES.items()}


def test_utility_quality_is_called(upgd, tmp_path, monkeypatch):
    from upgd.experiments.paper import _utility_page

    called = []
    monkeypatch.setattr(_utility_page, "main", called.append)
    assert upgd("reproduce utility-quality --scale smoke -o out")[0] == 0
    assert called == [["--out", "out", "--steps", "40", "--seeds", "2"]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--steps 100 --final-seeds 2", "--final-seeds and --steps"),
        ("--grid star --only sigma=0.1 --data mnist=digits", "--data, --grid and --only"),
        ("--sweep-seeds 1 --sweep-steps 20 --panels weight-global", "--panels, --sweep-seeds and --sweep-steps"),
        ("--store x.db --workers 2", "--store and --workers"),
        ("--device cuda", "--device"),
        ("--grid extended --screen 20 --keep 0.5", "--grid, --keep and --screen"),
    ],
)
def test_utility_quality_refuses_options_of_sweeps(upgd, tmp_path, monkeypatch, options, named):
    from upgd.cli import reproducing
    from upgd.experiments.paper import _utility_page

    code, said = upgd(f"reproduce utility-quality --scale smoke {options}")
    assert (code, said.err.count("\n")) == (2, 1)
    assert f"utility-quality is not a sweep and does not support {named}; leave these options out" in said.err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(_utility_page, "main", lambda arguments: None)
    monkeypatch.setattr(reproducing, "_carry_out", lambda *_: True)
    other = "input-permuted-mnist" if "--data" in options else "toy-changing-inputs"
    names = [f"utility-quality {other}"] + ["all"] * ("--panels" not in options)
    for several in names:
        code, said = upgd(f"reproduce {several} --scale smoke {options}")
        assert code == 0, said.err
    monkeypatch.setenv("UPGD_STORE", "./mine.db")  # is for all commands
    assert upgd("reproduce utility-quality --scale smoke --quiet")[0] == 0


CIFAR10 = "output-permuted-cifar10"


@pytest.fixture
def planned(upgd, monkeypatch):
    """Run a command without computing; return the plans, and the commands for the pages."""
    from upgd.cli import reproducing

    planned = []
    monkeypatch.setattr(reproducing, "_carry_out", lambda plan, *rest: planned.append((plan, rest[2])) or True)

    def type_(line):
        planned.clear()
        code, said = upgd(line)
        assert code == 0, said.err
        return list(planned)

    return type_


class TestScreening:
    def test_it_is_a_stage_of_its_own(self, upgd, tmp_path):
        """PGD has 63 settings: 20 of the paper, and a fifth of the others, 9, after the screening."""
        what = (
            "reproduce upgd-stationary-mnist --scale smoke --panels weight-global --methods pgd --grid extended --screen 20 "
            "--keep 0.2 --steps 40"
        )
        code, said = upgd(f"{what} --dry-run --workers 1")
        assert code == 0, said.err
        assert said.out.splitlines()[1:5] == [
            "  weight-global: screening 0 of 43, search 0 of 29, final runs 0 of 2",
            "  left of the screening: 43 learners, 860 learner-steps",
            "  then the search: 1,160 learner-steps",
            "  then the final runs: 80 learner-steps",
        ]
        (found,) = json.loads(upgd(f"{what} --dry-run --json --workers 1")[1].out)
        assert found["panels"]["weight-global"]["screening"] == {"computed": 0, "wanted": 43}
        assert list(found["left"]) == ["screening", "search", "shortlist", "final runs"]
        code, said = upgd(f"{what} --quiet --workers 1")
        assert code == 0, said.err
        text = (tmp_path / "reproduced" / "upgd-stationary-mnist.md").read_text(encoding="utf-8")
        assert f"Command: `upgd {what}`" in text
        assert "Search: 63 settings, 1 run each" in text
        assert (
            "43 of the settings, all outside the paper's grid, were screened in runs of 20 steps: the best 20% of each curve "
            "then ran at full length, and the other 34 did not."
        ) in text
        assert "nothing is left to compute" in upgd(f"{what} --dry-run")[1].out
        without = what.replace("--screen 20 --keep 0.2 ", "")
        (found,) = json.loads(upgd(f"{without} --dry-run --json --workers 1")[1].out)
        assert found["panels"]["weight-global"]["search"] == {"computed": 29, "wanted": 63}
        assert "screening" not in found["left"]

    @pytest.mark.parametrize(
        "words",
        [
            "--screen 1e3",
            f"--screen {CIFAR10}=30 --keep 0.5",
            f"--screen {CIFAR10}=30 --screen 2_000 --sweep-steps 1e5",
        ],
    )
    def test_the_command_on_the_page_gives_the_same_plan(self, planned, words):
        found = planned(f"reproduce ablation input-permuted-mnist --grid extended {words}")
        assert [plan.study.name for plan, _ in found] == ["ablation", "input-permuted-mnist"]
        for plan, command in found:
            ((again, same),) = planned(command.removeprefix("upgd "))
            assert same == command
            assert again == (plan if plan.screen else replace(plan, keep=again.keep))  # without it, keep has no effect

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (
                "--screen 9",
                "screen applies to the grid 'extended' only, not to 'paper'; choose that grid, or leave screen",
            ),
            (
                "--grid star --screen 9",
                "screen applies to the grid 'extended' only, not to 'star'",
            ),
            ("--grid extended --keep 0.5", "--keep 0.5 applies to --screen only; remove it, or add --screen STEPS"),
            ("--grid extended --screen 9 --keep 0", "keep must be a number above 0 and at most 1, not 0"),
            ("--grid extended --screen 9 --keep 1.1", "keep must be a number above 0 and at most 1, not 1.1"),
            (
                "--grid extended --screen 1e6",
                "screen must be less than the 1,000,000 steps of the search on input-permuted",
            ),
            ("--grid extended --screen 0", "screen must be an integer of at least 1, not 0"),
            (
                "--grid extended --screen soon",
                "--screen takes a number or NAME=NUMBER, such as 300000 or .*, not 'soon'",
            ),
            (
                "--grid extended --screen cifar10=9",
                "--screen cifar10=9: there is no problem 'cifar10' in ablation; choose among input-permuted-mnist, ",
            ),
        ],
    )
    def test_mistakes_get_a_sentence(self, upgd, words, sentence):
        code, said = upgd(f"reproduce ablation {words} --dry-run")
        assert code != 0
        assert said.err.count("\n") == 1
        assert re.search(sentence, said.err)


class TestLengthOfTheSearch:
    @pytest.mark.parametrize(
        ("words", "lengths"),
        [
            ("", {}),
            ("--sweep-steps 1e2", dict.fromkeys(STUDIES["ablation"].problems(), 100)),
            (f"--sweep-steps {CIFAR10}=30", {CIFAR10: 30}),
            (
                f"--sweep-steps {CIFAR10}=30 --sweep-steps 2_000",
                {"input-permuted-mnist": 2_000, "output-permuted-emnist": 2_000, CIFAR10: 30},
            ),
            (
                f"--sweep-steps {CIFAR10}=30 --steps 1e4 --sweep-steps input-permuted-mnist=20 --only sigma=0.1 --grid paper",
                {CIFAR10: 30, "input-permuted-mnist": 20},
            ),
        ],
    )
    def test_the_command_on_the_page_gives_the_same_plan(self, planned, words, lengths):
        ((plan, command),) = planned(f"reproduce ablation --data mnist=my-digits {words}")
        assert plan.sweep_steps == lengths
        program, _, line = command.partition(" ")
        assert program == "upgd"
        assert planned(line) == [(plan, command)]

    def test_options_apply_to_the_studies_that_have_them(self, planned):
        names = ["input-permuted-mnist", CIFAR10, "ablation"]
        found = planned(f"reproduce {' '.join(names)} --sweep-steps {CIFAR10}=30 --sweep-steps input-permuted-mnist=20")
        assert [plan.study.name for plan, _ in found] == names
        assert [plan.sweep_steps for plan, _ in found] == [
            {"input-permuted-mnist": 20},
            {CIFAR10: 30},
            {"input-permuted-mnist": 20, CIFAR10: 30},
        ]
        for plan, command in found:
            assert planned(command.removeprefix("upgd ")) == [(plan, command)]

    @pytest.mark.parametrize(
        ("names", "value", "sentence"),
        [
            ("ablation", "soon", "--sweep-steps takes a number or NAME=NUMBER, such as 300000 or .*, not 'soon'"),
            ("ablation", "1.5", "--sweep-steps takes a number or NAME=NUMBER, .*, not '1.5'"),
            ("ablation", f"{CIFAR10}=", f"--sweep-steps takes a number or NAME=NUMBER, .*, not '{CIFAR10}='"),
            ("ablation", "=30", "--sweep-steps takes a number or NAME=NUMBER, .*, not '=30'"),
            (
                "ablation",
                "cifar10=30",
                "--sweep-steps cifar10=30: there is no problem 'cifar10' in ablation; choose among input-permuted-mnist, ",
            ),
            (
                "toy-changing-inputs input-permuted-mnist",
                f"{CIFAR10}=30",
                "in toy-changing-inputs, input-permuted-mnist; choose among toy-changing-inputs, input-permuted-mnist",
            ),
            (
                "utility-quality",
                f"{CIFAR10}=30",
                "utility-quality is not a sweep and does not support --sweep-steps; leave",
            ),
            ("ablatoin", f"{CIFAR10}=30", "there is no experiment 'ablatoin'; did you mean 'ablation'?"),
            ("ablation", "0", "sweep_steps must be an integer of at least 1, not 0"),
            ("ablation", f"{CIFAR10}=-5", "sweep_steps must be an integer of at least 1, not -5"),
        ],
    )
    def test_mistakes_get_a_sentence(self, upgd, names, value, sentence):
        code, said = upgd(f"reproduce {names} --sweep-steps {value} --dry-run")
        assert code != 0
        assert said.err.count("\n") == 1
        assert re.search(sentence.replace("?", r"\?"), said.err)

    def test_the_estimate_uses_length_and_speed_of_each_problem(self, upgd, monkeypatch):
        """10 arms, 2 settings each, and 2 final runs of 80 steps; a step takes 1 s on permuted inputs, 9 s on outputs."""
        from upgd.experiments.execution import estimate

        def seconds(jobs, *_):
            (problem,) = {job.problem for job in jobs}
            return sum(job.learner_steps for job in jobs) * (1 if problem.startswith("input") else 9)

        monkeypatch.setattr(estimate, "estimate", seconds)
        panels = "mnist-decay,mnist-no-decay,cifar10-decay,cifar10-no-decay"
        what = f"reproduce ablation --scale smoke --panels {panels} --sweep-steps {CIFAR10}=30 --dry-run"
        code, said = upgd(f"{what} --workers 1")
        assert code == 0, said.err
        assert f"left of the search: 40 learners, {20 * 80 + 20 * 30:,} learner-steps" in said.out
        assert f"then the final runs: {2 * 20 * 80:,} learner-steps" in said.out
        assert f"about {duration(20 * (80 + 80) + 9 * 20 * (30 + 80))}, measured" in said.out


def test_under_a_time_limit_the_study_that_cannot_continue_comes_last_and_once(upgd, tmp_path, monkeypatch):
    from upgd.cli import reproducing
    from upgd.experiments.paper import _utility_page

    done = []
    monkeypatch.setattr(_utility_page, "main", lambda arguments: done.append("utility-quality"))
    monkeypatch.setattr(reproducing, "_carry_out", lambda plan, *_: done.append(plan.study.name) or True)
    what = "reproduce utility-quality toy-changing-inputs --scale smoke"
    assert upgd(f"{what} --stop-after 0")[1].out.endswith(
        "  stopped at the time limit; repeat the command to continue\n"
    )
    assert done == ["toy-changing-inputs"]
    assert upgd(f"{what} --stop-after 1000")[0] == 0
    assert done[1:] == ["toy-changing-inputs", "utility-quality"]
    (tmp_path / "reproduced" / "utility-quality.md").touch()
    out = upgd(f"{what} --stop-after 1000")[1].out
    assert "  skipped: reproduced/utility-quality.md exists; delete it to compute it anew\n" in out
    assert done[3:] == ["toy-changing-inputs"]
    upgd(what)
    assert done[4:] == ["utility-quality", "toy-changing-inputs"]
