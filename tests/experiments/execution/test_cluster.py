"""Sweeps on a Ray cluster: a head and two worker nodes on this machine, one of which is killed."""

import builtins
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import upgd.experiments as ex
from upgd.experiments import Experiment
from upgd.experiments.execution.cluster import _asks_for_a_token, compute_slice, on_ray
from upgd.experiments.execution.jobs import Checkpoints, plan, whole
from upgd.experiments.execution.running import execute
from upgd.experiments.execution.workers import Settings
from upgd.store import Store

SMALL = Experiment(
    "output-permuted-digits",
    {"sgd": {"lr": [0.1, 1e9]}, "upgd": {"lr": 0.03, "sigma": 0.01}},
    seeds=2,
    steps=200,
    network="8:identity",
    options={"task_length": 25},
)


def numbers(results: ex.Results) -> list:
    return [(r.key.digest, r.loss.tobytes(), r.accuracy.tobytes(), r.diverged_at) for r in results.records]


@pytest.mark.parametrize("look_every", [None, 50])
def test_slices_give_the_whole_result(look_every):
    expected = ex.run(SMALL, backend="torch", look_every=look_every)
    everything = []
    for job in plan(whole(SMALL), 1, 32):
        begun, slices, last = None, 0, -1
        while True:
            records, begun, done, _ = compute_slice(job, "cpu", "torch", begun, 0.0, look_every)
            slices += 1
            assert done > last
            last = done
            if records is not None:
                break
        assert done == job.learner_steps
        assert slices > 1
        everything += records
    by_key = {record.key.digest: record for record in everything}
    assert numbers(ex.Results([by_key[r.key.digest] for r in expected.records])) == numbers(expected)
    for record in expected.records:
        assert by_key[record.key.digest].diagnostics == record.diagnostics


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster responds at 127.0.0.1:1 .*; start one with .* `RAY_AUTH_MODE=token ray"),
        ("somewhere", "the address of a Ray cluster is HOST:PORT, .* not 'somewhere'"),
    ],
)
def test_without_a_cluster_there_is_one_sentence(address, words):
    with pytest.raises(ValueError, match=words):
        on_ray(address, Settings())


def test_without_ray_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'upgd\[ray\]'"):
        on_ray("auto", Settings())


@pytest.fixture
def no_tokens(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("version", "variables", "file", "asks"),
    [
        ("2.51.2", {"RAY_AUTH_MODE": "token"}, True, False),
        ("2.52.0", {}, True, False),
        ("2.52.0", {"RAY_AUTH_MODE": "token"}, False, True),
        ("2.60.0", {}, False, False),
        ("2.60.0", {}, True, True),
        ("2.60.0", {"RAY_AUTH_TOKEN": "0123"}, False, True),
        ("2.60.0", {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "0123"}, True, False),
        ("3.0.0.dev0", {"RAY_AUTH_MODE": "Token"}, False, True),
    ],
)
def test_which_clusters_ask_for_a_token(no_tokens, monkeypatch, version, variables, file, asks):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if file:
        (no_tokens / ".ray").mkdir()
        (no_tokens / ".ray" / "auth_token").write_text("0123")
    assert _asks_for_a_token(version) is asks


class OpenRay:
    """A minimal fake of Ray, enough to start a cluster."""

    __version__ = "2.51.0"

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self):
        self.started = []

    def is_initialized(self):
        return False

    def init(self, address, **_):
        self.started.append(address)

    def cluster_resources(self):
        return {"CPU": 1}

    def remote(self, **_):
        return lambda function: function


def test_an_open_cluster_needs_insecure(no_tokens, monkeypatch, caplog):
    ray = OpenRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ValueError, match=r"ray='local' would start .* RAY_AUTH_MODE=token .* --insecure"):
        on_ray("local", Settings())
    assert ray.started == []
    on_ray("local", Settings(), insecure=True)
    assert ray.started == ["local"]
    assert caplog.messages == []
    on_ray("auto", Settings())
    assert "the Ray cluster at auto requires no token" in caplog.messages[0]


def test_a_local_cluster_requires_a_token_by_default(no_tokens, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is restored afterwards
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    ray = OpenRay()
    ray.__version__ = "2.60.0"
    monkeypatch.setattr(builtins, "__import__", importing("ray", ray))
    on_ray("local", Settings())
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert ray.started == ["local"]


def importing(name, module):
    usual = builtins.__import__
    return lambda wanted, *rest: module if wanted == name else usual(wanted, *rest)


def test_insecure_without_a_cluster_is_refused(upgd):
    code, _, err = upgd("run", "output-permuted-digits", "--method", "sgd", "--lr", "0.1", "--seeds", "1", "--insecure")
    assert (code, err.count("\n")) == (2, 1)
    assert "--insecure applies to a Ray cluster only; remove it, or name the cluster with --ray" in err


class Cluster:
    """A head without processors of its own and worker nodes, each a group of processes that this test started."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.folder = folder
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
            "RAY_ADDRESS": self.address,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            "OMP_NUM_THREADS": "1",
        }
        self.nodes: list[subprocess.Popen] = []

    def start(self) -> None:
        self.nodes.append(self._start("--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false"))
        self._wait_for_nodes(1)
        for count in (2, 3):  # two that start at the same time on one machine interfere
            self.nodes.append(self._start(f"--address={self.address}", "--num-cpus=1"))
            self._wait_for_nodes(count)

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"),
            *("--object-store-memory=100000000", "--disable-usage-stats", *arguments),
        ]
        if "--head" in arguments:
            command.append(f"--temp-dir={self.folder}/r")
        log = (self.folder / f"node-{len(self.nodes)}.log").open("w")
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def _wait_for_nodes(self, count: int) -> None:
        code = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            asked = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True)
            if asked.stdout.strip() == str(count):
                return
            time.sleep(1)
        logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
        raise AssertionError(f"the cluster did not come up: {asked.stderr}\n{logs}")

    def kill_node(self, node: subprocess.Popen) -> None:
        """Kill a node without notice: all processes of its session."""
        os.killpg(node.pid, signal.SIGKILL)
        for pid in _session(node.pid):
            os.kill(pid, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        for node in reversed(self.nodes):
            if node.poll() is None:
                self.kill_node(node)


def _session(leader: int) -> list[int]:
    """The processes of a session, from /proc."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            members.append(int(path.parent.name))
    return members


@pytest.fixture
def cluster():
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to find the processes of a node")
    folder = Path(f"/tmp/upgd-ray-{os.getpid()}")  # Ray's sockets need a short path
    folder.mkdir()
    nodes = Cluster(folder)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.stop()
        shutil.rmtree(folder, ignore_errors=True)


SWEEP = (
    *(
        "sweep",
        "output-permuted-digits",
        "--methods",
        "sgd,upgd",
        "--lr",
        "0.1,0.03",
        "--seeds",
        "2",
        "--steps",
        "6_000",
    ),
    *("--network", "8", "--backend", "torch"),
)


def command(cluster: Cluster, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", "from upgd.cli import main; main()", *SWEEP),
            *("--ray", cluster.address, "--checkpoint-every", "1"),
        ],
        cwd=folder,
        env=cluster.environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_checkpoints(folder: Path, process: subprocess.Popen, count: int = 1) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob("upgd.db.checkpoints/*.pt"))) < count and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_and_a_driver_that_is_stopped(cluster, tmp_path):
    # The driver is stopped, and started again.
    driver = command(cluster, tmp_path)
    wait_for_checkpoints(tmp_path, driver)
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130, err
    assert "repeat the command to continue" in err
    # A node is lost while it computes.
    driver = command(cluster, tmp_path)
    wait_for_checkpoints(tmp_path, driver, 2)
    cluster.kill_node(cluster.nodes[1])
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, err
    assert "online accuracy" in out
    with Store.read(tmp_path / "upgd.db") as store:
        found = {r.key.digest: r for r in store.records()}
    expected = ex.run(
        *("output-permuted-digits", ["sgd", "upgd"]),
        **{"grid": {"lr": [0.1, 0.03]}, "seeds": 2, "steps": 6_000, "network": "8", "backend": "torch"},
    )
    assert len(found) == len(expected)
    assert numbers(ex.Results([found[r.key.digest] for r in expected.records])) == numbers(expected)
    assert not (tmp_path / "upgd.db.checkpoints").exists()


def test_checkpoints_of_a_local_sweep_resume_elsewhere(tmp_path):
    """A sweep that was started on a cluster can be finished on this machine: the checkpoints are the same."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    (job, *_) = plan(whole(SMALL), 1, 32)
    _, snapshot, done, _ = compute_slice(job, "cpu", "torch", None, seconds=0.0)
    assert 0 < done < job.learner_steps
    checkpoints.save(job, snapshot)
    seen = []

    def executor(jobs, watcher):
        from upgd.experiments.execution.workers import Settings, in_process

        watched = in_process(Settings(backend="torch", checkpoints=checkpoints))
        yield from watched(jobs, lambda u, steps, diverged: seen.append((u.name, steps)))

    with Store.write(tmp_path / "r.db") as store:
        results = execute(SMALL, store, executor, workers=1, device="cpu", checkpoints=checkpoints)
    assert seen[0] == (job.name, done)
    assert numbers(results) == numbers(ex.run(SMALL, backend="torch"))
