"""Progress of a sweep, in numbers and text."""

import io
import json
import os
import time

import pytest
from rich.console import Console

from upgd.experiments.execution import progress as module
from upgd.experiments.execution.jobs import Job
from upgd.experiments.execution.progress import Progress, ProgressFile, display, duration, published
from upgd.population import Learner


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only on request."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def job(lr: float, learners: int = 2, steps: int = 100) -> Job:
    return Job("p", {}, "n", steps, tuple(Learner(method="sgd", lr=lr, seed=seed) for seed in range(learners)))


def started(clock) -> tuple[Progress, Job, Job]:
    first, second = job(0.1), job(0.2)
    progress = Progress(400, 2, already=3, _began=clock.now)
    return progress, first, second


def test_counts_rate_and_time_left(clock):
    progress, first, second = started(clock)
    progress.update(first, 0, 0)
    assert progress.seconds_left is None
    clock.now += 10
    progress.update(first, 100, 1)
    assert (progress.steps, progress.rate, progress.seconds_left, progress.diverged) == (100, 10.0, 30.0, 1)
    clock.now += 10
    progress.finish(first, 2)
    progress.update(second, 0, 0)
    assert (progress.steps, progress.rate, progress.diverged, progress.learners) == (200, 10.0, 2, 2)
    assert progress.line() == " 50%, 1/2 jobs, 5 learners stored, 10 learner-steps/s, 20 s left, 2 diverged"


def test_earlier_runs_do_not_count_for_the_rate(clock):
    progress, first, _ = started(clock)
    progress.update(first, 150, 0)
    clock.now += 1
    progress.update(first, 160, 0)
    assert progress.rate == 10.0
    assert progress.steps == 160


def test_nothing_done_yet_has_a_reason(clock):
    progress, first, _ = started(clock)
    assert progress.line() == "  0%, 0/2 jobs, 3 learners stored, starting (compiles the first time)"
    progress.update(first, 100, 0)  # by an earlier run
    assert progress.line().endswith("starting (compiles the first time)")
    progress.update(first, 101, 0)
    assert "starting" not in progress.line()
    assert "starting" not in Progress(0, 0, already=3).line()


def test_a_rate_is_shown_once_there_is_one(clock):
    progress = Progress(100_000, 1, _began=clock.now)
    first = job(0.1, steps=50_000)
    progress.update(first, 0, 0)
    clock.now += 20  # most of it for preparation
    progress.update(first, 500, 0)
    assert progress.line() == "  0%, 0/1 jobs, 0 learners stored"
    clock.now += 40
    assert "8.33 learner-steps/s" in progress.line()
    progress.update(first, 3000, 0)
    assert "62.5 learner-steps/s, 25 min 52 s left" in progress.line()


def test_compilation_does_not_count_as_work(clock):
    progress, first, second = started(clock)
    clock.now += 300
    progress.update(first, 0, 0)
    progress.update(first, 10, 0)
    clock.now += 1
    progress.update(first, 60, 0)
    assert (progress.rate, progress.seconds_left) == (50.0, 340 / 50)
    clock.now += 4
    progress.finish(first, 0)
    assert progress.rate == 190 / 5
    progress.finish(second, 0)
    assert progress.rate == 390 / 5


def test_work_done_at_once_uses_the_elapsed_time(clock):
    progress, first, _ = started(clock)
    clock.now += 20
    progress.finish(first, 0)
    assert progress.rate == 10


@pytest.mark.parametrize("kept", [0, 50, 100])
def test_steps_lost_with_a_worker_count_as_work(clock, kept):
    """The job resumes from an older checkpoint: less is done than before, but the progress does not decrease."""
    progress, first, second = started(clock)
    progress.update(first, 20, 0)  # by an earlier run
    clock.now += 1
    progress.update(first, 120, 0)
    clock.now += 10
    progress.update(first, 160, 0)
    clock.now += 10
    progress.update(first, kept, 0)
    assert (progress.steps, progress.rate) == (kept, 2.0)
    assert progress.seconds_left == (400 - kept) / 2
    assert "2 learner-steps/s" in progress.line()
    assert "-" not in progress.line().replace("learner-steps", "")
    clock.now += 20
    progress.finish(first, 0)
    assert progress.rate == (40 + 200 - kept) / 40
    progress.update(second, 0, 0)
    assert progress.seconds_left == 200 / progress.rate


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.2 s"), (42.4, "42 s"), (190, "3 min 10 s"), (7500, "2 h 5 min"), (273_600, "3 d 4 h")],
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_plain_lines_are_few(clock):
    stream = io.StringIO()
    progress, first, second = started(clock)
    with display("auto", stream) as show:
        for second_ in range(600):
            progress.update(first, second_ // 3, 0)
            show(progress)
            clock.now += 1
        for one in (first, second):
            progress.finish(one, 0)
            show(progress)
    lines = stream.getvalue().splitlines()
    assert 10 < len(lines) < 40
    assert lines[0].startswith("  0%, 0/2 jobs")
    assert lines[-1].startswith("100%, 2/2 jobs, 7 learners stored")


def test_work_continues_if_the_progress_pipe_is_closed(clock):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    progress, first, _ = started(clock)
    with display("plain", Gone()) as show:
        progress.update(first, 50, 0)
        show(progress)
    assert progress.steps == 50


def test_final_runs_are_shown_after_the_search(clock):
    """One display shows both, one after the other."""
    stream = io.StringIO()
    with display("plain", stream) as show:
        for _ in range(2):
            progress, first, _second = started(clock)
            for done in range(100):
                progress.update(first, done, 0)
                show(progress)
                clock.now += 1
    assert sum(line.startswith("  0%") for line in stream.getvalue().splitlines()) == 2


def test_none_means_nothing(clock):
    stream = io.StringIO()
    with display("none", stream) as show:
        show(started(clock)[0])
    assert stream.getvalue() == ""


def terminal(monkeypatch) -> io.StringIO:
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    return Terminal()


def test_bars_in_a_terminal(monkeypatch):
    """The bars drawn by rich are checked by the text on the screen."""
    stream = terminal(monkeypatch)
    progress = Progress(400, 2)
    first, second = job(0.1), job(0.2)
    with display("auto", stream) as show:
        for one in (first, second):
            progress.update(one, 0, 0)
            show(progress)
            progress.update(one, 120, 1)
            show(progress)
            progress.finish(one, 1)
            show(progress)
    drawn = stream.getvalue()
    assert "all" in drawn
    assert "100%" in drawn
    assert "2/2 jobs, 4 learners stored" in drawn
    assert "2 diverged" in drawn


def test_the_bar_of_final_runs_is_not_that_of_the_search(monkeypatch):
    stream = terminal(monkeypatch)
    with display("auto", stream) as show:
        for total, done in ((400, 400), (1000, 200)):
            progress = Progress(total, 1)
            progress.update(job(0.1), done, 0)
            show(progress)
    overall = [line for line in stream.getvalue().splitlines() if "all" in line]
    assert " 20%" in overall[-1]


@pytest.mark.parametrize(
    ("width", "note"),
    [
        (120, "1/2 jobs, 5 learners stored, 10 learner-steps/s, 20 s left, 2 diverged"),
        (95, "1/2 jobs, 10 learner-steps/s, 20 s left, 2 diverged"),
        (80, "1/2 jobs, 20 s left, 2 diverged"),
        (60, "20 s left, 2 diverged"),
    ],
)
def test_a_narrow_terminal_keeps_bars_and_the_time_that_is_left(clock, width, note):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    progress, first, second = started(clock)
    progress.update(first, 0, 0)
    clock.now += 20
    progress.finish(first, 2)
    progress.update(second, 0, 0)
    with module._Bars(console) as bars:
        bars(progress)
    overall = _last_line(console, " 50%")
    assert overall.endswith(note)
    assert "━━━" in overall
    assert "…" not in console.file.getvalue()


@pytest.mark.parametrize(("width", "said"), [(80, True), (60, False)])
def test_a_narrow_terminal_shows_the_reason_if_it_fits(clock, width, said):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with module._Bars(console) as bars:
        bars(started(clock)[0])
    assert ("starting (compiles the first time)" in _last_line(console, " 0%")) == said
    assert "…" not in console.file.getvalue()


def _last_line(console, part: str) -> str:
    *_, line = (line.rstrip() for line in console.file.getvalue().splitlines() if part in line)
    return line


def test_other_processes_can_read_how_far_it_is(tmp_path, monkeypatch):
    first, second = job(0.1), job(0.2, learners=5)
    progress = Progress.of([first, second], already=3)
    (tmp_path / "link.db").symlink_to(tmp_path / "r.db")
    reader = ProgressFile.beside(tmp_path / "r.db")
    shown = []
    with published(shown.append, tmp_path / "link.db") as tell:
        tell(progress)
        assert reader.read()["share"] == 0
        monkeypatch.setattr(module, "_FILE_S", 0.0)
        progress.finish(first, 1)
        tell(progress)
        said = reader.read()
        assert said["share"] == pytest.approx(200 / 700)
        assert said["text"].startswith("1/2 jobs, 5 of 10 learners stored, ")
        assert "learner-steps/s" in said["text"]
        assert said["text"].endswith(" left, 1 diverged")
        assert 0 <= said["age"] < 60
        progress.finish(second, 0)
        monkeypatch.setattr(module, "_FILE_S", 1e9)
        tell(progress)
        assert reader.read()["share"] == pytest.approx(200 / 700)  # printed a moment ago
    assert shown == [progress] * 3
    assert reader.read() is None
    assert list(tmp_path.iterdir()) == [tmp_path / "link.db"]


def test_the_age_of_the_last_message_is_known(tmp_path):
    file = ProgressFile.beside(tmp_path / "r.db")
    file.path.write_text(json.dumps({"at": time.time() - 1000, "share": 0.5, "text": "1/2 jobs"}))
    assert 1000 <= file.read()["age"] < 1060


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"at": 1}', '{"at": "x", "share": 1, "text": ""}'])
def test_a_damaged_progress_file_is_ignored(tmp_path, text):
    file = ProgressFile.beside(tmp_path / "r.db")
    file.path.write_text(text)
    assert file.read() is None


def test_a_sweep_continues_without_the_progress_file(tmp_path):
    (tmp_path / "r.db.progress").mkdir()
    with published(lambda progress: None, tmp_path / "r.db") as tell:
        tell(Progress(100, 1))
    assert os.listdir(tmp_path) == ["r.db.progress"]


def test_results_in_memory_have_no_file(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    with published(print, Path(":memory:")) as tell:
        assert tell is print
    assert os.listdir(tmp_path) == []
