"""The order of a sweep's jobs: which one is next, and what follows from how one ended."""

import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

from flatmin.lab.errors import InterruptedRun
from flatmin.lab.runs.checkpoint import latest_step
from flatmin.lab.runs.directory import is_finished
from flatmin.lab.sweeps.jobs import Job, JobStatus
from flatmin.lab.sweeps.progress import SweepProgress, passes
from flatmin.lab.training.session import Interruption
from flatmin.lab.training.trained_model import RUN_PREFIX

if TYPE_CHECKING:
    from flatmin.lab.sweeps.sweep import Pool

POLL_SECONDS = 0.25
BUSY_SECONDS = 2.0  # until a run that another process works on is tried again


def prerequisite(job: Job) -> str | None:
    """Return the run that a job needs first: whose predictions it learns, or whose weights it starts from."""
    if job.experiment.data.bootstrap:
        return job.experiment.first_stage().run_name(job.seed)
    checkpoint = job.experiment.model.checkpoint or ""
    return checkpoint.removeprefix(RUN_PREFIX) if checkpoint.startswith(RUN_PREFIX) else None


class JobScheduler:
    """Which job is next, and what follows from how one ended."""

    def __init__(self, jobs: dict[str, Job], pool: "Pool", progress: SweepProgress, attempts: int) -> None:
        self.pool, self.progress, self.attempts = pool, progress, attempts
        self.needs = {name: prerequisite(job) for name, job in jobs.items()}
        # Long ones first: no core waits at the end. With one counts what can begin only after it.
        length = {name: passes(job) for name, job in jobs.items()}
        for name, need in self.needs.items():
            if need in length:
                length[need] = max(length[need], passes(jobs[need]) + length[name])
        self.waiting = {name: jobs[name] for name in sorted(jobs, key=lambda name: -length[name])}
        self.running: dict[str, Job] = {}
        self.failures: dict[str, str] = {}
        self.num_attempts: Counter[str] = Counter()
        self.saved_progress: dict[str, tuple[int, ...]] = {}
        self.not_before: dict[str, float] = {}
        self.mistake: Exception | None = None

    def run(self, interruption: Interruption) -> dict[str, str]:
        """Run all jobs; return, by name, why some of them failed."""
        while self.waiting or self.running:
            if interruption.signal_number or self.mistake is not None:
                self._stop(interruption.signal_number)
            while self.pool.num_free() > 0 and (name := self._next()) is not None:
                self.running[name] = self.waiting.pop(name)
                self.saved_progress.setdefault(name, self._saved_progress(name))
                self.progress.started(name)
                self.pool.start(self.running[name])
            for name, ending in self.pool.poll(POLL_SECONDS):
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
        is_trained_now = any(self.needs[name] == need for name in self.running)
        is_missing = is_trained_now and not is_finished(self.progress.runs / need)
        return need in self.waiting or need in self.running or is_missing

    def _saved_progress(self, name: str) -> tuple[int, ...]:
        """Return how far a job has come for good: steps of its first stage and of its own, what is measured of it."""
        runs, need = self.progress.runs, self.needs[name]
        measures = runs / name / "measures"
        return (
            0 if need is None else latest_step(runs / need / "checkpoints"),
            latest_step(runs / name / "checkpoints"),
            len(list(measures.glob("*.json"))),
            sum(cache.stat().st_size for cache in measures.glob("*.cache")),  # a landscape is kept point by point
        )

    def _note(self, name: str, ending: JobStatus) -> None:
        job = self.running.pop(name)
        if ending.kind in ("done", "diverged"):
            self.progress.ended(name, ending.message or None)
        elif ending.kind == "mistake":
            self.progress.waits(name, None if self.mistake is None else ending.message)  # the first one is raised
            self.mistake = self.mistake or ending.error
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
        progress_now = self._saved_progress(name)
        if progress_now > self.saved_progress[name]:
            # On nodes that come and go every attempt ends so, and each of them is worth its time.
            self.saved_progress[name], self.num_attempts[name] = progress_now, 0
        else:
            self.num_attempts[name] += 1
        if self.num_attempts[name] < self.attempts:
            self.progress.waits(name, f"{message} Trying again.")
            self.waiting[name] = job
        else:
            self.failures[name] = f"{message} (attempt {self.num_attempts[name]} of {self.attempts})"
            self.progress.ended(name, self.failures[name])

    def _stop(self, signal_number: int) -> None:
        """Let all that are running save, then raise why; say which of them could not."""
        self.pool.stop()
        lost: list[str] = []
        while self.running:
            for name, ending in self.pool.poll(POLL_SECONDS):
                if ending.kind in ("stopped", "busy"):
                    del self.running[name]
                elif ending.kind in ("failed", "died"):
                    del self.running[name]
                    lost.append(f"{name}: {ending.message}")
                else:
                    self._note(name, ending)
        if self.mistake is not None:
            for line in lost:
                self.progress.say(line)
            raise self.mistake
        num_left = sum(state in ("waiting", "running") for state in self.progress.states.values())
        unsaved = f", except what these runs did since their last checkpoints ({'; '.join(lost)})" if lost else ""
        raise InterruptedRun(
            signal_number,
            f"Stopped by {signal.Signals(signal_number).name}; {num_left} of {len(self.progress.jobs)} runs are left. "
            f"{'All' if lost else 'Everything'} is saved in {self.progress.runs}{unsaved}: run the same command again "
            "to go on.",
        )
