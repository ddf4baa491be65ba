"""One job of a sweep, in whatever process it runs: train, then measure what is missing."""

import re
import signal
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatmin.lab.errors import (
    DataError,
    DivergedError,
    InterruptedRun,
    ModelError,
    RunLockedError,
    SpecError,
    StorageError,
)
from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import measure_run
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import deterministic_algorithms

DEVICE_ERROR = re.compile("CUDA error|CUDA driver error|cuDNN error|CUDNN_STATUS|CUBLAS_STATUS|NCCL error")
USER_MISTAKES = (SpecError, DataError, ModelError, StorageError)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """How a job ended; plain values, which can be sent from one process to another."""

    kind: Literal["done", "diverged", "stopped", "busy", "mistake", "failed", "died"]
    """done: there is nothing left to do; diverged: likewise, and the run failed; stopped: saved, as was asked;
    busy: another process works on the run; mistake: a user error; failed: anything else that was raised; died:
    the process is gone."""
    message: str = ""
    error: Exception | None = None
    """The mistake, to be raised again."""
    is_device_broken: bool = False
    """Whether the process must not run another job: after a CUDA error every later call fails as well."""


def run_job(
    job: Job, runs: Path, data_root: Path | None, checkpoint_seconds: float, deterministic: bool = False
) -> JobStatus:
    """Train, from the last checkpoint if there is one, then measure what was not measured yet, and say how it ended.

    A loss that diverged is written to RUN/problem.json: the same would happen again. Nothing is raised.
    """
    try:
        directory = RunDirectory(job.experiment, job.seed, runs)
        with deterministic_algorithms(deterministic):
            try:
                train(
                    job.experiment, seed=job.seed, runs=runs, data_root=data_root, checkpoint_seconds=checkpoint_seconds
                )
            except DivergedError as error:
                directory.write_problem(str(error))
                return JobStatus(kind="diverged", message=str(error))
            if job.measurements:
                directory.open()  # two sweeps must not write the same files
                with closing(directory):
                    measure_run(directory.path, job.measurements, data_root)
        return JobStatus(kind="done")
    except Exception as error:
        return status_of_error(error)


def status_of_error(error: Exception) -> JobStatus:
    """Return how a job ended that raised an error."""
    if isinstance(error, InterruptedRun):
        return JobStatus(kind="stopped", message=str(error))
    if isinstance(error, RunLockedError):
        return JobStatus(kind="busy", message=str(error))
    if isinstance(error, USER_MISTAKES):
        return JobStatus(kind="mistake", message=str(error), error=error)
    return JobStatus(kind="failed", message=describe(error), is_device_broken=bool(DEVICE_ERROR.search(str(error))))


def describe(error: BaseException) -> str:
    """Return in one line what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def describe_death(exit_code: int | None) -> str:
    """Return in one line what became of a process.

    Example:
        >>> describe_death(-9)
        'Its process was killed by SIGKILL, as happens where memory runs out.'
    """
    if exit_code == -signal.SIGKILL:
        return "Its process was killed by SIGKILL, as happens where memory runs out."
    if exit_code is not None and exit_code < 0:
        return f"Its process was killed by {signal.Signals(-exit_code).name}."
    return f"Its process ended with exit code {exit_code}."
