"""Every exception that the command line maps to an exit code."""

from pathlib import Path

REMEDIES = {
    "spec.json": "Delete it and run the training command again: it is written anew.",
    "result.json": "Delete it and run the training command again: it is made anew from the last checkpoint.",
    "environment.json": "Delete it: what it said of earlier sessions is lost, the run is not.",
}


class SpecError(Exception):
    """A value is not allowed; the message names the field, the value and what is allowed."""


class ModelError(RuntimeError):
    """A network or its weights cannot be had; the message says why and what to do."""


class RunError(RuntimeError):
    """A run cannot begin or go on; the message says why and what to do."""


class RunLockedError(RunError):
    """Another process works on the run."""


class CorruptFileError(RunError):
    """A file of a run cannot be read; the message names it and the remedy."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"{path} is damaged ({why}). {REMEDIES[path.name]}")
        self.path = path


class DataError(RuntimeError):
    """A dataset is missing or damaged; the message names the file and the remedy."""


class StorageError(RuntimeError):
    """Nothing can be written; the message says where, why, and what was saved."""


class DivergedError(RuntimeError):
    """The loss is not a number any more; the message names step, batch and remedies."""

    is_on_all_workers = True  # all of them raise it, so that only the main process prints it


class InterruptedRun(RuntimeError):  # noqa: N818  (nothing went wrong)
    """A signal came; the run was saved and will go on when started again."""

    is_on_all_workers = True

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
