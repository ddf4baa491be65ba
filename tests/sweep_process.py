"""A sweep in a process of its own, to be killed: python sweep_process.py RUNS NUM_JOBS EPOCHS [ENGINE].

And jobs for sweeps, with what their processes may run instead; those have to be able to import it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from flatmin.lab.errors import DataError, InterruptedRun
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.sweeps.jobs import Job, JobStatus
from flatmin.lab.sweeps.sweep import Sweeper, run_job


def sweep(jobs, **settings):
    """Run all jobs that are not complete and return each run's record by name; the settings are `Sweeper`'s."""
    with Sweeper(**settings) as sweeper:
        return sweeper.run(jobs)


class AtStep:
    """A callback of training that calls a function after one of its steps."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_start(self, directory, num_steps, step):
        pass

    def on_step(self, step, num_examples, measured):
        if step == self.step:
            self.act()

    def on_epoch(self, metrics, speed):
        pass


def tiny(lr=0.1, rho=0.0, epochs=1, **data):
    return Experiment(
        data=Data(**{"train_size": 40, "batch_size": 20} | data),
        model=Model(name="cnn-2"),
        optim=Optim(lr=lr, rho=rho),
        epochs=epochs,
        precision="float32",
    )


def many_jobs(count, epochs):
    """Replicas of four experiments."""
    experiments = [tiny(lr=lr, rho=rho, epochs=epochs) for lr in (0.05, 0.1) for rho in (0.0, 0.1)]
    return [Job(experiment=experiments[i % 4], seed=i // 4) for i in range(count)]


def fails_at_first(job, runs, **settings):
    """Fail twice, then run."""
    attempts = runs / f"{job.name}.attempts"
    attempts.parent.mkdir(exist_ok=True)
    with attempts.open("a") as file:
        file.write("x")
    if len(attempts.read_text()) < 3:
        return JobStatus(kind="failed", message="ValueError: not yet")
    return run_job(job, runs, **settings)


def tells_threads(job, runs, **settings):
    """Run, and write down how many threads there are, and what the environment said."""
    import torch

    facts = {"torch": torch.get_num_threads(), "environment": os.environ["OMP_NUM_THREADS"]}
    runs.mkdir(exist_ok=True)
    (runs / "threads.json").write_text(json.dumps(facts))
    return run_job(job, runs, **settings)


class InProcessPool:
    """In place of `LocalPool`: one job at a time, in this process."""

    def __init__(self, run, threads, gpus):
        self.run, self.jobs = run, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def num_free(self):
        return 1 - len(self.jobs)

    def start(self, job):
        self.jobs.append(job)

    def poll(self, seconds):
        time.sleep(0.0 if self.jobs else seconds)
        return [(job.name, self.run(job)) for job in (self.jobs.pop() for _ in self.jobs[:])]

    def stop(self):
        pass


def does_not_stop(job, folder):
    """Say that it has begun, and heed no SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "began").touch()
    time.sleep(600)
    return JobStatus(kind="done")


def breaks_its_device(job):
    """Tell in which process it ran; the first job breaks the device."""
    return JobStatus(kind="failed", message=str(os.getpid()), is_device_broken=job.seed == 0)


def breaks_its_device_on_a_node(job, folder):
    """Write down in which process it ran; the first job breaks the device."""
    (folder / str(job.seed)).write_text(str(os.getpid()))
    return JobStatus(kind="failed", message="CUDA error: unknown", is_device_broken=job.seed == 0)


def handles_errors(job, folder):
    """Take whatever is raised while it reads for a damaged dataset."""
    try:
        (folder / "began").touch()
        time.sleep(600)
    except RuntimeError as error:
        return JobStatus(kind="mistake", error=DataError(f"It is damaged: {error}"))
    return JobStatus(kind="done")


if __name__ == "__main__":
    try:
        found = sweep(
            many_jobs(int(sys.argv[2]), int(sys.argv[3])),
            runs=Path(sys.argv[1]),
            processes=2,
            checkpoint_seconds=0.05,
            console=Console(),
            engine=sys.argv[4] if len(sys.argv) > 4 else "local",
        )
        sys.exit(0 if all(record.is_complete for record in found.values()) else 1)
    except InterruptedRun as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.signal_number)
