"""Runs many jobs on this machine or on a Ray cluster: finished runs are not repeated, the others resume.

A sweep keeps its state in the directory of runs only. It may be killed at any time; the same call resumes it.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from flatmin.lab.errors import SpecError
from flatmin.lab.sweeps.jobs import Job, Outcome, read_outcome
from flatmin.lab.sweeps.local_pool import LocalPool, machine_shares
from flatmin.lab.sweeps.measurements import measurement_settings
from flatmin.lab.sweeps.progress import SweepProgress
from flatmin.lab.sweeps.run_job import Pool, run_job
from flatmin.lab.sweeps.scheduler import JobScheduler
from flatmin.lab.training.engine import CHECKPOINT_SECONDS
from flatmin.lab.training.session import deferred_signals

__all__ = ["Engine", "Sweeper", "run_job", "sweep"]

Engine = Literal["local", "ray"]
ATTEMPTS = 3


def sweep(jobs: Sequence[Job], *, what: str = "", **settings: Any) -> list[Outcome]:
    """Run all jobs that are not complete and return what came of each; the settings are those of `Sweeper`."""
    with Sweeper(**settings) as sweeper:
        return sweeper.outcomes(jobs, what)


class Sweeper:
    """A `Runner` that runs what is missing, several jobs at a time. Use it in a ``with`` statement.

    Its processes are kept from one call of `outcomes` to the next. If a process dies, its job resumes from the last
    checkpoint, as long as each attempt saves something new.

    Args:
        runs: the directory of all runs.
        data_root: where datasets are searched for first.
        engine: local: processes on this machine; ray: tasks on a Ray cluster.
        address: of an existing Ray cluster; if None, RAY_ADDRESS, or else a new cluster on this machine.
        processes: how many jobs at once; 0 is one per GPU, or as many as there are cores for.
        threads: per job; 0 is one, or with GPUs an equal share of this machine's cores (with Ray always one).
        attempts: how often a job may fail, or its process die, without having saved anything new.
        checkpoint_seconds: how long a job trains at most before it saves.
        deterministic: train and measure with deterministic algorithms only (see `flatmin.lab.train`).
        console: where to show progress; nowhere if None.

    Raises:
        SpecError: a number is too small.
    """

    def __init__(
        self,
        *,
        runs: Path,
        data_root: Path | None = None,
        engine: Engine = "local",
        address: str | None = None,
        processes: int = 0,
        threads: int = 0,
        attempts: int = ATTEMPTS,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        deterministic: bool = False,
        console: Console | None = None,
    ) -> None:
        for name, value, least in (("processes", processes, 0), ("threads", threads, 0), ("attempts", attempts, 1)):
            if value < least:
                raise SpecError(f"{name} must be at least {least}, got {value}.")
        # Absolute, because the processes of a cluster have their own working directories.
        self.runs, self.data_root = runs.absolute(), None if data_root is None else data_root.absolute()
        self.engine, self.address, self.processes, self.threads = engine, address, processes, threads
        self.attempts, self.console = attempts, console
        self.checkpoint_seconds, self.deterministic = checkpoint_seconds, deterministic
        self._pool: Pool | None = None

    def __enter__(self) -> "Sweeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.__exit__(None, None, None)

    def outcomes(self, jobs: Sequence[Job], what: str = "") -> list[Outcome]:
        """Run all jobs that are not complete and return the outcome of each, in the same order.

        Jobs with the same name are one run, with the measurements of all of them. If the loss diverges, or if a job
        fails at each attempt, its outcome says so, and the others go on. The next call tries failed jobs again, but
        not diverged ones.

        Raises:
            SpecError, DataError, ModelError, StorageError: a user error; other jobs have saved and stopped.
            RunError: the processes cannot be started, or the cluster cannot be reached.
            InterruptedRun: SIGTERM or Ctrl-C came; the message says what is saved.
        """
        united = unite(jobs)
        for measurement in {m for job in united.values() for m in job.measurements}:
            measurement_settings(measurement)  # an error shows now, not after the training
        progress = SweepProgress(united, self.runs, self.console, what)
        missing = {}
        for name, job in united.items():
            known = read_outcome(job, self.runs)
            if known.complete:
                progress.complete_before(name, failed=known.failure is not None)
            else:
                missing[name] = job
        failures: dict[str, str] = {}
        if missing:
            schedule = JobScheduler(missing, self._ready_pool(), progress, self.attempts)
            try:
                with deferred_signals() as interruption, progress.shown():
                    failures = schedule.run(interruption)
            except BaseException:
                self.close()  # nothing may go on running unseen
                raise
        outcomes = [_outcome(job, self.runs, failures) for job in jobs]
        self._say_problems(outcomes, failures)
        return outcomes

    def _ready_pool(self) -> Pool:
        if self._pool is None:
            run = partial(
                run_job,
                runs=self.runs,
                data_root=self.data_root,
                checkpoint_seconds=self.checkpoint_seconds,
                deterministic=self.deterministic,
            )
            if self.engine == "ray":
                from flatmin.lab.sweeps.ray_pool import RayPool

                pool: Pool = RayPool(run, self.runs, self.address, processes=self.processes, threads=self.threads)
            else:
                pool = LocalPool(run, machine_shares(self.processes, self.threads))
            self._pool = pool.__enter__()
        return self._pool

    def _say_problems(self, outcomes: Sequence[Outcome], failures: dict[str, str]) -> None:
        problems = {o.job.name: o.failure for o in outcomes if o.failure is not None}
        if self.console is None or not problems:
            return
        self.console.print(f"{len(problems)} of {len({o.job.name for o in outcomes})} runs failed:")
        for name, problem in problems.items():
            again = " (The same command tries again.)" if name in failures else ""
            self.console.print(f"  {name}: {problem}{again}", markup=False, highlight=False, soft_wrap=True)


def unite(jobs: Sequence[Job]) -> dict[str, Job]:
    """Return one job for each name, with the measurements of all that have it."""
    united: dict[str, Job] = {}
    for job in jobs:
        known = united.get(job.name, job)
        measurements = tuple(dict.fromkeys((*known.measurements, *job.measurements)))
        united[job.name] = dataclasses.replace(known, measurements=measurements)
    return united


def _outcome(job: Job, runs: Path, failures: dict[str, str]) -> Outcome:
    outcome = read_outcome(job, runs)
    return outcome if outcome.complete else dataclasses.replace(outcome, failure=failures.get(job.name), final=False)
