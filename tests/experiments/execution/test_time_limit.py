"""Jobs that must end within a time limit, because unfinished ones would be lost."""

from types import SimpleNamespace

import pytest
from made_records import results

from upgd.experiments import Experiment
from upgd.experiments.execution import time_limit
from upgd.experiments.execution.jobs import Checkpoints, whole
from upgd.experiments.execution.running import execute
from upgd.experiments.execution.time_limit import TimeLimit, TimeUp
from upgd.experiments.spec.declare import Listed
from upgd.store import Store

#: 40 learners of 60 steps.
STUDY = Experiment("output-permuted-digits", {"sgd": {"lr": [0.1, 0.01]}}, seeds=20, steps=60, network="8")
JOB = 10


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the executor below sets."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def _stored(clock, store, limit, checkpoints=None):
    """Compute as much as possible at one second per learner, and return the jobs: number of learners, whether finished."""
    begun = []

    def executor(jobs, watcher):
        for job in jobs:
            begun.append([len(job.learners), False])
            for done in range(len(job.learners)):
                clock.seconds += 1
                watcher(job, done * job.steps, 0)
            begun[-1][1] = True
            yield job, results(Listed(job.problem, job.network, job.steps, job.options, job.learners)).records

    with pytest.raises(TimeUp):
        execute(STUDY, store, executor, workers=1, device="cpu", checkpoints=checkpoints, job_size=JOB, limit=limit)
    return begun


@pytest.mark.parametrize(
    ("seconds", "jobs"),
    [
        (36.0, [10, 10, 10, 5]),  # nine tenths of the last six seconds
        (32.0, [10, 10, 10]),  # less than a quarter of a job is not worth it
        (21.0, [10, 9, 1]),
    ],
)
def test_only_jobs_that_end_in_time_are_started(clock, seconds, jobs):
    with Store.write(":memory:") as store:
        assert _stored(clock, store, TimeLimit(seconds)) == [[learners, True] for learners in jobs]
        assert len(store) == sum(jobs)
    assert clock.seconds < seconds


def _begun(clock, limit, sizes, seconds):
    """Return the sizes of the jobs that begin, given those of all jobs and the time that each one that begins takes, and
    whether the time is up before all are finished."""
    everything, begun = whole(STUDY), []
    jobs = [everything.part(everything.learners[:size]) for size in sizes]
    try:
        for (job,) in limit.fitting(jobs):
            clock.seconds += seconds[len(begun)]
            begun.append(len(job.learners))
    except TimeUp:
        return begun, True
    return begun, False


@pytest.mark.parametrize(
    ("sizes", "seconds", "last"),
    [  # two jobs, then one of 40 learners
        ((10, 2), (10, 20, 27), 27),  # one learner per second in nine tenths of the 30 seconds left
        ((2, 10), (6, 24, 26), 11),
        ((10, 10), (10, 20, 26), 13),  # of equally large jobs, the latest counts
    ],
)
def test_the_speed_is_that_of_the_largest_job(clock, sizes, seconds, last):
    assert _begun(clock, TimeLimit(60.0), (*sizes, 40), seconds) == ([*sizes, last], True)


def test_a_slow_small_job_does_not_end_the_series(clock):
    """One learner takes as long as many on a GPU."""
    assert _begun(clock, TimeLimit(580.0), (1, 40), (20, 20, 20)) == ([1, 25, 15], False)


def test_the_first_job_is_started_as_its_speed_is_unknown(clock):
    with Store.write(":memory:") as store:
        assert _stored(clock, store, TimeLimit(5.0)) == [[10, False]]


def test_with_checkpoints_nothing_is_lost_so_jobs_run_into_the_limit(clock, tmp_path):
    with Store.write(":memory:") as store:
        begun = _stored(clock, store, TimeLimit(32.0), Checkpoints(tmp_path))
    assert begun == [[10, True], [10, True], [10, True], [10, False]]
