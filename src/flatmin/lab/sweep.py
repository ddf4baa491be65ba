"""Runs many jobs, on this machine or on a Ray cluster: what is finished is never repeated, the rest goes on.

All that a sweep knows is in the folder of runs. It may be killed at any time, and started again by the same call.
"""

import dataclasses
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from flatmin.lab.engine import CHECKPOINT_SECONDS
from flatmin.lab.fields import SpecError
from flatmin.lab.jobs import Job, Outcome, read_outcome
from flatmin.lab.measuring import measurement_settings
from flatmin.lab.session import InterruptedRun, Interruption, noted_signals
from flatmin.lab.sweep_job import Ending, Pool, run_job
from flatmin.lab.sweep_local import LocalPool, machine_shares
from flatmin.lab.sweep_table import SweepProgress, passes

__all__ = ["Engine", "Sweeper", "prerequisite", "run_job", "sweep"]

Engine = Literal["local", "ray"]
ATTEMPTS = 3
POLL_SECONDS = 0.25
BUSY_SECONDS = 2.0  # until a run that another process works on is tried again


def sweep(
    jobs: Sequence[Job],
    *,
    runs: Path,
    data_root: Path | None = None,
    engine: Engine = "local",
    address: str | None = None,
    processes: int = 0,
    threads: int = 0,
    attempts: int = ATTEMPTS,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    console: Console | None = None,
    what: str = "",
) -> list[Outcome]:
    """Run all jobs that are not complete, several at a time, and return what came of each.

    Jobs with the same name are one run, of which is measured what any of them asks for. A process that dies costs the
    time since its last checkpoint. A loss that diverged, or a job that failed at each attempt, becomes the problem of
    its outcome, and the others go on; the next sweep tries the failed ones again, but not the diverged ones.

    Args:
        jobs: what to run and to measure.
        runs: the folder of all runs; with Ray, on a file system that all nodes see.
        data_root: the first folder in which datasets are looked for.
        engine: local: processes on this machine; ray: tasks on a Ray cluster.
        address: of an existing Ray cluster; if None, RAY_ADDRESS, or else a cluster on this machine.
        processes: how many jobs at once; 0 is one for each GPU, or as many as there are cores for.
        threads: of each job; 0 is one, or with GPUs an equal share of this machine's cores (with Ray always one).
        attempts: how often a job is tried that fails or whose process dies.
        checkpoint_seconds: how long a job trains, at most, before it saves.
        console: where progress is shown; nowhere if None.
        what: one line for people, above the progress.

    Returns:
        The outcomes, in the order of the jobs.

    Raises:
        SpecError, DataError, ModelError, StorageError: the user's to mend; other jobs have saved and stopped.
        RunError: the processes or the cluster cannot be had.
        InterruptedRun: SIGTERM or Ctrl-C came; everything is saved.
    """
    with Sweeper(
        runs=runs,
        data_root=data_root,
        engine=engine,
        address=address,
        processes=processes,
        threads=threads,
        attempts=attempts,
        checkpoint_seconds=checkpoint_seconds,
        console=console,
    ) as sweeper:
        return sweeper.outcomes(jobs, what)


class Sweeper:
    """A laboratory (`jobs.Laboratory`) that runs what is missing; its processes are kept from one call to the next.

    Use it in a ``with`` statement; the arguments are those of `sweep`.
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
        console: Console | None = None,
    ) -> None:
        for name, value, least in (("processes", processes, 0), ("threads", threads, 0), ("attempts", attempts, 1)):
            if value < least:
                raise SpecError(f"{name} must be at least {least}, got {value}.")
        # Absolute, because the processes of a cluster have working directories of their own.
        self.runs, self.data_root = runs.absolute(), None if data_root is None else data_root.absolute()
        self.engine, self.address, self.processes, self.threads = engine, address, processes, threads
        self.attempts, self.checkpoint_seconds, self.console = attempts, checkpoint_seconds, console
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
        """Run all jobs that are not complete and return what came of each, as `sweep` does."""
        united = unite(jobs)
        for measurement in {m for job in united.values() for m in job.measurements}:
            measurement_settings(measurement)  # a mistake shows now, and not after the training
        progress = SweepProgress(united, self.runs, self.console, what)
        missing = {}
        for name, job in united.items():
            known = read_outcome(job, self.runs)
            if known.complete:
                progress.complete_before(name, failed=known.problem is not None)
            else:
                missing[name] = job
        failures: dict[str, str] = {}
        if missing:
            schedule = Schedule(missing, self._ready_pool(), progress, self.attempts)
            try:
                with noted_signals() as interruption, progress.shown():
                    failures = schedule.run(interruption)
            except BaseException:
                self.close()  # whatever is still running must not go on unseen
                raise
        outcomes = [_outcome(job, self.runs, failures) for job in jobs]
        self._say_problems(outcomes, failures)
        return outcomes

    def _ready_pool(self) -> Pool:
        if self._pool is None:
            run = partial(run_job, runs=self.runs, data_root=self.data_root, checkpoint_seconds=self.checkpoint_seconds)
            if self.engine == "ray":
                from flatmin.lab.sweep_ray import RayPool

                pool: Pool = RayPool(run, self.runs, self.address, processes=self.processes, threads=self.threads)
            else:
                pool = LocalPool(run, machine_shares(self.processes, self.threads))
            self._pool = pool.__enter__()
        return self._pool

    def _say_problems(self, outcomes: Sequence[Outcome], failures: dict[str, str]) -> None:
        problems = {o.job.name: o.problem for o in outcomes if o.problem is not None}
        if self.console is None or not problems:
            return
        self.console.print(f"{len(problems)} of {len({o.job.name for o in outcomes})} runs came to nothing:")
        for name, problem in problems.items():
            again = " (The same command tries it again.)" if name in failures else ""
            self.console.print(f"  {name}: {problem}{again}", markup=False, highlight=False, soft_wrap=True)


def unite(jobs: Sequence[Job]) -> dict[str, Job]:
    """Return one job for each name, with the measurements of all that have it."""
    united: dict[str, Job] = {}
    for job in jobs:
        known = united.get(job.name, job)
        measurements = tuple(dict.fromkeys((*known.measurements, *job.measurements)))
        united[job.name] = dataclasses.replace(known, measurements=measurements)
    return united


def prerequisite(job: Job) -> str | None:
    """Return the name of the run that a job needs first: with bootstrapping, the one whose predictions it learns."""
    return job.experiment.first_stage().run_name(job.seed) if job.experiment.data.bootstrap else None


def _outcome(job: Job, runs: Path, failures: dict[str, str]) -> Outcome:
    outcome = read_outcome(job, runs)
    return outcome if outcome.complete else dataclasses.replace(outcome, problem=failures.get(job.name), final=False)


class Schedule:
    """Which job is next, and what follows from how one ended."""

    def __init__(self, jobs: dict[str, Job], pool: Pool, progress: SweepProgress, attempts: int) -> None:
        self.pool, self.progress, self.attempts = pool, progress, attempts
        self.needs = {name: prerequisite(job) for name, job in jobs.items()}
        # Long ones first, so that no core waits at the end; with one counts what can begin only after it.
        length = {name: passes(job) for name, job in jobs.items()}
        for name, need in self.needs.items():
            if need in length:
                length[need] = max(length[need], passes(jobs[need]) + length[name])
        self.waiting = {name: jobs[name] for name in sorted(jobs, key=lambda name: -length[name])}
        self.running: dict[str, Job] = {}
        self.failures: dict[str, str] = {}
        self.num_attempts: Counter[str] = Counter()
        self.not_before: dict[str, float] = {}
        self.mistake: Exception | None = None

    def run(self, interruption: Interruption) -> dict[str, str]:
        """Run all jobs; return, by name, why some of them failed."""
        while self.waiting or self.running:
            if interruption.signal_number or self.mistake is not None:
                self._stop(interruption.signal_number)
            while self.pool.num_free() > 0 and (name := self._next()) is not None:
                self.running[name] = self.waiting.pop(name)
                self.progress.started(name)
                self.pool.start(self.running[name])
            for name, ending in self.pool.ended(POLL_SECONDS):
                self._note(name, ending)
        if self.mistake is not None:
            raise self.mistake
        return self.failures

    def _next(self) -> str | None:
        now = time.monotonic()
        for name in self.waiting:
            if now >= self.not_before.get(name, 0.0) and not self._must_wait_for(self.needs[name]):
                return name
        return None

    def _must_wait_for(self, need: str | None) -> bool:
        if need is None:
            return False
        # A job whose first stage is not in the list trains it by itself: only one at a time may.
        trains_it = any(self.needs[name] == need for name in self.running) and not self._is_trained(need)
        return need in self.waiting or need in self.running or trains_it

    def _is_trained(self, name: str) -> bool:
        return (self.progress.runs / name / "result.json").exists()

    def _note(self, name: str, ending: Ending) -> None:
        job = self.running.pop(name)
        if ending.kind in ("done", "diverged"):
            self.progress.ended(name, ending.message or None)
        elif ending.kind == "mistake":
            self.mistake = self.mistake or ending.error
            self.progress.waits(name, None)
        elif ending.kind == "busy":
            self.progress.waits(name, "another process works on it; waiting." if name not in self.not_before else None)
            self.not_before[name] = time.monotonic() + BUSY_SECONDS
            self.waiting[name] = job
        elif ending.kind == "stopped":  # by somebody else: asked to stop by us, it would not come here
            self.progress.waits(name, None)
            self.waiting[name] = job
        else:
            self._note_failure(name, job, ending.message)

    def _note_failure(self, name: str, job: Job, message: str) -> None:
        self.num_attempts[name] += 1
        if self.num_attempts[name] < self.attempts:
            self.progress.waits(name, f"{message} Trying again.")
            self.waiting[name] = job
        else:
            self.failures[name] = f"{message} (attempt {self.num_attempts[name]} of {self.attempts})"
            self.progress.ended(name, self.failures[name])

    def _stop(self, signal_number: int) -> None:
        """Let all that are running save, then raise why."""
        self.pool.stop()
        while self.running:
            for name, ending in self.pool.ended(POLL_SECONDS):
                if ending.kind in ("done", "diverged"):
                    self._note(name, ending)
                else:
                    del self.running[name]
        if self.mistake is not None:
            raise self.mistake
        num_left = sum(state in ("waiting", "running") for state in self.progress.states.values())
        raise InterruptedRun(
            signal_number,
            f"Stopped by {signal.Signals(signal_number).name}; {num_left} of {len(self.progress.jobs)} runs are left. "
            f"Everything is saved in {self.progress.runs}: run the same command again to go on.",
        )
