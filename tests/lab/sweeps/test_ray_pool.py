"""A sweep on a Ray cluster of two nodes, one of which is killed; and on two hosts that share no file system."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'flatmin[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

import sweep_process  # noqa: E402
from flatmin.lab.errors import RunError  # noqa: E402
from flatmin.lab.foret2021.items import ITEMS  # noqa: E402
from flatmin.lab.runs.checkpoint import checkpoints  # noqa: E402
from flatmin.lab.runs.record import Records  # noqa: E402
from flatmin.lab.studies.study import run_study  # noqa: E402
from flatmin.lab.sweeps import ray_pool, run_files  # noqa: E402
from flatmin.lab.sweeps.jobs import Job  # noqa: E402
from flatmin.lab.training.engine import train  # noqa: E402
from invented_runs import in_process  # noqa: E402
from sweep_process import many_jobs, sweep  # noqa: E402
from two_hosts import output, two_hosts  # noqa: E402

EPOCHS = 50


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a core each; one that dies is found to be dead in seconds."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_worker_niceness", "0")  # workers at a low priority would wait for whatever else runs here
    settings = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"_system_config": settings})
    cluster.other = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


def test_a_directory_that_the_ray_node_here_does_not_see_is_an_error(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(run_files.RunStore, "exists", lambda self, path: False)
    with pytest.raises(RunError, match="The Ray node of this machine does not see"):
        sweep(many_jobs(1, 1), runs=tmp_path, engine="ray", address=cluster.address)
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


def test_nodes_that_do_not_see_the_directory_of_runs_send_their_files(cluster, tmp_path, monkeypatch):
    start = ray_pool.RayPool._start_store

    def start_unseen(pool):
        start(pool)
        pool.token.unlink()

    monkeypatch.setattr(ray_pool.RayPool, "_start_store", start_unseen)
    jobs, runs = many_jobs(3, 2), tmp_path / "runs"
    records = sweep(jobs, runs=runs, engine="ray", address=cluster.address, processes=1)
    assert all(record.state == "finished" for record in records.values())
    for job in jobs:
        whole = train(job.experiment, seed=job.seed, runs=tmp_path / "whole").directory
        assert (runs / job.name / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert {path.name for path in (runs / job.name).iterdir()} == {path.name for path in whole.iterdir()}
        assert len(checkpoints(runs / job.name / "checkpoints")) == len(checkpoints(whole / "checkpoints"))
    assert sorted(path.name for path in runs.iterdir()) == sorted(job.name for job in jobs)


def test_a_worker_whose_device_broke_gets_no_other_job(cluster, tmp_path):
    ray.cloudpickle.register_pickle_by_value(sweep_process)  # the nodes cannot import it
    run = functools.partial(sweep_process.breaks_its_device_on_a_node, folder=tmp_path)
    statuses = []
    with ray_pool.RayPool(run, tmp_path / "runs", cluster.address, processes=1, threads=1) as pool:
        for seed in (1, 0, 2, 3, 4):
            pool.start(Job(experiment=sweep_process.tiny(), seed=seed))
            while not (ended := pool.poll(0.1)):
                pass
            statuses.append(ended[0][1].kind)
    processes = {seed: (tmp_path / str(seed)).read_text() for seed in range(5)}
    assert statuses == ["failed", "died", "failed", "failed", "failed"]
    assert processes[0] not in (processes[2], processes[3], processes[4])
    assert len(set(processes.values())) < 5  # the others are used again


def test_a_node_that_is_killed_costs_only_what_its_job_did_since_its_checkpoint(cluster, tmp_path):
    runs, jobs, finished, is_over = tmp_path / "killed", many_jobs(6, EPOCHS), {}, threading.Event()

    def num_under_way():
        files = [p for p in runs.glob("*/metrics.jsonl") if not (p.parent / "result.json").exists()]
        return sum(0 < file.read_text().count("\n") < 0.8 * EPOCHS for file in files)

    def kill_a_node():
        # Each node has one core: two runs that are under way are on two nodes.
        while len(list(runs.glob("*/result.json"))) < 2 or num_under_way() < 2:
            if is_over.is_set():
                return
            time.sleep(0.01)
        finished.update({p: p.stat().st_mtime_ns for p in runs.glob("*/result.json")})
        # As if the power failed: Ray's processes on this node, and the worker among them. (A worker that only loses its
        # raylet trains to the end of its job.)
        raylet = psutil.Process(cluster.other.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()

    thread = threading.Thread(target=kill_a_node)
    thread.start()
    try:
        records = sweep(jobs, runs=runs, engine="ray", address=cluster.address, checkpoint_seconds=0.05)
    finally:
        is_over.set()
        thread.join()
    assert [record.state for record in records.values()] == ["finished"] * 6
    assert 2 <= len(finished) < 6
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    num_sessions = {name: len(record.sessions) for name, record in records.items()}
    assert all(num_sessions[path.parent.name] == 1 for path in finished)
    assert sorted(num_sessions.values()) == [1, 1, 1, 1, 1, 2]
    for job in jobs:
        whole = train(job.experiment, seed=job.seed, runs=tmp_path / "whole")
        found = (runs / job.name / "metrics.jsonl").read_bytes()
        assert found == (whole.directory / "metrics.jsonl").read_bytes(), job.name


def test_a_signal_saves_all_runs_and_stops(tmp_path):
    """On a cluster that the sweep itself started."""
    command = [sys.executable, sweep_process.__file__, str(tmp_path), "2", "5000", "ray"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=os.environ | {"RAY_ADDRESS": ""})
    files = [tmp_path / job.name / "metrics.jsonl" for job in many_jobs(2, 5000)]
    while not all(file.exists() and file.read_text().count("\n") > 1 for file in files):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "2 of 2 runs are left. Everything is saved" in errors
    for file in files:
        last = json.loads(file.read_text().splitlines()[-1])["step"]
        assert int(checkpoints(file.parent / "checkpoints")[0].name.split("-")[1]) >= last


PORT = 6379
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
NODE = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats", "--block"]
# Several hosts need a token that both know. Workers at a low priority would wait for whatever else runs here.
VARIABLES = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_worker_niceness": "0"}
REPRODUCE = [sys.executable, "-m", "flatmin.cli", "reproduce", "fine-tuning", "--scale", "smoke", "--runs", "runs"]


@pytest.fixture
def hosts():
    # Not in pytest's directory: Ray's sockets are in it, and their paths must not be long.
    with tempfile.TemporaryDirectory(prefix="fm-") as folder, two_hosts(Path(folder)) as found:
        yield found


def start_ray(host, *arguments):
    settings = VARIABLES | {"TMPDIR": str(host.path)}
    process = host.start([*RAY, f"--node-ip-address={host.address}", *arguments, *NODE], **settings)
    while "Ray runtime started" not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()
        time.sleep(0.05)


def test_results_come_back_from_a_host_that_dies(hosts, tmp_path):
    first, second = hosts
    start_ray(first, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={first.path}/ray")
    start_ray(second, f"--address={first.address}:{PORT}")
    runs = first.disk / "runs"
    seen = set()  # names of runs that the second host worked on

    def has_finished_one_and_works_on_another():
        now = {path.name for path in second.disk.glob("flatmin-*/*")}
        seen.update(now)
        return bool(now) and any((runs / name / "result.json").exists() for name in seen - now)

    sweep = first.start([*REPRODUCE, "--engine", "ray", "--address", f"{first.address}:{PORT}"], **VARIABLES)
    while not has_finished_one_and_works_on_another():
        assert sweep.poll() is None, sweep.log.read_text()
        time.sleep(0.002)
    second.kill()
    text = output(sweep)
    assert sweep.returncode == 0, text
    assert (runs / "report-smoke/index.html").exists()
    assert not (second.disk / "runs").exists()

    run_study(ITEMS["fine-tuning"], "smoke", Records(), in_process(tmp_path))
    whole = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/metrics.jsonl")}
    assert {path.parent.name: path.read_bytes() for path in runs.glob("*/metrics.jsonl")} == whole
    assert seen <= whole.keys()
    finished = {path.parent.name for path in runs.glob("*/result.json")}
    assert finished == whole.keys()
