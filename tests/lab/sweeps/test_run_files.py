"""The files of runs on nodes that do not see the directory of runs, without Ray."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.spec.experiment import Experiment, Model
from flatmin.lab.sweeps import run_files
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.run_files import FileSender, RunStore, write_files
from flatmin.lab.sweeps.run_job import run_job, status_of_error
from flatmin.lab.training.engine import train
from sweep_process import tiny

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
