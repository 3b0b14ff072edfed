"""Usability of the command line: number formats, errors, Ctrl-C at inconvenient times."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from upgd.cli import running
from upgd.cli.options import load_torch
from upgd.methods import METHODS
from upgd.store import Key, Record, Store

RUN = ["run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", "--seeds", "1", "--backend", "torch"]
QUICK = [*RUN, "--network", "8", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPGD_STORE", raising=False)
    return tmp_path


def stored(path, *, diverged_at=None):
    key = Key(problem="p", network="8", method="sgd", settings={"lr": 0.1}, seed=0, steps=2_000)
    with Store.write(path) as store:
        store.add([Record(key, window=1_000, loss=[0.5, 0.25], accuracy=[0.5, 0.75], diverged_at=diverged_at)])


@pytest.mark.parametrize("text", ["40", "4e1", "4_0"])
def test_number_formats_of_steps(upgd, text, folder):
    assert upgd(*QUICK, "--steps", text)[0] == 0
    with Store.read(folder / "upgd.db") as store:
        assert [record.key.steps for record in store.records()] == [40]
    assert "1 learner in upgd.db" in upgd("runs", "--steps", text)[2]


@pytest.mark.parametrize("text", ["1.5", "many", "inf", "nan", "9223372036854775808"])
def test_invalid_steps(upgd, text):
    for command in (QUICK, ["best"]):
        code, _, err = upgd(*command, "--steps", text)
        assert (code, err.count("\n")) == (2, 1)
        assert f"--steps: it takes a whole number below 2⁶³, such as 30000 or 1e6, not {text!r}" in err


@pytest.mark.parametrize(
    ("option", "value", "code", "says"),
    [
        (
            "--network",
            "99999999-9",
            1,
            "network='99999999-9' has 7,400,000,035 parameters, more than 1,000,000,000; use",
        ),
        ("--network", "9" * 5_000, 1, "network must be linear, conv, conv-authors, or hidden sizes such as 300-150"),
        ("--option", "task_length=99999999999999999999", 1, "task_length must be less than 2⁶³"),
        ("--device", "meta", 1, "device='meta' cannot be used; use 'auto'"),
        ("--seeds", "50000000", 2, "--seeds takes 200,000 at most, not 50000000; use fewer"),
        ("--lr", ",".join(str(k) for k in range(1, 200_002)), 1, "seeds × settings are 1 × 200,001 = 200,001 learners"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_absurd_values_give_one_sentence(upgd, option, value, code, says, folder):
    options = {"--lr": "0.1", "--seeds": "1", "--steps": "5", "--network": "8", option: value}
    run = ("run", "output-permuted-digits", "--method", "sgd", *(word for pair in options.items() for word in pair))
    ended, _, err = upgd(*run)
    assert (ended, err.count("\n")) == (code, 1)
    assert says in err
    assert not (folder / "upgd.db.checkpoints").exists()


def test_too_many_seeds_are_rejected_early(upgd, folder):
    stored(folder / "upgd.db")
    assert upgd("best", "--seeds", "99999999999") == (
        *(2, ""),
        "upgd: --seeds takes 200,000 at most, not 99999999999; use fewer\n",
    )


@pytest.mark.parametrize(
    "option",
    ["--only=nope", "--scale=small", "--scale=small --json", "--output=there", "--resume-from=there", "--dry-run"],
)
def test_options_of_a_reproduction_without_a_name_are_refused(upgd, option):
    code, out, err = upgd("reproduce", *option.split())
    assert (code, out) == (2, "")
    assert err == "upgd: name the experiments to reproduce, or all; `upgd reproduce` without arguments lists them\n"


def test_a_reproduction_limits_the_number_of_seeds(upgd):
    code, _, err = upgd(
        "reproduce", "toy-changing-inputs", "--scale", "smoke", "--final-seeds", "50000000", "--dry-run"
    )
    assert (code, err) == (1, "upgd: final_seeds must be at most 200,000, not 50000000; use fewer\n")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_is_one_sentence(upgd, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("upgd.experiments.execution.bench.measure", fail)
    code, _, err = upgd("bench")
    assert (code, err) == (
        1,
        "upgd: out of memory; use a smaller --network, fewer --workers or another --device\n",
    )
    monkeypatch.setattr("upgd.cli._is_about_memory", lambda error: False)
    with pytest.raises(type(error)):  # other errors of that class are bugs and keep their traceback
        upgd("bench")


def shell(command, folder):
    upgd = f"{shlex.quote(sys.executable)} -m upgd"
    return subprocess.run(f"{upgd} {command}", shell=True, cwd=folder, capture_output=True, text=True)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_standard_streams(folder):
    stored(folder / "upgd.db")
    ended = shell("best >&-", folder)
    assert (ended.returncode, ended.stderr) == (
        1,
        "upgd: the standard output is closed; redirect it to a file, or to /dev/null\n",
    )
    ended = shell("runs 2>&-", folder)
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1)  # not what is meant for the standard error
    ended = shell("runs delete 1 <&-", folder)
    assert (ended.returncode, ended.stderr) == (
        2,
        "upgd: cannot ask for confirmation without a terminal; use --yes to delete\n",
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_standard_output(folder):
    stored(folder / "upgd.db")
    ended = shell("runs --json > /dev/full", folder)
    assert (ended.returncode, ended.stderr) == (1, "upgd: No space left on device\n")


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_seconds_between_snapshots_are_not_negative(upgd, seconds):
    code, _, err = upgd(*QUICK, "--steps", "5", "--checkpoint-every", seconds)
    message = f"--checkpoint-every must be a number of seconds of at least 0, not {seconds}; use 120 for two minutes"
    assert (code, err) == (2, f"upgd: {message}\n")


def test_an_unexpected_argument(upgd):
    code, _, err = upgd("bench", "upgd", "sgd")
    assert (code, err.count("\n")) == (2, 1)
    assert "unexpected argument 'upgd sgd'" in err
    code, _, err = upgd("best", "upgd", "sgd")
    assert (code, err) == (2, "upgd: there is no store upgd; methods are chosen with --methods upgd,sgd\n")


@pytest.mark.parametrize("name", ["results.xlsx", "results"])
def test_csv_with_another_suffix_needs_the_format_option(upgd, folder, name):
    stored(folder / "upgd.db")
    code, _, err = upgd("export", name)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{name} must end in .csv or .parquet" in err
    assert not (folder / name).exists()
    assert upgd("export", name, "--format", "csv")[0] == 0
    assert (folder / name).read_text(encoding="utf-8").startswith("problem,")
    assert upgd("export", "RESULTS.CSV")[0] == 0


def test_the_list_shows_where_learners_diverged(upgd, folder):
    stored(folder / "upgd.db", diverged_at=1_234)
    assert "2,000 steps  diverged at step 1,234  " in upgd("runs")[1]


def test_ctrl_c_while_torch_is_loaded_ends_the_command():
    swallowing = f"""
import signal, sys

class Torch:  # as its C code does
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Torch())
from upgd.cli import main
main({[*QUICK, "--steps", "5"]!r})
"""
    ended = subprocess.run([sys.executable, "-c", swallowing], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "upgd: stopped\n")


def test_loading_restores_the_handler_of_ctrl_c():
    before = signal.getsignal(signal.SIGINT)
    load_torch()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_without_greek_letters_gets_its_table(folder):
    stored(folder / "upgd.db")
    table = [sys.executable, "-c", "from upgd.cli import main; main()", "table"]
    ended = subprocess.run(table, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"mean ? s.e." in ended.stdout


def _press_ctrl_c(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_in_the_demo_explains_how_to_continue(upgd, monkeypatch):
    monkeypatch.setattr("upgd.experiments.demo.demo", _press_ctrl_c)
    code, out, err = upgd("demo")
    assert (code, out) == (130, "")
    assert err == "upgd: stopped; unfinished runs are saved; repeat the command to continue\n"


def test_ctrl_c_prints_a_message(upgd, monkeypatch):
    monkeypatch.setattr("upgd.experiments.execution.bench.measure", _press_ctrl_c)
    assert upgd("bench") == (130, "", "upgd: stopped\n")


def test_a_study_reports_progress_unless_quiet(upgd, monkeypatch):
    monkeypatch.setattr(running, "_INTERVAL_S", 0.0)
    study = ("run", "utility-quality-features", "--seeds", "1", "--steps", "2", "--json")
    code, _, err = upgd(*study)
    assert code == 0
    assert [line.partition(",")[0] for line in err.splitlines()] == [" 33%", " 67%", "100%"]
    assert err.endswith("about 0.0 s left\n")
    assert upgd(*study, "--quiet")[2] == ""


def test_an_unwritable_file_is_named_without_an_error_number(upgd, folder):
    stored(folder / "upgd.db")
    (folder / "note").touch()
    assert upgd("export", "note/results.csv")[2] == (
        "upgd: the folder note for results.csv does not exist; create it, or choose another file\n"
    )
    assert upgd("export", f"{'x' * 300}.csv") == (1, "", f"upgd: {'x' * 300}.csv: File name too long\n")


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help_has_an_option_for_every_setting_and_no_meaningless_ones(upgd, command):
    code, out, _ = upgd(command, "--help")
    words = set(re.split(r"[\s,.│]+", out))
    assert code == 0
    assert words >= {f"--{name.replace('_', '-')}" for method in METHODS.values() for name in method.settings}
    assert "upgd methods" in " ".join(out.replace("│", " ").split())
    assert "--empty-option" not in words
    assert "default: False" not in out


def test_tables_have_the_same_minus_in_means_and_differences(upgd, folder):
    with Store.write(folder / "upgd.db") as store:
        for method, level in (("sgd", 0.5), ("upgd", 0.4)):
            for seed in range(3):
                key = Key(problem="p", network="8", method=method, settings={"lr": 0.1}, seed=seed, steps=40)
                looks = {"step": [20, 40], "sample_plasticity": [0.1, level + seed / 100]}
                store.add([Record(key, window=10, loss=[0.5] * 4, accuracy=[0.5] * 4, diagnostics=looks)])
    out = upgd("table", "--metric", "loss-of-plasticity")[1]
    cells = [word for line in out.splitlines() if line.startswith(("sgd", "upgd")) for word in line.split()]
    assert any(cell.startswith("−0.") for cell in cells)
    assert not any(cell.startswith("-") for cell in cells)
    assert upgd("report", "--metric", "loss-of-plasticity")[0] == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert ">−0." in page
    assert ">-0." not in page


def test_one_is_singular(upgd, folder):
    arguments = [*QUICK, "--steps", "1", "--option", "task_length=1"]
    out = upgd(*arguments, "--dry-run")[1]
    assert "network 8, 1 step\n" in out
    assert "sgd                      1 learner\n" in out
    assert "0 of 1 learner is in upgd.db already" in out
    assert "to do: 1 learner-step in 1 job on " in out
    assert "network 8, 1 step: online accuracy" in upgd(*arguments)[1]
    assert "network 8, 1 step\n" in upgd("best")[1]
    assert "seed 0  1 step  accuracy" in upgd("runs")[1]


def test_a_dry_run_names_the_options_of_the_problem(upgd):
    headings = [
        upgd(*QUICK, "--steps", "40", "--option", f"task_length={length}", "--dry-run")[1].splitlines()[0]
        for length in (10, 20)
    ]
    assert headings == [f"output-permuted-digits, task_length {k}, network 8, 40 steps" for k in (10, 20)]
    out = upgd(*QUICK, "--steps", "40", "--option", "task_length=20", "--dry-run", "--json")[1]
    assert json.loads(out)["options"] == {"task_length": 20}


def test_a_setting_that_no_method_has_is_refused_with_every_grid(upgd):
    sweep = ("sweep", "output-permuted-digits", "--methods", "sgd", "--beta-utility", "0.9", "--dry-run")
    message = "upgd: none of sgd has the setting 'beta_utility'; remove it\n"
    for grid in ([], ["--grid", "short"], ["--grid", "paper"], ["--grid", "published"]):
        assert upgd(*sweep, *grid) == (1, "", message)


@pytest.mark.parametrize("command", [["watch", "--no-browser"], ["table", "--store"]])
def test_a_folder_and_a_foreign_file_are_no_stores(upgd, folder, monkeypatch, command):
    monkeypatch.setattr("upgd.report.Watch.serve", lambda self: pytest.fail("it was served"))
    (folder / "there").mkdir()
    assert upgd(*command, "there") == (
        *(1, ""),
        "upgd: there is a folder; the store must be a file, such as there/upgd.db\n",
    )
    (folder / "notes.txt").write_text("no store " * 100)
    code, out, err = upgd(*command, "notes.txt")
    assert (code, out, "notes.txt is damaged or not a store" in err) == (1, "", True)


def test_a_store_is_not_imported_but_merged(upgd, folder):
    stored(folder / "m.db")
    code, out, err = upgd("import", "m.db")
    message = "upgd: m.db is a store and not a file of `upgd export --portable`; add it with `upgd runs merge m.db`\n"
    assert (code, out, err) == (1, "", message)


@pytest.mark.parametrize("option", ["--problem=q", "--network=9", "--methods=", "--methods=upgd", "--seeds=7,"])
def test_a_list_of_no_matching_runs_fails_like_a_table(upgd, folder, option):
    stored(folder / "upgd.db")
    failed = upgd("table", option)
    assert failed == (1, "", "upgd: upgd.db has no matching results; `upgd runs` lists all\n")
    assert upgd("runs", option) == upgd("runs", option, "--json") == failed
    Store.write(folder / "empty.db").close()
    assert upgd("runs", option, "--store", "empty.db") == (0, "", "0 learners in empty.db\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*QUICK, "--option", "task_length=100", "--option", "task-length=50"], "--option task_length is given twice"),
        (["reproduce", "ablation", "--sweep-steps", "30", "--sweep-steps", "20"], "--sweep-steps is given twice"),
        (
            ["reproduce", "ups-stationary-mnist", *["--sweep-steps", "stationary-mnist=30"] * 2],
            "--sweep-steps stationary-mnist is given twice",
        ),
        (["reproduce", "ablation", "--grid", "extended", *["--screen", "20"] * 2], "--screen is given twice"),
        (
            ["reproduce", "ups-stationary-mnist", "--data", "mnist=digits", "--data", "mnist=emnist"],
            "--data mnist is given twice",
        ),
    ],
)
def test_options_of_one_name_are_given_once(upgd, arguments, message):
    code, out, err = upgd(*arguments, "--dry-run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"upgd: {message}, as ")
    assert err.endswith("; remove one of them\n")
