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
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch

from flatmin.lab.errors import RunError
from flatmin.lab.sweeps.jobs import Job, JobStatus, describe_death

CONTEXT = multiprocessing.get_context("spawn")  # threads do not survive a fork
MAX_FAILED_STARTS = 3
PATIENCE_SECONDS = 5.0  # for a process that was told to end
REMINDER_SECONDS = 2.0  # training that is about to end ignores a signal and starts to measure
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def machine_shares(processes: int, threads: int) -> tuple[int, tuple[str | None, ...]]:
    """Return the threads of each process of a sweep, and for each the GPU it sees, None for all there are.

    0 processes are one per GPU (or core), 0 threads an equal share (or one).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and torch.cuda.is_available():
        gpus = [name.strip() for name in chosen.split(",") if name.strip()]
    else:
        gpus = [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        count = processes or len(gpus)
        return threads or max(1, cores // count), tuple(gpus[i % len(gpus)] for i in range(count))
    threads = threads or 1  # small models: a second thread mostly waits, a second model does not
    return threads, (None,) * (processes or max(1, cores // threads))


class _Worker:
    """A process of the pool, and the job it works on."""

    def __init__(self, run: Callable[[Job], JobStatus], threads: int, gpu: str | None) -> None:
        self.gpu, self.is_ready = gpu, False
        self.job: Job | None = None
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, run, threads), name="flatmin-sweep", daemon=True)
        variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpu
        with mock.patch.dict(os.environ, variables):  # torch reads it when it is imported, before any function of ours
            self.process.start()
        theirs.close()


class LocalPool(AbstractContextManager["LocalPool"]):
    """Processes on this machine; they begin when there is a job for them, and one that died is replaced."""

    def __init__(self, run: Callable[[Job], JobStatus], threads: int, gpus: Iterable[str | None]) -> None:
        self.run, self.threads, self.free_gpus = run, threads, list(gpus)
        self.workers: list[_Worker] = []
        self.stopped_at, self.num_failed_starts = 0.0, 0

    def __exit__(self, *_: object) -> None:
        """End all processes: idle ones by asking, others by force."""
        for worker in [worker for worker in self.workers if worker.job is not None]:
            self._remove(worker)
        for worker in self.workers:
            with suppress(OSError):
                worker.connection.send(None)
        until = time.monotonic() + PATIENCE_SECONDS
        for worker in list(self.workers):
            worker.process.join(max(0.0, until - time.monotonic()))
            self._remove(worker)

    def num_free(self) -> int:
        """Return how many jobs could begin now."""
        return len(self.free_gpus) + sum(worker.job is None for worker in self.workers)

    def start(self, job: Job) -> None:
        """Give a job to a process that is alive, if one is free, else to a new one."""
        for dead in [worker for worker in self.workers if worker.job is None and not worker.process.is_alive()]:
            self._remove(dead)
        worker = next((worker for worker in self.workers if worker.job is None), None)
        if worker is None:
            worker = _Worker(self.run, self.threads, self.free_gpus.pop(0))
            self.workers.append(worker)
        worker.job = job
        with suppress(OSError):  # it died just now: `poll` will see
            worker.connection.send(job)

    def poll(self, seconds: float) -> list[tuple[str, JobStatus]]:
        """Return the names and endings of jobs that ended; wait at most so long for one."""
        if self.stopped_at and time.monotonic() > self.stopped_at + REMINDER_SECONDS:
            self.stop()
        busy = {worker.connection: worker for worker in self.workers if worker.job is not None}
        if not busy:
            time.sleep(seconds)
            return []
        found: list[tuple[str, JobStatus]] = []
        # A dead process's end of the pipe is closed, so its connection is ready as well.
        for connection in wait(list(busy), seconds):
            worker = busy[connection]  # type: ignore[index]
            ending = self._heard(worker)
            if ending is not None and worker.job is not None:
                found.append((worker.job.name, ending))
                worker.job = None
                if ending.is_device_broken:
                    self._remove(worker)  # the next job gets a new one
        return found

    def stop(self) -> None:
        """Ask all that are running to save and stop."""
        self.stopped_at = time.monotonic()
        for worker in self.workers:
            if worker.job is not None:
                worker.process.terminate()

    def _heard(self, worker: _Worker) -> JobStatus | None:
        """Receive what a process sent; None if it only said that it is ready."""
        try:
            message: JobStatus | None = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            exit_code = worker.process.exitcode
            self._remove(worker)
            if self.stopped_at and exit_code in (0, -signal.SIGTERM):  # it had not begun, or was done just then
                return JobStatus(kind="stopped")
            self.num_failed_starts += not worker.is_ready
            if self.num_failed_starts >= MAX_FAILED_STARTS:
                raise RunError(
                    f"The processes of the sweep end before they begin (exit code {exit_code}). A script that starts a "
                    'sweep must do so below `if __name__ == "__main__":`, because each process imports it again.'
                ) from None
            return JobStatus(kind="died", message=describe_death(exit_code))
        if message is None:
            worker.is_ready, self.num_failed_starts = True, 0
        return message

    def _remove(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self.workers.remove(worker)
        self.free_gpus.append(worker.gpu)


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
