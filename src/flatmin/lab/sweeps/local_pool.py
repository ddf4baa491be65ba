"""The processes of a sweep on this machine: one job each at a time, a fixed number of threads, a GPU each if any.

Not `concurrent.futures` or loky: there a worker that is killed, by the system when memory runs out for example, breaks
the whole executor and ends the jobs of all others; they do not tell its exit code; they cannot ask one worker to save
and stop; and their workers outlive a parent that was killed.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any
from unittest import mock

import torch

from flatmin.lab.errors import RunError
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.run_job import JobStatus, describe_death

MAX_FAILED_STARTS = 3
PATIENCE_SECONDS = 5.0  # for a process that was told to end
REMINDER_SECONDS = 2.0  # training that is about to end ignores a signal and starts to measure
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How a machine is divided among the processes of a sweep."""

    threads: int
    """Of each process."""
    gpus: tuple[str | None, ...]
    """One entry for each process: which GPU it sees (CUDA_VISIBLE_DEVICES), None for all there are."""


def machine_shares(processes: int, threads: int) -> Shares:
    """Return how a machine is shared; 0 processes are one per GPU (or core), 0 threads an equal share (or one)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and torch.cuda.is_available():
        gpus = [name.strip() for name in chosen.split(",") if name.strip()]
    else:
        gpus = [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        count = processes or len(gpus)
        return Shares(threads=threads or max(1, cores // count), gpus=tuple(gpus[i % len(gpus)] for i in range(count)))
    threads = threads or 1  # small models: a second thread mostly waits, a second model does not
    return Shares(threads=threads, gpus=(None,) * (processes or max(1, cores // threads)))


@dataclass
class _Slot:
    """A place for one process and the job it works on."""

    gpu: str | None
    process: SpawnProcess | None = None
    connection: Connection | None = None
    job: Job | None = None
    ready: bool = False


class LocalPool(AbstractContextManager["LocalPool"]):
    """Processes on this machine; they begin when there is a job for them, and one that died is replaced."""

    def __init__(self, run: Callable[[Job], JobStatus], shares: Shares) -> None:
        self.run, self.shares = run, shares
        self.slots = [_Slot(gpu) for gpu in shares.gpus]
        self.stopped_at, self.num_failed_starts = 0.0, 0

    def __exit__(self, *_: object) -> None:
        """End all processes: idle ones by asking, others by force."""
        for slot in self.slots:
            if slot.connection is not None and slot.job is None:
                with suppress(OSError):
                    slot.connection.send(None)
        until = time.monotonic() + PATIENCE_SECONDS
        for slot in self.slots:
            if slot.process is not None:
                if slot.job is None:
                    slot.process.join(max(0.0, until - time.monotonic()))
                self._kill_process(slot)

    def num_free(self) -> int:
        """Return how many jobs could begin now."""
        return sum(slot.job is None for slot in self.slots)

    def start(self, job: Job) -> None:
        """Give a job to a process that is alive, if one is free, else to a new one."""
        free = [slot for slot in self.slots if slot.job is None]
        slot = next((s for s in free if s.process is not None and s.process.is_alive()), free[0])
        if slot.process is not None and not slot.process.is_alive():
            self._kill_process(slot)
        if slot.process is None:
            self._start_process(slot)
        slot.job = job
        assert slot.connection is not None
        with suppress(OSError):  # it died just now: `poll` will see
            slot.connection.send(job)

    def poll(self, seconds: float) -> list[tuple[str, JobStatus]]:
        """Return the names and endings of jobs that ended; wait at most so long for one."""
        if self.stopped_at and time.monotonic() > self.stopped_at + REMINDER_SECONDS:
            self.stop()
        busy = {slot.connection: slot for slot in self.slots if slot.job is not None and slot.connection is not None}
        if not busy:
            time.sleep(seconds)
            return []
        found: list[tuple[str, JobStatus]] = []
        # A dead process's end of the pipe is closed, so its connection is ready as well.
        for connection in wait(list(busy), seconds):
            slot = busy[connection]  # type: ignore[index]
            ending = self._heard(slot)
            if ending is not None and slot.job is not None:
                found.append((slot.job.name, ending))
                slot.job = None
                if ending.is_device_broken:
                    self._kill_process(slot)  # the next job gets a new one
        return found

    def stop(self) -> None:
        """Ask all that are running to save and stop."""
        self.stopped_at = time.monotonic()
        for slot in self.slots:
            if slot.job is not None and slot.process is not None:
                slot.process.terminate()

    def _heard(self, slot: _Slot) -> JobStatus | None:
        """Receive what a process sent; None if it only said that it is ready."""
        assert slot.connection is not None
        assert slot.process is not None
        try:
            message: JobStatus | None = slot.connection.recv()
        except (EOFError, OSError):
            slot.process.join()
            exit_code, was_ready = slot.process.exitcode, slot.ready
            self._kill_process(slot)
            if self.stopped_at and exit_code in (0, -signal.SIGTERM):  # it had not begun, or was done just then
                return JobStatus(kind="stopped")
            self.num_failed_starts += not was_ready
            if self.num_failed_starts >= MAX_FAILED_STARTS:
                raise RunError(
                    f"The processes of the sweep end before they begin (exit code {exit_code}). A script that starts a "
                    'sweep must do so below `if __name__ == "__main__":`, because each process imports it again.'
                ) from None
            return JobStatus(kind="died", message=describe_death(exit_code))
        if message is None:
            slot.ready, self.num_failed_starts = True, 0
        return message

    def _start_process(self, slot: _Slot) -> None:
        context = multiprocessing.get_context("spawn")  # threads do not survive a fork
        slot.connection, theirs = context.Pipe()
        slot.process = context.Process(
            target=_serve, args=(theirs, self.run, self.shares.threads), name="flatmin-sweep", daemon=True
        )
        variables = dict.fromkeys(THREAD_VARIABLES, str(self.shares.threads))
        if slot.gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = slot.gpu
        with mock.patch.dict(os.environ, variables):  # torch reads it when it is imported, before any function of ours
            slot.process.start()
        theirs.close()
        slot.ready = False

    @staticmethod
    def _kill_process(slot: _Slot) -> None:
        if slot.process is not None:
            slot.process.kill()
            slot.process.join()
        if slot.connection is not None:
            slot.connection.close()
        slot.process, slot.connection = None, None


def _serve(connection: Connection, run: Callable[[Job], JobStatus], threads: int) -> None:
    """Be a process of the pool: run one job after the other."""
    if os.name == "posix":
        # Ctrl-C reaches every process of a terminal; the sweep is told, and tells us with SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _stop)  # `train` has its own way, which saves first
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        connection.send(None)
        while (job := connection.recv()) is not None:
            try:
                status = run(job)
            except KeyboardInterrupt:
                status = JobStatus(kind="stopped")
            connection.send(status)
    except (KeyboardInterrupt, EOFError, OSError):
        return  # nobody listens any more, or nothing is running


def _stop(*_: Any) -> None:
    # No Exception: whoever reads a dataset, say, would take it for one of a corrupt file.
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    # A sweep that was killed could not tell its processes: they would hold on to their runs.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
