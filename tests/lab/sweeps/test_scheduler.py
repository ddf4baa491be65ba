"""The order of jobs and what follows from how they end; the files of runs on nodes without the directory of runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flatmin.lab.errors import DataError, InterruptedRun, StorageError
from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.sweeps import run_files
from flatmin.lab.sweeps import scheduler as sweep_schedule
from flatmin.lab.sweeps.jobs import Job, JobStatus, run_job, status_of_error
from flatmin.lab.sweeps.progress import SweepProgress
from flatmin.lab.sweeps.run_files import FileSender, RunStore, write_files
from flatmin.lab.sweeps.scheduler import JobScheduler
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import Interruption
from sweep_process import tiny

DIED = JobStatus(kind="died", message="Its process was killed.")


class OneAfterTheOther:
    """A pool without processes, in which a job ends when it is asked for endings; notes what ran beside what."""

    def __init__(self, size, ending=lambda name: JobStatus(kind="done")):
        self.size, self.ending, self.running, self.beside, self.order = size, ending, [], [], []

    def num_free(self):
        return self.size - len(self.running)

    def start(self, job):
        self.running.append(job.name)
        self.order.append(job.name)

    def poll(self, seconds):
        self.beside.append(set(self.running))
        return [(name := self.running.pop(0), self.ending(name))] if self.running else []


def run_in_order(jobs, tmp_path, size):
    by_name = {job.name: job for job in jobs}
    pool = OneAfterTheOther(size)
    JobScheduler(by_name, pool, SweepProgress(by_name, tmp_path, None, ""), attempts=1).run(Interruption())
    assert sorted(pool.order) == sorted(by_name)
    return pool


def test_long_jobs_are_first(tmp_path):
    short, long, sam = (Job(experiment=e) for e in (tiny(), tiny(epochs=5), tiny(rho=0.1, epochs=3)))
    assert run_in_order([short, long, sam], tmp_path, 1).order == [sam.name, long.name, short.name]


def test_a_job_begins_only_when_its_first_stage_is_done(tmp_path, monkeypatch):
    first, second, other = (Job(experiment=tiny(epochs=epochs)) for epochs in (1, 9, 5))
    needs = {second.name: first.name}
    monkeypatch.setattr(sweep_schedule, "prerequisite", lambda job: needs.get(job.name))
    pool = run_in_order([second, other, first], tmp_path, 3)
    # 1 + 9 epochs are behind the first stage: it goes before what is longer than itself.
    assert pool.order == [first.name, other.name, second.name]
    assert not any({first.name, second.name} <= beside for beside in pool.beside)


def test_only_one_job_at_a_time_trains_a_first_stage_that_is_nobody_elses(tmp_path, monkeypatch):
    jobs = [Job(experiment=tiny(epochs=epochs)) for epochs in (1, 2)]
    monkeypatch.setattr(sweep_schedule, "prerequisite", lambda job: "first-stage-seed0")
    assert all(len(beside) <= 1 for beside in run_in_order(jobs, tmp_path, 2).beside)
    (tmp_path / "first-stage-seed0").mkdir()
    (tmp_path / "first-stage-seed0" / "result.json").touch()
    assert {job.name for job in jobs} in run_in_order(jobs, tmp_path, 2).beside


class WaitsForTheStop(OneAfterTheOther):
    """A pool in which nothing ends before all are asked to stop; the signal comes when the last job has begun."""

    def __init__(self, endings):
        super().__init__(len(endings), endings.get)
        self.interruption, self.asked_to_stop = Interruption(), False

    def start(self, job):
        super().start(job)
        if self.num_free() == 0:
            self.interruption.signal_number = signal.SIGTERM

    def poll(self, seconds):
        return super().poll(seconds) if self.asked_to_stop else []

    def stop(self):
        self.asked_to_stop = True


def stop_while_running(endings, tmp_path):
    """Stop a sweep whose jobs then end so, one for each ending; return what it raised and said, and their names."""
    jobs = {job.name: job for job in (Job(experiment=tiny(), seed=seed) for seed in range(len(endings)))}
    pool, console = WaitsForTheStop(dict(zip(jobs, endings, strict=True))), Console(record=True, width=200)
    schedule = JobScheduler(jobs, pool, SweepProgress(jobs, tmp_path, console, ""), attempts=3)
    with pytest.raises((InterruptedRun, StorageError)) as caught:
        schedule.run(pool.interruption)
    return caught.value, console.export_text(), list(jobs)


def test_a_signal_that_lets_all_save_says_so(tmp_path):
    endings = [JobStatus(kind="stopped"), JobStatus(kind="done"), JobStatus(kind="busy", message="somebody else's")]
    error, _, _ = stop_while_running(endings, tmp_path)
    assert isinstance(error, InterruptedRun)
    assert error.signal_number == signal.SIGTERM
    assert f"2 of 3 runs are left. Everything is saved in {tmp_path}" in str(error)


def test_a_mistake_that_shows_while_stopping_is_raised(tmp_path):
    full, unreadable = StorageError("The disk is full."), DataError("An image is damaged.")
    endings = [
        JobStatus(kind="stopped"),
        JobStatus(kind="mistake", message=str(full), error=full),
        JobStatus(kind="mistake", message=str(unreadable), error=unreadable),
        DIED,
    ]
    error, said, names = stop_while_running(endings, tmp_path)
    assert error is full
    assert f"{names[2]}: An image is damaged." in said
    assert f"{names[3]}: Its process was killed." in said


@pytest.mark.parametrize("ending", [DIED, JobStatus(kind="failed", message="OSError: nothing was written")])
def test_a_job_that_could_not_save_when_it_was_stopped_is_named(ending, tmp_path):
    error, _, names = stop_while_running([JobStatus(kind="stopped"), ending], tmp_path)
    assert isinstance(error, InterruptedRun)
    assert "2 of 2 runs are left" in str(error)
    assert "Everything is saved" not in str(error)
    assert f"{names[1]}: {ending.message}" in str(error)
    assert names[0] not in str(error)
    assert "run the same command again" in str(error)


def starts_until_the_end(job, ground_gained, runs):
    """Let a job die once for each file that it appends to, then end well; say how often it began, and the failures."""
    left = list(ground_gained)

    def ending(name):
        if not left:
            return JobStatus(kind="done")
        path = left.pop(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("[0, 0]\n")
        return DIED

    pool, progress = OneAfterTheOther(1, ending), SweepProgress({job.name: job}, runs, None, "")
    return JobScheduler({job.name: job}, pool, progress, attempts=3).run(Interruption()), len(pool.order)


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}-{step:016x}.pt"


def test_a_job_that_dies_is_restarted_as_long_as_it_saves_something_new(tmp_path):
    """Steps, of a first stage as well, measurements, and points of a landscape."""
    job = Job(experiment=tiny(bootstrap=True, label_noise=0.2))
    run, first = tmp_path / job.name, tmp_path / job.experiment.first_stage().run_name(0)
    gained = [*(checkpoint(first, step) for step in range(1, 5)), *(checkpoint(run, step) for step in range(1, 5))]
    gained += [run / "measures" / f"sharpness-{i}.json" for i in range(4)] + [run / "measures/landscape-0.cache"] * 4
    assert starts_until_the_end(job, gained, tmp_path) == ({}, 17)


@pytest.mark.parametrize(
    ("before", "steps", "num_starts"),
    [
        (0, [0] * 10, 3),  # the first checkpoint is of step 0: it gains nothing
        (7, [7] * 10, 3),  # an earlier sweep saved it
        (0, [0, 0, 5, 5, 5, 5, 5], 6),  # what was gained gives it all its attempts again
    ],
)
def test_a_job_that_dies_without_saving_anything_new_is_given_up(before, steps, num_starts, tmp_path):
    job = Job(experiment=tiny())
    run = tmp_path / job.name
    if before:
        checkpoint(run, before).parent.mkdir(parents=True)
        checkpoint(run, before).touch()
    failures = {job.name: "Its process was killed. (attempt 3 of 3)"}
    assert starts_until_the_end(job, [checkpoint(run, step) for step in steps], tmp_path) == (failures, num_starts)


EPOCHS = 60


def run_away_from(runs, job, folder):
    """Run a job in another directory, as a node that has no part in the directory of runs."""
    store = RunStore(runs)
    write_files(folder, store.begin(job))
    with FileSender(folder, store.write) as sender:
        status = run_job(job, folder, None, 0.0)
    store.end(job.name)
    return status if sender.error is None else status_of_error(sender.error)


def test_new_changed_and_removed_files_are_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "SEND_SECONDS", 600.0)  # only at the end
    sent = []
    write_files(tmp_path, {"run/old": b"1", "run/same": b"1", "run/changed": b"1"})
    with FileSender(tmp_path, lambda files, removed: sent.append((files, removed))) as sender:
        (tmp_path / "run/old").unlink()
        (tmp_path / "run/changed").write_bytes(b"22")
        (tmp_path / "run/checkpoints").mkdir()
        for name in ("checkpoints/step", "result.json", "new", "half.part", "lock", "z"):
            (tmp_path / "run" / name).write_bytes(b"3")
    assert sender.error is None
    ((files, removed),) = sent
    # A run can be resumed as soon as a checkpoint has arrived, and is finished when everything else has.
    expected = [
        ("run/changed", b"22"),
        *((f"run/{name}", b"3") for name in ("new", "z", "checkpoints/step", "result.json")),
    ]
    assert list(files.items()) == expected
    assert removed == ["run/old"]


def test_files_are_sent_while_a_job_runs(tmp_path):
    events = []
    sender = FileSender(tmp_path, lambda files, removed: events.append(list(files)))
    sender._ended.wait = lambda seconds: events.append(seconds) or len(events) > 1  # the job ends at the second look
    (tmp_path / "file").write_bytes(b"1")
    sender._run()
    assert events == [run_files.SEND_SECONDS, ["file"], run_files.SEND_SECONDS]


def test_what_could_not_be_sent_is_sent_the_next_time(tmp_path):
    """A disk that is full for a moment costs nothing."""
    sent, looks = [], []

    def send(files, removed):
        if len(looks) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sent.append(files)

    sender = FileSender(tmp_path, send)
    sender._ended.wait = lambda seconds: looks.append(seconds) or len(looks) > 3
    (tmp_path / "file").write_bytes(b"1")
    sender._run()
    assert (sent, sender.error) == ([{"file": b"1"}], None)


def test_a_run_moves_to_another_node_when_its_node_dies(tmp_path):
    job = Job(experiment=tiny(rho=0.1, epochs=EPOCHS))
    runs = tmp_path / "runs"
    command = [sys.executable, __file__, str(runs), str(tmp_path / "first node"), job.experiment.to_json()]
    threads = str(torch.get_num_threads())  # with another number the result is not bitwise the same
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
    process = subprocess.Popen(command, env=environment)
    while not list(runs.glob("*/checkpoints/step-*.pt")):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (runs / job.name / "result.json").exists()
    status = run_away_from(runs, job, tmp_path / "second node")
    assert status.kind == "done", status
    whole = train(job.experiment, runs=tmp_path / "whole")
    found = runs / job.name
    assert (found / "metrics.jsonl").read_bytes() == (whole.directory / "metrics.jsonl").read_bytes()
    assert len(json.loads((found / "environment.json").read_text())["sessions"]) == 2
    kept = {path.name for path in (found / "checkpoints").iterdir()}
    assert kept == {path.name for path in (tmp_path / "second node" / job.name / "checkpoints").iterdir()}


def test_a_run_brings_the_runs_it_builds_on(tmp_path):
    runs = tmp_path / "runs"
    bootstrapped = Job(experiment=tiny(label_noise=0.4, bootstrap=True))
    first = Job(experiment=bootstrapped.experiment.first_stage())
    assert run_away_from(runs, first, tmp_path / "a").kind == "done"
    assert run_away_from(runs, bootstrapped, tmp_path / "b").kind == "done"
    assert len(json.loads((runs / first.name / "environment.json").read_text())["sessions"]) == 1  # not trained again
    start = Experiment(
        data=first.experiment.data, model=Model(name="cnn-2", checkpoint=f"run:{first.name}"), precision="float32"
    )
    assert run_away_from(runs, Job(experiment=start), tmp_path / "c").kind == "done"
    assert len(list(runs.glob("*/result.json"))) == 3


def test_a_run_that_another_process_works_on_waits(tmp_path):
    job, store = Job(experiment=tiny()), RunStore(tmp_path)
    directory = RunDirectory(job.experiment, job.seed, tmp_path)
    directory.open()
    assert store.begin(job).kind == "busy"
    directory.close()
    assert isinstance(store.begin(job), dict)
    assert RunStore(tmp_path).begin(job).kind == "busy"
    store.end(job.name)
    other = RunStore(tmp_path)
    assert isinstance(other.begin(job), dict)
    other.end(job.name)


def test_a_store_that_cannot_be_written_is_a_user_error(tmp_path):
    job, store = Job(experiment=tiny()), RunStore(tmp_path / "runs")
    files = store.begin(job)
    (tmp_path / "runs" / job.name / "metrics.jsonl").mkdir()  # in the file's place
    write_files(tmp_path / "node", files)
    with FileSender(tmp_path / "node", store.write) as sender:
        run_job(job, tmp_path / "node", None, 600.0)
    store.end(job.name)
    status = status_of_error(sender.error)
    assert status.kind == "mistake"
    assert "metrics.jsonl cannot be written" in status.message


if __name__ == "__main__":
    run_files.SEND_SECONDS = 0.01
    run_away_from(Path(sys.argv[1]), Job(experiment=Experiment.from_json(sys.argv[3])), Path(sys.argv[2]))
