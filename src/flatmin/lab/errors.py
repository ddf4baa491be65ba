"""Every exception that the command line maps to an exit code."""

from pathlib import Path

FIXES = {
    "spec.json": "Delete it and rerun the training command, which writes it again.",
    "result.json": "Delete it and rerun the training command, which rebuilds it from the last checkpoint.",
    "metrics.jsonl": "Restore it; or delete the directory and rerun the training command, which starts over.",
    "environment.json": "Delete it: the record of earlier sessions is lost, the run is not.",
    "predicted_labels.json": "Delete it, and result.json if it exists, and rerun the training command, which predicts "
    "the labels again.",
    "problem.json": "Delete it: the next sweep tries the run again.",
}


class SpecError(Exception):
    """A value is not allowed; the message names the field, the value and what is allowed."""


class ModelError(RuntimeError):
    """A model or its weights cannot be loaded; the message says why and what to do."""


class RunError(RuntimeError):
    """A run cannot start, resume or be read; the message says why and what to do."""


class RunLockedError(RunError):
    """Another process is working on the run."""


class CorruptFileError(RunError):
    """A file of a run cannot be used; the message names it and the fix."""

    def __init__(self, path: Path, why: object, fix: str = "") -> None:
        super().__init__(f"{path} is corrupt ({why}). {fix or FIXES.get(path.name, 'Delete it and measure again.')}")
        self.path = path


class DataError(RuntimeError):
    """A dataset is missing or corrupt; the message names the file and the fix."""


class StorageError(RuntimeError):
    """Writing failed; the message says where, why, and what was saved."""


class DivergedError(RuntimeError):
    """The loss diverged (NaN or inf); the message names the step, the batch and possible fixes."""

    is_on_all_workers = True  # all of them raise it, and only the main process prints it


class InterruptedRun(RuntimeError):  # noqa: N818  (nothing went wrong)
    """A signal arrived; the run was saved and resumes when it is started again."""

    is_on_all_workers = True

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
