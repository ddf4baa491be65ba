"""Runs many jobs on this machine or on a Ray cluster: finished runs are not repeated, the others resume.

A sweep keeps its state in the directory of runs only. It may be killed at any time; the same call resumes it.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from flatmin.lab.errors import RunError, SpecError
from flatmin.lab.runs.record import RunRecord, read_record
from flatmin.lab.sweeps.jobs import Job, run_job
from flatmin.lab.sweeps.local_pool import LocalPool, machine_shares
from flatmin.lab.sweeps.progress import SweepProgress
from flatmin.lab.sweeps.ray_pool import RayPool
from flatmin.lab.sweeps.scheduler import JobScheduler
from flatmin.lab.training.engine import CHECKPOINT_SECONDS
from flatmin.lab.training.session import deferred_signals

Pool = LocalPool | RayPool


@dataclass(kw_only=True)
class SweepSettings:
    """How many jobs are run: where, and how many at a time. Also flags of ``flatmin reproduce``."""

    runs: Path
    """The directory of all runs."""
    data_root: Path | None = None
    """The first directory in which datasets are searched for (then FLATMIN_DATA, ./data, the user's cache)."""
    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: a cluster."""
    address: str | None = None
    """Of an existing Ray cluster ("auto" finds one); if None, RAY_ADDRESS, or else a new one on this machine."""
    processes: int = 0
    """How many models are trained at once; 0 is as many as there are cores (or GPUs)."""
    threads: int = 0
    """Threads of each; 0 is one, or with GPUs an equal share of the cores (with Ray always one)."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Save after this many seconds of training."""
    deterministic: bool = False
    """On CUDA, use only deterministic algorithms: slower, and bitwise the same when repeated or resumed."""


@dataclass(kw_only=True)
class Sweeper(SweepSettings, AbstractContextManager["Sweeper"]):
    """Runs what is missing, several jobs at a time. Use it in a ``with`` statement.

    Its processes are kept from one call of `run` to the next. If a process dies, its job resumes from the last
    checkpoint, as long as each attempt saves something new. A SpecError names a number that is too small.
    """

    attempts: int = 3
    """How often a job may fail, or its process die, without having saved anything new."""
    console: Console | None = None
    """Where to show progress; nowhere if None."""
    _pool: Pool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Check the numbers, and make paths absolute: the processes of a cluster have their own working directories."""
        for name, least in (("processes", 0), ("threads", 0), ("attempts", 1)):
            if getattr(self, name) < least:
                raise SpecError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        self.runs, self.data_root = self.runs.absolute(), self.data_root and self.data_root.absolute()

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.__exit__()

    def run(self, jobs: Sequence[Job], what: str = "") -> dict[str, RunRecord]:
        """Run all jobs that are not complete and return the records of all, by the names of their runs.

        Jobs with the same name are one run, with the measurements of all of them. If the loss diverges, or if a job
        fails at each attempt, its record says so, and the others go on. The next call tries failed jobs again, but
        not diverged ones.

        Raises:
            SpecError, DataError, ModelError, StorageError: a user error; other jobs have saved and stopped.
            RunError: the processes cannot be started, the cluster cannot be reached, or a finished run is corrupt.
            InterruptedRun: SIGTERM or Ctrl-C came; the message says what is saved.
        """
        united = unite(jobs)
        progress = SweepProgress(united, self.runs, self.console, what)
        records = {name: self._record(name) for name in united}
        missing = {name: job for name, job in united.items() if not job.is_complete(records[name])}
        for name in united.keys() - missing.keys():
            progress.complete_before(name, failed=records[name].state == "failed")
        failures: dict[str, str] = {}
        if missing:
            schedule = JobScheduler(missing, self._ready_pool(), progress, self.attempts)
            try:
                with deferred_signals() as interruption, progress.shown():
                    failures = schedule.run(interruption)
            except BaseException:
                self.__exit__()  # nothing may go on running unseen
                raise
        for name in missing:
            records[name] = self._record(name)
            if name in failures:
                records[name] = replace(records[name], state="failed", reason=failures[name], is_final=False)
        self._say_problems(records)
        return records

    def _record(self, name: str) -> RunRecord:
        record = read_record(name, self.runs)
        if record.state == "not readable":
            raise RunError(record.reason)
        return record

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
                pool: Pool = RayPool(run, self.runs, self.address, processes=self.processes, threads=self.threads)
            else:
                pool = LocalPool(run, *machine_shares(self.processes, self.threads))
            self._pool = pool.__enter__()
        return self._pool

    def _say_problems(self, records: dict[str, RunRecord]) -> None:
        failed = [record for record in records.values() if record.state == "failed"]
        if self.console is None or not failed:
            return
        self.console.print(f"{len(failed)} of {len(records)} runs failed:")
        for record in failed:
            again = "" if record.is_final else " (The same command tries again.)"
            self.console.print(
                f"  {record.name}: {record.reason}{again}", markup=False, highlight=False, soft_wrap=True
            )


def unite(jobs: Iterable[Job]) -> dict[str, Job]:
    """Return one job for each name, with the measurements and curves of all that have it."""
    united: dict[str, Job] = {}
    for job in jobs:
        known = united.get(job.name, job)
        measurements = tuple(dict.fromkeys((*known.measurements, *job.measurements)))
        curves = tuple(dict.fromkeys((*known.curves, *job.curves)))
        united[job.name] = replace(known, measurements=measurements, curves=curves)
    return united
