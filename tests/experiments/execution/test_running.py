"""Running experiments: at once, in pieces, in several processes; stored results are not computed again."""

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import upgd.experiments as ex
from upgd import networks
from upgd.experiments import Experiment
from upgd.experiments.execution import estimate
from upgd.experiments.execution.jobs import Checkpoints, Job, Snapshot, plan, whole
from upgd.experiments.execution.progress import ProgressFile
from upgd.experiments.execution.running import Options, Runner, execute, pending
from upgd.experiments.execution.workers import Settings, _Pool, _Worker, in_process, in_processes
from upgd.experiments.spec import architecture
from upgd.networks import MLP
from upgd.population import Learner, Population
from upgd.store import Store
from upgd.streams import make

SMALL = Experiment(
    "output-permuted-digits",
    {"sgd": {"lr": [0.1, 0.01]}, "upgd": {"lr": 0.03, "sigma": 0.01}},
    seeds=2,
    steps=60,
    network="8",
    options={"task_length": 25},
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(results: ex.Results) -> list:
    return [(r.key.digest, r.loss.tolist(), r.accuracy.tolist(), r.diverged_at) for r in results.records]


@pytest.fixture(scope="module")
def expected() -> list:
    return numbers(ex.run(SMALL, backend="torch"))


def test_problem_and_network_are_created_once_per_run(monkeypatch):
    made = []
    monkeypatch.setattr(
        architecture, "network", lambda *given, usual=architecture.network: made.append(1) or usual(*given)
    )
    everything = whole(SMALL)
    jobs = plan(everything, workers=3, most=1)
    assert len(jobs) == 6
    with Store.write(":memory:") as store:
        execute(SMALL, store, in_process(Settings(backend="torch")), workers=3, device="cpu")
    assert len(made) == 1


def test_cached_values_of_a_job_are_not_pickled():
    everything = whole(SMALL)
    _ = everything.digests, everything.built
    part = everything.part(everything.learners[:1])
    assert part.digests == {everything.key(part.learners[0]).digest}
    sent = pickle.loads(pickle.dumps(part))
    assert sent == part
    assert vars(sent).keys() == {"problem", "options", "network", "steps", "learners"}
    assert sent.like(part).built is everything.built
    other = Job("output-permuted-digits", {"task_length": 5}, "8", 60, part.learners)
    assert other.like(part).built is not everything.built


def test_a_runner_counts_what_it_adds_and_opens_the_store_late(tmp_path):
    path = tmp_path / "results.db"
    with (
        Runner(Options(store=path, device="nowhere"), progress=False) as runner,
        pytest.raises(ValueError, match="nowhere"),
    ):
        runner(SMALL)
    assert not path.exists()
    fewer = Experiment(
        "output-permuted-digits", {"sgd": {"lr": 0.1}}, seeds=2, steps=60, network="8", options={"task_length": 25}
    )
    with Runner(Options(store=path, workers=1, backend="torch"), progress=False) as runner:
        assert len(runner(fewer).records) == runner.added == 2
        assert len(runner(SMALL).records) == runner.added == 6
        runner(SMALL)
        assert runner.added == 6


def test_records_equal_the_populations_results():
    results = ex.run(SMALL, backend="torch")
    population = Population(MLP((64, 8, 10)), SMALL.learners(), backend="torch")
    shown = population.run(make("output-permuted-digits", task_length=25), 60)
    for i, (learner, record) in enumerate(zip(SMALL.learners(), results.records, strict=True)):
        assert record.key.settings == learner.settings()
        assert (record.key.method, record.key.seed) == (learner.method, learner.seed)
        np.testing.assert_array_equal(record.accuracy, shown.accuracy[:, i].astype(np.float32))
        np.testing.assert_array_equal(record.loss, shown.loss[:, i].astype(np.float32))
        assert record.ends.tolist() == [25, 50, 60]
        assert record.backend == "torch"


def test_arguments_or_an_experiment_but_not_both():
    with pytest.raises(TypeError, match="not both"):
        ex.run(SMALL, steps=3)
    with pytest.raises(ValueError, match="methods must be one or more"):
        ex.run("output-permuted-digits")


def test_regression_has_no_accuracy():
    (record,) = ex.run(
        "toy-changing-inputs", {"sgd": {"lr": 0.01}}, seeds=1, steps=10, network="linear", backend="torch"
    ).records
    assert record.accuracy is None
    assert record.loss.shape == (1,)


def test_stored_results_are_not_computed_again(tmp_path, monkeypatch, expected):
    path = tmp_path / "r.db"
    assert numbers(ex.run(SMALL, store=path, backend="torch")) == expected
    monkeypatch.setattr("upgd.experiments.execution.workers.compute", lambda *_: pytest.fail("computed again"))
    assert numbers(ex.run(SMALL, store=path, backend="torch")) == expected


def test_only_what_is_new_is_computed(tmp_path, expected):
    path = tmp_path / "r.db"
    fewer = Experiment(SMALL.problem, {"sgd": {"lr": 0.1}}, seeds=1, steps=60, network="8", options=dict(SMALL.options))
    ex.run(fewer, store=path, backend="torch")
    with Store.write(path) as store:
        jobs = pending(SMALL, store, workers=1, device="cpu")
        assert sum(len(job.learners) for job in jobs) == 5
    assert numbers(ex.run(SMALL, store=path, backend="torch")) == expected


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        ("toy-changing-outputs", {"amplitude": 1}),
        ("toy-changing-outputs", {"amplitude": np.float32(1), "task_length": 200}),
        ("output-permuted-digits", {"task_length": 1_000, "drift": 0}),
    ],
)
def test_options_with_their_default_values_do_not_make_another_run(tmp_path, problem, options):
    path, plain = tmp_path / "r.db", {"seeds": 1, "steps": 5, "network": "4", "backend": "torch"}
    for given in ({}, options):
        ex.run(problem, {"sgd": {"lr": 0.01}}, store=path, options=given, **plain)
    with Store.read(path) as store:
        assert [one.key.options for one in store.records()] == [{}]


@pytest.mark.parametrize("change", [{"steps": 61}, {"network": "9"}, {"options": {"task_length": 26}}, {"seeds": [5]}])
def test_a_changed_experiment_is_another(tmp_path, change):
    path = tmp_path / "r.db"
    plain = {"seeds": 1, "steps": 60, "network": "8", "options": {"task_length": 25}}
    ex.run("output-permuted-digits", {"sgd": {"lr": 0.1}}, store=path, backend="torch", **plain)
    ex.run("output-permuted-digits", {"sgd": {"lr": 0.1}}, store=path, backend="torch", **(plain | change))
    with Store.read(path) as store:
        assert len(store) == 2


def test_an_interrupted_job_resumes(tmp_path, expected):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    settings = Settings(backend="torch", checkpoints=checkpoints)
    calls = []

    def interrupt(job, done, diverged):
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    def note(job, done, diverged):
        resumed.setdefault(job.name, done)

    resumed: dict[str, int] = {}
    with Store.write(tmp_path / "r.db") as store:
        (job, *others) = pending(SMALL, store, 1, "cpu", checkpoints)
        with pytest.raises(KeyboardInterrupt):
            list(in_process(settings)([job], interrupt))
        assert calls[2] > 0
        assert pending(SMALL, store, 3, "cpu", checkpoints)[0] == job  # unchanged, regardless of the number of workers
        execute_with = in_process(settings)

        def executor(jobs, watcher):
            for u in jobs:
                yield from execute_with([u], note)

        results = execute(SMALL, store, executor, workers=1, device="cpu", checkpoints=checkpoints)
    assert resumed[job.name] == calls[2]
    assert all(resumed[other.name] == 0 for other in others)
    assert numbers(results) == expected
    assert not checkpoints.folder.exists()


def test_units_of_all_methods_take_turns():
    """While a sweep runs, its page compares all methods."""
    three = Experiment("bit-flipping", ["sgd", "upgd", "adamw"], grid={"lr": [0.1, 0.01]}, seeds=10)
    methods = [job.learners[0].method for job in plan(whole(three), 1, 5)]
    assert methods == ["sgd", "upgd", "adamw"] * 4
    uneven = Experiment("bit-flipping", {"sgd": {"lr": 0.1}, "upgd": {"lr": [0.1, 0.01, 0.001]}}, seeds=4)
    jobs = [(job.learners[0].method, len(job.learners)) for job in plan(whole(uneven), 1, 8)]
    assert jobs == [("upgd", 6), ("sgd", 4), ("upgd", 6)]


def test_other_processes_can_read_the_progress(tmp_path):
    said = []

    def show(progress):
        said.append(ProgressFile.beside(tmp_path / "r.db").read())

    with Store.write(tmp_path / "r.db") as store:
        execute(SMALL, store, in_process(Settings(backend="torch")), workers=1, device="cpu", show=show)
    assert said[0] is None  # first the terminal, then the file
    assert said[1]["share"] == 0
    assert not (tmp_path / "r.db.progress").exists()


def test_a_damaged_checkpoint_restarts_the_job(tmp_path, expected, caplog):
    checkpoints = Checkpoints(tmp_path / "r.db.checkpoints")
    job = plan(whole(SMALL), 1, 32)[0]
    checkpoints.save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
    (checkpoints.folder / f"{job.name}.pt").write_bytes(b"nonsense")
    (checkpoints.folder / "other.json").write_text("{}")
    assert numbers(ex.run(SMALL, store=tmp_path / "r.db", backend="torch")) == expected
    assert caplog.text.count("start again") == 2
    aside = sorted(path.name for path in checkpoints.folder.iterdir())
    assert aside == [f"{job.name}.pt.damaged", "other.json.damaged"]


def half_done(job: Job) -> Population:
    """Return a population in the middle of a job, with a state that differs from the initial one."""
    stream = SMALL.stream()
    population = Population(architecture.network(job.network, stream), job.learners, backend="torch")
    population.run(stream, 20)
    return population


def test_a_flipped_bit_is_detected_and_the_previous_snapshot_is_used(tmp_path, expected, caplog):
    checkpoints = Checkpoints.beside(tmp_path / "r.db")
    job = plan(whole(SMALL), 1, 32)[0]
    population = half_done(job)
    checkpoints.save(job, Snapshot(population.state(), 1.0))
    population.run(SMALL.stream(), 20)
    state = population.state()
    checkpoints.save(job, Snapshot(state, 2.0))
    assert int(checkpoints.load(job).state["step"]) == 40
    file = checkpoints.folder / f"{job.name}.pt"
    content = bytearray(file.read_bytes())
    weights = max((name for name in state if name.startswith("group.")), key=lambda name: state[name].numel())
    content[content.index(state[weights].numpy().tobytes()) + 2] ^= 1  # in the significand of one weight
    file.write_bytes(content)
    assert numbers(ex.run(SMALL, store=tmp_path / "r.db", backend="torch")) == expected
    assert caplog.messages == [
        f"{file} is damaged (its checksum is wrong) and was renamed to {file.name}.damaged; "
        "its learners resume from an earlier one"
    ]
    assert [path.name for path in checkpoints.folder.iterdir()] == [f"{file.name}.damaged"]


def test_no_flipped_bit_and_no_missing_end_changes_what_is_loaded(tmp_path):
    checkpoints, job = Checkpoints(tmp_path / "checkpoints"), whole(SMALL)
    state = {"a": torch.randn(50), "b": torch.arange(20)}
    checkpoints.save(job, Snapshot(state, 1.5))
    file = checkpoints.folder / f"{job.name}.pt"
    good, chance = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        content = bytearray(good)
        if chance.random() < 0.1:
            del content[chance.randrange(len(content)) :]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        loaded = checkpoints.load(job)
        refused += loaded is None
        if loaded is not None:  # the bit was in the padding
            assert loaded.seconds == 1.5
            assert loaded.state.keys() == state.keys()
            assert all(torch.equal(loaded.state[name], state[name]) for name in state)
    assert refused > 20


@pytest.mark.parametrize("part", ["state", "seconds", "job", "package", "digest"])
def test_an_incomplete_checkpoint_restarts_the_job(tmp_path, caplog, part):
    checkpoints, job = Checkpoints(tmp_path / "checkpoints"), whole(SMALL)
    checkpoints.save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
    file = checkpoints.folder / f"{job.name}.pt"
    content = torch.load(file, weights_only=True)
    del content[part]
    torch.save(content, file)
    assert checkpoints.load(job) is None
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("its learners start again")


def test_a_checkpoint_of_other_learners_is_not_taken(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    one, other = plan(whole(SMALL), 1, 2)[:2]
    checkpoints.save(one, Snapshot({"step": torch.tensor(1)}, 1.0))
    (checkpoints.folder / f"{one.name}.pt").rename(checkpoints.folder / f"{other.name}.pt")
    assert checkpoints.load(other) is None
    assert "it is a snapshot of other learners" in caplog.text


def test_after_a_kill_between_renames_the_previous_snapshot_is_used(tmp_path, monkeypatch, caplog):
    checkpoints, job = Checkpoints(tmp_path / "checkpoints"), whole(SMALL)
    checkpoints.save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
    rename = Path.replace

    def killed(self, target):
        if Path(target).suffix == ".pt":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(job, Snapshot({"step": torch.tensor(2)}, 2.0))
    assert checkpoints.load(job).seconds == 1.0
    assert not caplog.messages


def test_a_checkpoint_of_another_version_restarts_the_job(tmp_path, expected, monkeypatch, caplog):
    job = plan(whole(SMALL), 1, 32)[0]
    monkeypatch.setattr("upgd.experiments.execution.jobs.__version__", "0.0.1")
    Checkpoints.beside(tmp_path / "r.db").save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
    monkeypatch.undo()
    assert numbers(ex.run(SMALL, store=tmp_path / "r.db", backend="torch")) == expected
    assert "it is from upgd 0.0.1" in caplog.text


def test_a_state_of_another_network_is_not_taken(tmp_path):
    """The name of a checkpoint depends on its learners' keys, so this happens only to files that were moved."""
    job = plan(whole(SMALL), 1, 32)[0]
    population = Population(MLP((64, 9, 10)), job.learners, backend="torch")
    Checkpoints.beside(tmp_path / "r.db").save(job, Snapshot(population.state(), 1.0))
    with pytest.raises(ValueError, match="belongs to another network"):
        ex.run(SMALL, store=tmp_path / "r.db", backend="torch")


def test_leftovers_of_dead_and_finished_jobs_are_removed(tmp_path):
    path = tmp_path / "r.db"
    ex.run(SMALL, store=path, backend="torch")
    checkpoints = Checkpoints.beside(path)
    job = plan(whole(SMALL), 1, 32)[0]
    checkpoints.save(job, Snapshot({}, 1.0))
    (checkpoints.folder / "x.1.partial").touch()
    ex.run(SMALL, store=path, backend="torch")
    assert not checkpoints.folder.exists()


def test_a_unit_survives_json():
    experiment = Experiment(
        "bit-flipping", {"adamw": {"lr": 0.1, "betas": (0.0, 0.99)}, "ups": {"lr": 1, "wise": "feature"}}, seeds=2
    )
    job = whole(experiment)
    assert Job.from_json(job.to_json()) == job
    assert Job.from_json(job.to_json()).name == job.name


@pytest.mark.parametrize(("workers", "most"), [(1, 32), (2, 32), (3, 2), (50, 7), (1, 1)])
def test_a_plan_holds_every_learner_once(workers, most):
    job = whole(Experiment("bit-flipping", {"sgd": {"lr": [0.1, 0.2, 0.3]}, "upgd": {"lr": 0.1}}, seeds=5))
    jobs = plan(job, workers, most)
    assert sorted(map(repr, (learner for one in jobs for learner in one.learners))) == sorted(map(repr, job.learners))
    assert all(len({learner.kind for learner in one.learners}) == 1 for one in jobs)
    assert max(len(one.learners) for one in jobs) <= most
    assert len(jobs) >= min(workers, 2)


class TwoLayers(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(inputs, 5), torch.nn.Linear(5, outputs)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.flatten(-2))))


def test_a_custom_network():
    networks.register("two-layers")(lambda stream: TwoLayers(64, stream.outputs))
    results = ex.run(
        "output-permuted-digits", {"sgd": {"lr": 0.1}}, seeds=1, steps=5, network="two-layers", backend="torch"
    )
    assert results.records[0].key.network == "two-layers"
    for name, says in (
        ("two-layers", "a network named 'two-layers' already exists"),
        ("conv", "'conv' is not a valid"),
    ):
        with pytest.raises(ValueError, match=says):
            networks.register(name)(TwoLayers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_that_the_engine_cannot_run_is_refused_before_others_are_run(tmp_path, monkeypatch, workers):
    monkeypatch.setitem(networks._REGISTERED, "no-chain", lambda stream: TwoLayers(64, stream.outputs))
    methods = {"sgd": {"lr": 0.1}, "upgd": {"lr": 0.1, "order": 2}}
    with pytest.raises(ValueError, match="because upgd with these settings needs curvature"):
        ex.run(
            "output-permuted-digits",
            methods,
            seeds=2,
            steps=5,
            network="no-chain",
            store=tmp_path / "upgd.db",
            workers=workers,
        )
    with Store.read(tmp_path / "upgd.db") as store:
        assert len(store) == 0


def test_missing_data_are_requested(tmp_path, monkeypatch):
    monkeypatch.setenv("UPGD_DATA", str(tmp_path))
    with pytest.raises(Exception, match="upgd data fetch mnist"):
        ex.run("input-permuted-mnist", {"sgd": {"lr": 0.1}}, seeds=1, steps=5)


def test_a_wrong_device_or_option_gets_one_sentence():
    with pytest.raises(ValueError, match="device='gpu' cannot be used"):
        ex.run(SMALL, device="gpu")
    with pytest.raises(ValueError, match="its options are: task_length"):
        ex.run("output-permuted-digits", {"sgd": {"lr": 0.1}}, steps=5, options={"length": 3})
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        ex.run(SMALL, workers=0)
    with pytest.raises(ValueError, match="checkpoint_every must be a number of seconds of at least 0, not -1"):
        ex.run(SMALL, checkpoint_every=-1)
    with pytest.raises(ValueError, match="insecure applies to a Ray cluster only"):
        ex.run(SMALL, insecure=True)
    with pytest.raises(ValueError, match="workers=2 cannot be combined with ray='local'"):
        ex.run(SMALL, workers=2, ray="local")
    with pytest.raises(ValueError, match="look_every must be at least 1, not 0"):
        ex.run(SMALL, look_every=0)


def test_two_processes_give_equal_results_and_dead_workers_are_replaced(tmp_path, expected):
    """One of the workers is killed as soon as it works; another one takes its job."""
    settings = Settings(backend="torch", checkpoints=Checkpoints(tmp_path / "checkpoints"))
    killed: list[int] = []

    def watcher(job, done, diverged):
        if not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    def watched(jobs, _):
        return in_processes(settings, 2)(jobs, watcher)

    with Store.write(tmp_path / "r.db") as store:
        results = execute(SMALL, store, watched, workers=2, device="cpu", checkpoints=settings.checkpoints)
    assert len(killed) == 1
    assert numbers(results) == expected


def test_ctrl_c_while_workers_save_their_work_ends_them_at_once():
    """The parent does not wait for a worker that compiles, which handles no messages."""

    class Process:
        alive, joined = True, 0

        def join(self, timeout=None):
            self.joined += 1
            if self.joined == 1:
                raise KeyboardInterrupt

        def is_alive(self):
            return self.alive

        def kill(self):
            self.alive = False

    pipe, _ = multiprocessing.Pipe()
    pool = _Pool(Settings(), 1, lambda *_: None, [_Worker(Process(), pipe)])
    with pytest.raises(KeyboardInterrupt):
        pool.stop()
    assert (pool.workers[0].process.alive, pipe.closed) == (False, True)


TOLD_TOO_EARLY = """
import os, signal
from upgd.experiments.execution import workers
from upgd.experiments.execution.jobs import Job
from upgd.population import Learner

workers._ATTEMPTS = 1
give = workers._Pool._give

def kill_and_give(self, worker, job):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    give(self, worker, job)

workers._Pool._give = kill_and_give
jobs = [Job("output-permuted-digits", {}, "8", 5, (Learner(method="sgd", lr=lr),)) for lr in (0.1, 0.2)]
done = workers.in_processes(workers.Settings(backend="torch"), 2)(jobs, lambda *_: None)
print(sum(len(records) for _, records in done))
"""


def test_a_starting_worker_ignores_signals_to_its_parent():
    """In a separate process, because only the first worker of a process was affected."""
    ended = subprocess.run([sys.executable, "-c", TOLD_TOO_EARLY], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


@pytest.mark.parametrize("elements", [1_000, 1_000_000])
def test_a_file_that_cannot_grow_gets_a_sentence_and_the_last_snapshot_stays(tmp_path, elements):
    """torch writes large tensors and raises its own error; small ones are written when the file is closed."""
    resource = pytest.importorskip("resource", reason="needs limits on the size of files")
    checkpoints, job = Checkpoints(tmp_path / "checkpoints"), whole(SMALL)
    checkpoints.save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"unfinished work cannot be saved in .*checkpoints \(File too large\)"
        ) as raised:
            checkpoints.save(job, Snapshot({"step": torch.zeros(elements)}, 2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    assert checkpoints.load(job).seconds == 1.0
    assert sorted(path.suffix for path in checkpoints.folder.iterdir()) == [".json", ".pt"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a file system")
    checkpoints, job = Checkpoints(small / "checkpoints"), whole(SMALL)
    try:
        checkpoints.save(job, Snapshot({"step": torch.tensor(1)}, 1.0))
        with pytest.raises(OSError, match=r"unfinished work cannot be saved in .* \(No space left on device\)"):
            checkpoints.save(job, Snapshot({"step": torch.zeros(1_000_000)}, 2.0))
        assert checkpoints.load(job).seconds == 1.0
    finally:
        subprocess.run(["umount", small], check=True)


UNHEARD = """
from multiprocessing import Pipe
from upgd.experiments.execution import jobs, workers

def attend(job, settings, tell):
    ours.close()
    raise OSError("unfinished work cannot be saved")

ours, theirs = Pipe()
ours.send((jobs.Job("output-permuted-digits", {}, "8", 1, ()), []))
workers._attend = attend
workers._serve(theirs, workers.Settings(), 1, ())
"""


def test_a_worker_that_cannot_save_reports_it_without_its_parent():
    ended = subprocess.run([sys.executable, "-c", UNHEARD], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "upgd: unfinished work cannot be saved\n")


def test_a_job_whose_processes_keep_dying_is_an_error(monkeypatch):
    monkeypatch.setattr("upgd.experiments.execution.workers._ATTEMPTS", 1)
    job = Job("output-permuted-digits", {}, "8", 10_000_000, (Learner(method="sgd", lr=0.1),))

    def kill(*_):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    # An OSError, which the command line shows without a traceback.
    with pytest.raises(ChildProcessError, match="the process that computed sgd × 1 of output-permuted-digits died"):
        list(in_processes(Settings(backend="torch"), 1)([job], kill))


def test_an_error_in_a_worker_is_raised_in_the_parent(tmp_path):
    job = Job("output-permuted-digits", {"wrong": 1}, "8", 5, (Learner(method="sgd", lr=0.1),))
    with pytest.raises(ValueError, match="its options are") as raised:
        list(in_processes(Settings(backend="torch"), 1)([job], lambda *_: None))
    assert "in a worker" in raised.value.__notes__[0]


def test_kinds_share_a_unit_only_on_a_gpu():
    """A GPU computes several groups at the same time; a CPU's cores share the work better in small jobs."""
    experiment = Experiment("bit-flipping", {"sgd": {"lr": 0.1}, "adamw": {"lr": 0.1}, "upgd": {"lr": 0.1}}, seeds=3)
    assert [len(job.learners) for job in plan(whole(experiment), 1, 8)] == [3, 3, 3]
    mixed = plan(whole(experiment), 1, 8, mixed=True)
    assert [len(job.learners) for job in mixed] == [5, 4]
    assert sorted(one.method for job in mixed for one in job.learners) == sorted(["sgd", "adamw", "upgd"] * 3)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 6.0), (2, 4.0), (5, 4.0)])
def test_an_estimate_does_not_divide_jobs(monkeypatch, workers, seconds):
    sgd, upgd = (
        Job("output-permuted-digits", {}, "8", 100, (Learner(method=method, lr=0.1),)) for method in ("sgd", "upgd")
    )
    rates = {"sgd": 100.0, "upgd": 25.0}
    measured = lambda network, stream, learners, *rest: rates[learners[0].method]  # noqa: E731
    monkeypatch.setattr(estimate, "learner_steps_per_second", measured)
    assert estimate.estimate([upgd, sgd, sgd], workers, "cpu", "torch") == seconds


def test_a_job_is_not_measured_for_longer_than_it_takes(monkeypatch):
    measured = []
    monkeypatch.setattr(estimate, "Population", lambda *args: measured.append(Population(*args)) or measured[-1])
    job = Job("output-permuted-digits", {}, "8", 20, (Learner(method="sgd", lr=0.1),))
    estimate.estimate([job], 1, "cpu", "torch", seconds=2.0)
    assert 20 <= measured[0].step <= 4 + 8 + 16


def test_a_measurement_of_speed_is_not_fooled_by_learners_that_would_diverge(monkeypatch):
    measured = []
    monkeypatch.setattr(estimate, "Population", lambda *args: measured.append(Population(*args)) or measured[-1])
    stream, network = make("toy-changing-outputs"), torch.nn.Linear(16, 1)
    estimate.learner_steps_per_second(network, stream, [Learner(method="upgd", lr=1e6)], seconds=0.05)
    assert Population(network, [Learner(method="upgd", lr=1e6)]).run(stream, 50).diverged_at[0] >= 0
    assert measured[0].run(stream, 50).diverged_at[0] < 0
