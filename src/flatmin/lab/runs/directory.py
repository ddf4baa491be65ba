"""The directory of a run and the files in it.

spec.json, metrics.jsonl, speed.jsonl, label_noise.json, predicted_labels.json, environment.json, result.json,
problem.json, tensorboard/, checkpoints/, weights/, measures/, lock.

``result.json`` marks the end of a run; its metrics are in ``metrics.jsonl``, and how fast it went in ``speed.jsonl``.
A sweep writes ``problem.json`` for a run whose loss diverged, and skips that run until the file is deleted.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flatmin.lab.errors import CorruptFileError, RunError, RunLockedError, SpecError
from flatmin.lab.runs.environment import check_sessions
from flatmin.lab.runs.history import Metrics as Metrics
from flatmin.lab.runs.history import read_history
from flatmin.lab.runs.json_files import (
    open_own,
    read_file,
    read_json,
    remove_temporary_files,
    run_id,
    storing,
    write_atomic,
    write_json,
)
from flatmin.lab.spec.experiment import Experiment

PROBLEM_FILE = "problem.json"
CHOOSE_RUNS = "Choose another directory with --runs."


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    experiment: Experiment
    seed: int
    directory: Path
    history: list[Metrics]
    """One line for each epoch."""
    time_seconds: float
    """Of training, over all sessions."""

    @property
    def metrics(self) -> Metrics:
        """The last epoch's metrics."""
        return self.history[-1]


class RunDirectory:
    """The files of one run. Only one process at a time may have it open."""

    def __init__(self, experiment: Experiment, seed: int, runs: Path) -> None:
        self.experiment, self.seed = experiment, seed
        self.path = runs / experiment.run_name(seed)
        self.checkpoints, self.weights = self.path / "checkpoints", self.path / "weights"
        self._lock: IO[str] | None = None

    def open(self, num_workers: int | None = None) -> None:
        """Lock the directory for this process, and write the spec or check the existing one.

        ``num_workers`` are about to train, none if None; the result of another number of them is a RunError.
        """
        with storing(self.path, CHOOSE_RUNS):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = _locked(self.path / "lock")
                for directory in (self.path, self.weights):
                    remove_temporary_files(directory)
                if (self.path / "spec.json").exists():
                    read_spec(self.path)
                else:
                    write_atomic(self.path / "spec.json", self.experiment.to_json())
                if num_workers is not None:
                    check_sessions(self.path, num_workers, is_finished(self.path))
            except (OSError, RunError):
                self.close()
                raise

    def close(self) -> None:
        """Unlock the directory; remove it if training never started."""
        if self._lock is not None:
            if {path.name for path in self.path.glob("*")} <= {"lock", "spec.json"}:
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def result(self, num_workers: int | None = None) -> Result | None:
        """Return the result if the run is finished, unless another number of workers asks for it (a RunError)."""
        if not is_finished(self.path):
            return None
        if num_workers is not None:
            check_sessions(self.path, num_workers, True)
        return read_result(self.path)

    def write_problem(self, problem: str) -> None:
        """Record why the run failed; its directory need not exist."""
        with storing(self.path, CHOOSE_RUNS):
            self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / PROBLEM_FILE, {"problem": problem})

    def finish(self, time_seconds: float) -> Result:
        """Mark the run as finished, and return its result."""
        last = read_history(self.path)[-1]
        content = {"epoch": last["epoch"], "step": last["step"], "time_seconds": time_seconds}
        write_json(self.path / "result.json", content)
        return read_result(self.path)


def run_directories(runs: Path) -> list[Path]:
    """Return the directories of all runs in a directory, by name; flatmin gives none a name that cannot be printed."""
    return [path.parent for path in sorted(runs.glob("*/spec.json")) if path.parent.name.isprintable()]


def is_finished(path: Path) -> bool:
    """Return whether the directory has a finished run."""
    return (path / "result.json").exists()


def read_result(path: Path) -> Result:
    """Read a finished run from its directory."""
    try:
        experiment, content = read_spec(path), read_json(path / "result.json")
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is not the directory of a finished run: {Path(error.filename).name} is missing."
        ) from None
    history, seed = read_history(path), run_seed(path)
    last = history[-1] if history else {}
    if seed is None or any(content.get(name) != last.get(name, -1) for name in ("epoch", "step")):
        raise CorruptFileError(path / "metrics.jsonl", "it does not end where result.json says")
    return Result(
        experiment=experiment, seed=seed, directory=path, history=history, time_seconds=content["time_seconds"]
    )


def read_spec(path: Path) -> Experiment:
    """Read the experiment of a run from its directory, whose name has the experiment's hash."""
    file = path / "spec.json"
    try:
        experiment = Experiment.from_json(read_file(file).decode())
    except (SpecError, ValueError, RecursionError) as error:
        raise CorruptFileError(file, error) from None
    if (run_id(path) or "").partition("-")[0] != experiment.run_hash():
        raise CorruptFileError(
            file,
            f"it belongs to another experiment, whose directories are called {experiment.run_name(0)[:-1]}N",
            "It was edited, the directory was copied or renamed, or a default of flatmin has changed since. Restore "
            "the file or the name; or move the directory away and train again.",
        )
    return experiment


def run_seed(path: Path) -> int | None:
    """Return the seed of a run by the name of its directory; None if that is not the name of a run."""
    run = run_id(path)
    return None if run is None else int(run.partition("-seed")[2])


def last_metrics(path: Path) -> Metrics:
    """Return the metrics of the last epoch that a run has completed; none if there is none."""
    history = read_result(path).history if is_finished(path) else read_history(path)
    return history[-1] if history else {}


def _locked(path: Path) -> IO[str]:
    file = open_own(path, "w")
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunLockedError(f"Another process is working on {path.parent}. Wait for it, or stop it.") from None
    return file
