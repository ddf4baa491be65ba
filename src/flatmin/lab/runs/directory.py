"""The directory of a run and the files in it.

spec.json, metrics.jsonl, speed.jsonl, label_noise.json, predicted_labels.json, environment.json, result.json,
problem.json, tensorboard/, checkpoints/, weights/, measures/, lock.

``metrics.jsonl`` holds only what is bitwise identical in every repetition of the run; how fast it went is in
``speed.jsonl``. A sweep writes ``problem.json`` for a run whose loss diverged, and skips that run until the file is
deleted.
"""

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from flatmin.lab.errors import CorruptFileError, RunError, RunLockedError, SpecError
from flatmin.lab.runs.environment import check_sessions, environment, read_sessions
from flatmin.lab.runs.json_files import read_json, remove_temporary_files, storing, write_atomic, write_json
from flatmin.lab.spec.experiment import Experiment

Metrics = dict[str, float | int | None]
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
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """The directory of weights saved along training, if any."""
        return self.path / "weights"

    def open(self, num_workers: int | None = None) -> None:
        """Lock the directory for this process, and write the spec or check the existing one.

        Args:
            num_workers: how many workers are about to train; None if none.

        Raises:
            StorageError: the directory is not writable.
            RunLockedError: another process is working on it.
            RunError: it belongs to another experiment, or has the result of another number of workers.
            CorruptFileError: one of its files cannot be used.
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
        """Return the result if the run is finished. Nothing is written.

        Args:
            num_workers: how many workers ask for it; None if that is of no importance.

        Raises:
            RunError: it is the result of another experiment or of another number of workers.
            CorruptFileError: a file cannot be used.
        """
        if not is_finished(self.path):
            return None
        if num_workers is not None:
            check_sessions(self.path, num_workers, is_finished(self.path))
        return read_result(self.path)

    def write_history(self, history: list[Metrics]) -> None:
        """Replace metrics.jsonl by the history of a checkpoint, without the lines of a session that was killed."""
        write_atomic(self.path / "metrics.jsonl", "".join(map(_checked_line, history)))

    def add_metrics(self, line: Metrics) -> None:
        """Append an epoch to metrics.jsonl."""
        _append(self.path / "metrics.jsonl", _checked_line(line))

    def add_speed(self, line: Metrics) -> None:
        """Append how fast an epoch was to speed.jsonl."""
        _append(self.path / "speed.jsonl", json.dumps(line) + "\n")

    def write_noise(self, rate: float, seed: int, flipped: list[int]) -> None:
        """Record which training labels were flipped."""
        content = {"rate": rate, "seed": seed, "num_flipped": len(flipped), "flipped": flipped}
        write_json(self.path / "label_noise.json", content, indent=None)

    def add_environment(self, facts: dict[str, Any]) -> None:
        """Record where a session of the run takes place: versions, hardware, commit, inputs."""
        write_json(self.path / "environment.json", {"sessions": [*read_sessions(self.path), environment() | facts]})

    def write_problem(self, problem: str) -> None:
        """Record why the run failed; its directory need not exist."""
        with storing(self.path, CHOOSE_RUNS):
            self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / PROBLEM_FILE, {"problem": problem})

    def finish(self, history: list[Metrics], time_seconds: float) -> Result:
        """Write the result: from now on the run is finished."""
        content = {
            "name": self.experiment.name,
            "seed": self.seed,
            "metrics": history[-1],
            "history": history,
            "time_seconds": time_seconds,
        }
        write_json(self.path / "result.json", content)
        return Result(
            experiment=self.experiment, seed=self.seed, directory=self.path, history=history, time_seconds=time_seconds
        )


def run_directories(runs: Path) -> list[Path]:
    """Return the directories of all runs in a directory, by name; flatmin gives none a name that cannot be printed."""
    return [path.parent for path in sorted(runs.glob("*/spec.json")) if path.parent.name.isprintable()]


def is_finished(path: Path) -> bool:
    """Return whether the directory is that of a finished run."""
    return (path / "result.json").exists()


def read_result(path: Path) -> Result:
    """Read a finished run from its directory.

    Raises:
        RunError: there is no finished run.
        CorruptFileError: a file cannot be used, or belongs to another run.
    """
    try:
        experiment, content = read_spec(path), read_json(path / "result.json")
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is not the directory of a finished run: {Path(error.filename).name} is missing."
        ) from None
    seed, history, seconds = content.get("seed"), content.get("history"), content.get("time_seconds")
    if not (_is_history(history) and _is_number(seconds) and content.get("metrics", history[-1]) == history[-1]):
        raise CorruptFileError(path / "result.json", "it does not hold the result of a run")
    if not isinstance(seed, int) or seed != run_seed(path):
        raise CorruptFileError(path / "result.json", f"it has the result of seed {seed}")
    return Result(experiment=experiment, seed=seed, directory=path, history=history, time_seconds=seconds)


def read_spec(path: Path) -> Experiment:
    """Read the experiment of a run from its directory, whose name has the experiment's hash.

    Raises:
        FileNotFoundError: it has no spec.
        CorruptFileError: the spec cannot be used, or belongs to another run.
    """
    file = path / "spec.json"
    try:
        experiment = Experiment.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, SpecError, ValueError, RecursionError) as error:
        raise CorruptFileError(file, error) from None
    name = experiment.run_name(0).removesuffix("0")
    if not any(found.removeprefix(name).isdigit() for found in _names(path)):
        raise CorruptFileError(
            file,
            f"it belongs to another experiment, whose directories are called {name}N",
            "It was edited, the directory was copied or renamed, or a default of flatmin has changed since. Restore "
            "the file or the name; or move the directory away and train again.",
        )
    return experiment


def run_seed(path: Path) -> int | None:
    """Return the seed of a run by the name of its directory; None if that is not the name of a run."""
    seeds = (name.rpartition("-seed")[2] for name in _names(path))
    return next((int(seed) for seed in seeds if seed.isascii() and seed.isdigit()), None)


def _names(path: Path) -> tuple[str, str]:
    """Return what a directory is called, by the path itself and with links followed (also of ``.``)."""
    return path.name, path.resolve().name


def read_problem(path: Path) -> str | None:
    """Return why a run failed; None if it did not.

    Raises:
        CorruptFileError: the file cannot be used.
    """
    try:
        return str(read_json(path / PROBLEM_FILE).get("problem", ""))
    except FileNotFoundError:
        return None


def last_metrics(path: Path) -> Metrics:
    """Return the metrics of the last epoch that a run has completed; none if there is none.

    Raises:
        CorruptFileError: a file cannot be used.
    """
    if is_finished(path):
        return read_result(path).metrics
    file = path / "metrics.jsonl"
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CorruptFileError(file, error, "Rerun the training command, which writes it again.") from None
    for line in reversed(lines):
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):  # a killed process may leave half a line, which the next session replaces
            continue
        checksum = metrics.pop("crc32", None) if isinstance(metrics, dict) else None
        if not _is_history([metrics]) or checksum not in (None, _crc32(metrics)):  # older lines have none
            raise CorruptFileError(file, "a line is corrupt", "Rerun the training command, which writes it again.")
        return dict(metrics)
    return {}


def _checked_line(line: Metrics) -> str:
    return json.dumps(line | {"crc32": _crc32(line)}) + "\n"


def _crc32(line: Metrics) -> int:
    return zlib.crc32(json.dumps(line).encode())


def _is_history(history: Any) -> TypeGuard[list[Metrics]]:
    return (
        isinstance(history, list)
        and len(history) > 0
        and all(isinstance(line, dict) and isinstance(line.get("epoch"), int) for line in history)
        and all(value is None or _is_number(value) for line in history for value in line.values())
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _append(path: Path, line: str) -> None:
    with storing(path, "What was saved before is unchanged."), path.open("a") as file:
        file.write(line)


def _locked(path: Path) -> IO[str]:
    file = path.open("w")
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunLockedError(f"Another process is working on {path.parent}. Wait for it, or stop it.") from None
    return file
