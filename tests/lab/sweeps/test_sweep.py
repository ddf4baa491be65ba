"""Sweeps with real processes, really killed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import psutil
import pytest
from rich.console import Console

import sweep_process
from flatmin.lab.errors import DataError, ModelError, RunError, SpecError, StorageError
from flatmin.lab.runs.checkpoint import checkpoints
from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.runs.record import read_record
from flatmin.lab.spec.experiment import Model
from flatmin.lab.sweeps import jobs as jobs_module
from flatmin.lab.sweeps import local_pool as sweep_local
from flatmin.lab.sweeps import scheduler as sweep_schedule
from flatmin.lab.sweeps import sweep as sweep_module
from flatmin.lab.sweeps.jobs import Job, JobStatus, describe_death
from flatmin.lab.sweeps.local_pool import LocalPool, machine_shares
from flatmin.lab.sweeps.measurements import Bound, Sharpness
from flatmin.lab.sweeps.progress import SweepProgress
from flatmin.lab.sweeps.scheduler import JobScheduler
from flatmin.lab.sweeps.sweep import Sweeper, run_job
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import Interruption
from sweep_process import many_jobs, sweep, tiny

LONG = 5_000  # epochs: it ends by itself, long after it was to be stopped
SHARPNESS, BOUND = Sharpness(num_examples=20), Bound(num_examples=20, rho=0.1)
ONE = (1, [None])


def start(runs, num_jobs, epochs):
    command = [sys.executable, sweep_process.__file__, str(runs), str(num_jobs), str(epochs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def wait_for(condition, has_ended):
    """Wait until a condition holds; fail if what would bring it about ended before."""
    while not (found := condition()):
        assert not has_ended() or condition(), "it ended first"
        time.sleep(0.01)
    return found


def ended_job(pool):
    """Wait until a job of a pool has ended, by itself or with its process."""
    while not (ended := pool.poll(0.1)):
        pass
    return ended


def num_epochs(runs, job):
    file = runs / job.name / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def sessions(runs, job):
    return json.loads((runs / job.name / "environment.json").read_text())["sessions"]


def metrics_of(runs, job):
    return (runs / job.name / "metrics.jsonl").read_bytes()


def undisturbed(job, runs):
    train(job.experiment, seed=job.seed, runs=runs)
    return metrics_of(runs, job)


@contextmanager
def meanwhile(act):
    """Run a function beside the block, which can ask whether the block is over."""
    over = threading.Event()
    thread = threading.Thread(target=act, args=(over.is_set,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def in_process(monkeypatch):
    """No processes, for what does not depend on them."""
    monkeypatch.setattr(sweep_module, "LocalPool", sweep_process.InProcessPool)


def test_runs_that_were_killed_go_on_without_repeating_one(tmp_path):
    runs, jobs = tmp_path / "killed", many_jobs(16, 4)
    process = start(runs, 16, 4)
    wait_for(lambda: len(list(runs.glob("*/result.json"))) >= 5, lambda: process.poll() is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = {p: p.stat().st_mtime_ns for p in runs.glob("*/result.json")}
    assert 5 <= len(finished) < 16

    console = Console(record=True, width=200)
    sweep(jobs, runs=runs, processes=2, console=console)
    output = console.export_text()
    assert output.count("test error") == 16 - len(finished)
    assert f"[{len(finished) + 1}/16]" in output
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert all(len(json.loads((p.parent / "environment.json").read_text())["sessions"]) == 1 for p in finished)
    assert all(read_record(job.name, runs).state == "finished" for job in jobs)
    for job in jobs:
        assert metrics_of(runs, job) == undisturbed(job, tmp_path / "whole"), job.name


def test_processes_whose_sweep_was_killed_end_by_themselves(tmp_path):
    process = start(tmp_path, 2, LONG)
    jobs = many_jobs(2, LONG)
    wait_for(lambda: all(num_epochs(tmp_path, job) > 1 for job in jobs), lambda: process.poll() is not None)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()  # alone: nobody else is told
    process.communicate()
    psutil.wait_procs(workers)
    for job in jobs:
        assert not (tmp_path / job.name / "result.json").exists()  # they ended before their jobs did
        directory = RunDirectory(job.experiment, job.seed, tmp_path)
        directory.open()  # nobody holds it
        directory.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_all_runs_and_stops(number, tmp_path):
    process = start(tmp_path, 3, LONG)
    jobs = many_jobs(3, LONG)
    wait_for(lambda: sum(num_epochs(tmp_path, j) > 1 for j in jobs) > 1, lambda: process.poll() is not None)
    running = [job for job in jobs if num_epochs(tmp_path, job) > 1]
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C: the terminal tells every process
    else:
        process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 128 + number, errors
    assert "3 of 3 runs are left. Everything is saved" in errors
    assert "Traceback" not in output + errors
    for job in running:
        last = json.loads(metrics_of(tmp_path, job).splitlines()[-1])["step"]
        saved = int(checkpoints(tmp_path / job.name / "checkpoints")[0].name.split("-")[1])
        assert saved >= last  # the very last step, and not some step 0.05 s before


def workers():
    """The processes of sweeps that this one has started; other tests may have left theirs."""
    return {process for process in multiprocessing.active_children() if process.name == "flatmin-sweep"}


def test_a_process_that_dies_costs_no_more_than_the_time_since_its_checkpoint(tmp_path):
    job = Job(experiment=tiny(rho=0.1, epochs=60))
    before = workers()

    def kill_worker(is_over):
        wait_for(lambda: num_epochs(tmp_path / "runs", job) >= 5, is_over)
        (workers() - before).pop().kill()

    with meanwhile(kill_worker):
        records = sweep([job], runs=tmp_path / "runs", processes=1, checkpoint_seconds=0.02)
    assert records[job.name].state == "finished"
    assert len(sessions(tmp_path / "runs", job)) == 2
    assert metrics_of(tmp_path / "runs", job) == undisturbed(job, tmp_path / "whole")
    speed = (tmp_path / "runs" / job.name / "speed.jsonl").read_text().splitlines()
    assert len(speed) < 60 + 5  # epochs that were done twice


@pytest.mark.usefixtures("in_process")
def test_a_job_that_fails_is_tried_again_and_then_is_a_problem_that_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "run_job", sweep_process.fails_at_first)
    jobs = [Job(experiment=tiny()), Job(experiment=tiny(), seed=1)]
    console = Console(record=True, width=200)
    with Sweeper(runs=tmp_path, processes=1, attempts=2, console=console) as sweeper:
        records = sweeper.run(jobs).values()
        assert [r.reason for r in records] == ["ValueError: not yet (attempt 2 of 2)"] * 2
        assert not any(r.is_complete for r in records)
        text = console.export_text()
        assert "2 of 2 runs failed" in text
        assert "The same command tries again" in text
        assert all(r.state == "finished" for r in sweeper.run(jobs).values())
    assert (tmp_path / f"{jobs[0].name}.attempts").read_text() == "xxx"


@pytest.mark.usefixtures("in_process")
def test_a_run_that_diverges_stops_no_other_and_is_repeated_only_without_its_problem_file(tmp_path, capfd):
    jobs = [Job(experiment=tiny(lr=1e18, epochs=2)), Job(experiment=tiny())]
    with Sweeper(runs=tmp_path, processes=1) as sweeper:
        bad, good = sweeper.run(jobs).values()
        assert (bad.state, bad.is_complete, good.state) == ("failed", True, "finished")
        assert "The loss diverged" in bad.reason
        assert sweeper.run(jobs)[bad.name].reason == bad.reason
        assert len(sessions(tmp_path, jobs[0])) == 1
        (tmp_path / bad.name / "problem.json").unlink()
        assert sweeper.run(jobs)[bad.name].reason == bad.reason
    assert len(sessions(tmp_path, jobs[0])) == 2
    assert capfd.readouterr() == ("", "")  # without a console nothing is said


@pytest.mark.usefixtures("in_process")
def test_jobs_of_one_name_are_trained_once_and_all_is_measured_that_any_asks_for(tmp_path):
    jobs = [
        Job(experiment=tiny(), measurements=(SHARPNESS,)),
        Job(experiment=replace(tiny(), name="the same"), measurements=(BOUND, SHARPNESS)),
        Job(experiment=tiny()),
    ]
    with Sweeper(runs=tmp_path, processes=2) as sweeper:
        (alone,) = sweeper.run(jobs[2:]).values()
        (record,) = sweeper.run(jobs).values()
        files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/measures/*.json")}
        assert sweeper.run(jobs) == {record.name: record}
    assert alone.measured == {}
    assert record == replace(alone, measured=record.measured)  # not trained again
    assert record.measured.keys() == {SHARPNESS.name, BOUND.name}
    assert record.measured[SHARPNESS.name]["num_examples"] == 20
    assert record.measured[BOUND.name]["rho"] == 0.1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/measures/*.json")} == files


def test_a_users_mistake_stops_the_sweep_when_the_others_have_saved(tmp_path):
    long, wrong = Job(experiment=tiny(epochs=LONG)), Job(experiment=tiny(name="folder:nowhere"))
    before = workers()
    with pytest.raises(DataError, match="nowhere"):
        sweep([long, wrong], runs=tmp_path, processes=2)
    assert workers() <= before
    if num_epochs(tmp_path, long):  # it may not have come that far
        last = json.loads(metrics_of(tmp_path, long).splitlines()[-1])["step"]
        assert int(checkpoints(tmp_path / long.name / "checkpoints")[0].name.split("-")[1]) >= last


def test_what_is_the_users_to_mend_is_told_from_what_may_pass(tmp_path, monkeypatch):
    wrong = replace(tiny(), model=Model(name="cnn-2", checkpoint="nothing.pt"))
    ending = run_job(Job(experiment=wrong), tmp_path, None, 60.0)
    assert ending.kind == "mistake"
    assert isinstance(ending.error, ModelError)
    (tmp_path / "file").touch()
    assert isinstance(run_job(Job(experiment=tiny()), tmp_path / "file", None, 60.0).error, StorageError)
    monkeypatch.setattr(jobs_module, "train", lambda *_, **__: 1 / 0)
    ending = run_job(Job(experiment=tiny()), tmp_path, None, 60.0)
    assert ending.kind == "failed"
    assert ending.message.startswith("ZeroDivisionError: division by zero (test_sweep.py, line ")


def test_ray_is_asked_for_by_name_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"pip install 'flatmin\[ray\]'"):
        sweep([Job(experiment=tiny())], runs=tmp_path, engine="ray")


def test_a_negative_number_is_refused(tmp_path):
    for name in ("processes", "threads", "attempts"):
        with pytest.raises(SpecError, match=f"{name} must be at least"):
            sweep([], runs=tmp_path, **{name: -1})


def test_each_process_has_the_threads_that_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_local, "CONTEXT", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(sweep_module, "run_job", sweep_process.tells_threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sweep([Job(experiment=tiny())], runs=tmp_path, processes=1, threads=3)
    assert json.loads((tmp_path / "threads.json").read_text()) == {"torch": 3, "environment": "3"}
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert sessions(tmp_path, Job(experiment=tiny()))[0]["num_threads"] == 3


def test_a_machine_is_divided_by_its_cores_or_by_its_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_shares(0, 0) == (1, (None,) * 8)
    assert machine_shares(0, 3) == (3, (None,) * 2)
    assert machine_shares(5, 3) == (3, (None,) * 5)
    assert machine_shares(0, 16) == (16, (None,))
    monkeypatch.setattr(sweep_local.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sweep_local.torch.cuda, "is_available", lambda: True)
    assert machine_shares(0, 0) == (4, ("0", "1"))
    assert machine_shares(3, 1) == (1, ("0", "1", "0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert machine_shares(0, 0)[1] == ("5", "7")


@pytest.mark.usefixtures("in_process")
def test_a_run_that_another_process_works_on_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_schedule, "BUSY_SECONDS", 0.1)
    job, console = Job(experiment=tiny()), Console(record=True, width=200)
    directory = RunDirectory(job.experiment, 0, tmp_path)
    directory.open()

    def let_go(is_over):
        wait_for(lambda: "another process works on it" in console.export_text(clear=False), is_over)
        time.sleep(0.5)
        directory.close()

    with meanwhile(let_go):
        records = sweep([job], runs=tmp_path, processes=1, attempts=1, console=console)
    assert records[job.name].state == "finished"
    assert console.export_text().count("another process works on it") == 1


def test_a_process_that_is_killed_while_it_was_to_save_has_not_stopped_but_died(tmp_path):
    job = Job(experiment=tiny())
    with LocalPool(partial(sweep_process.does_not_stop, folder=tmp_path), *ONE) as pool:
        pool.start(job)
        wait_for((tmp_path / "began").exists, lambda: not pool.workers[0].process.is_alive())
        pool.stop()
        pool.workers[0].process.kill()
        ((name, ending),) = ended_job(pool)
    assert name == job.name
    assert ending == JobStatus(kind="died", message=describe_death(-signal.SIGKILL))


@pytest.mark.parametrize("begins", [False, True])
def test_a_stop_has_nothing_to_save_before_a_job_and_is_not_an_error_that_a_library_handles(begins, tmp_path):
    with LocalPool(partial(sweep_process.handles_errors, folder=tmp_path), *ONE) as pool:
        pool.start(Job(experiment=tiny()))
        if begins:
            wait_for((tmp_path / "began").exists, lambda: not pool.workers[0].process.is_alive())
        pool.stop()
        ((_, ending),) = ended_job(pool)
    assert ending.kind == "stopped"


def test_a_process_whose_device_broke_gets_no_other_job(tmp_path):
    jobs = [Job(experiment=tiny(), seed=seed) for seed in range(3)]
    with LocalPool(sweep_process.breaks_its_device, *ONE) as pool:
        numbers = []
        for job in jobs:
            pool.start(job)
            ((_, status),) = ended_job(pool)
            numbers.append(status.message)
    assert numbers[0] != numbers[1]  # seed 0 broke it
    assert numbers[1] == numbers[2]


def test_errors_of_a_broken_device_are_known():
    for message, is_broken in (
        ("CUDA error: device-side assert triggered", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),  # the next job may need less
        ("shapes cannot be multiplied", False),
    ):
        status = jobs_module.status_of_error(RuntimeError(message))
        assert (status.kind, status.is_device_broken) == ("failed", is_broken)


class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))


def test_processes_that_cannot_begin_are_not_started_for_ever(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sweep_local, "MAX_FAILED_STARTS", 1)
    job = Job(experiment=tiny())
    progress = SweepProgress({job.name: job}, tmp_path, None, "")
    with LocalPool(Unreadable(), *ONE) as pool, pytest.raises(RunError, match="if __name__ == "):
        JobScheduler({job.name: job}, pool, progress, attempts=5).run(Interruption())


def test_the_table_shows_replicas_epochs_failures_and_the_time_left(tmp_path, monkeypatch):
    sgd, sam = replace(tiny(epochs=4), name="plain SGD"), tiny(rho=0.1, epochs=4)
    jobs = {job.name: job for job in [*(Job(experiment=sgd, seed=s) for s in range(3)), Job(experiment=sam)]}
    names = list(jobs)
    console = Console(record=True, width=100, height=40, force_terminal=True)
    progress = SweepProgress(jobs, tmp_path, console, "choosing rho")
    assert progress.seconds_left() is None
    progress.complete_before(names[0], failed=False)
    progress.started(names[1])
    progress.started(names[2])
    progress.ended(names[2], "it broke")
    (tmp_path / names[1]).mkdir()
    (tmp_path / names[1] / "metrics.jsonl").write_text("{}\n{}\n")
    # In 10 seconds 2 passes were done, and there are 2 + 8 left.
    monkeypatch.setattr(time, "monotonic", lambda: progress.started_at + 10.0)
    assert progress.seconds_left() == pytest.approx(50.0)
    console.print(progress.table())
    text = console.export_text()
    row = next(line for line in text.splitlines() if "plain SGD" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["plain SGD", "1/3", "epoch 2/4", "1"]
    assert names[3].removesuffix("-seed0") in text
    assert "choosing rho" in text
    assert "about 50.0 s" in text
    assert "it broke" in text


def test_a_model_that_is_measured_as_it_is_has_no_epochs_to_wait_for(tmp_path):
    pretrained = replace(tiny(), model=Model(name="cnn-2", checkpoint="weights.pth"), epochs=0)
    job = Job(experiment=pretrained)
    assert SweepProgress({job.name: job}, tmp_path, None, "").seconds_left() is None


def test_a_table_with_more_lines_than_the_terminal_shows_what_is_running(tmp_path):
    jobs = {job.name: job for job in (Job(experiment=tiny(lr=0.01 * (i + 1))) for i in range(30))}
    console = Console(record=True, width=100, height=12, force_terminal=True)
    progress = SweepProgress(jobs, tmp_path, console, "")
    last = list(jobs)[-1]
    progress.started(last)
    console.print(progress.table())
    text = console.export_text()
    assert last.removesuffix("-seed0") in text
    assert "all 30 experiments" in text
    assert text.count("digits-") == 4


def test_nothing_to_do_starts_no_process(tmp_path, monkeypatch):
    job = Job(experiment=tiny())
    train(job.experiment, runs=tmp_path)
    monkeypatch.setattr(LocalPool, "start", lambda *_: pytest.fail("a process was started"))
    assert sweep([job, job], runs=tmp_path) == {job.name: read_record(job.name, tmp_path)}
