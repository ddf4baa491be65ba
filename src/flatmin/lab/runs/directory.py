"""The directory of a run and the files in it.

spec.json, metrics.jsonl, speed.jsonl, label_noise.json, predicted_labels.json, environment.json, result.json,
problem.json, tensorboard/, checkpoints/, weights/, measures/, lock.

``metrics.jsonl`` holds only what is the same in every repetition of the run, to the last bit; how fast it went is in
``speed.jsonl``. ``problem.json`` is what a sweep writes of a run whose loss diverged; sweeps do not try such a run
again until the file is deleted.
"""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flatmin.lab.errors import CorruptFileError, RunError, RunLockedError, SpecError, StorageError
from flatmin.lab.runs.environment import PACKAGES as PACKAGES
from flatmin.lab.runs.environment import environment
from flatmin.lab.spec.experiment import Experiment

Metrics = dict[str, float | int | None]


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
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Where weights along training are kept, if they are."""
        return self.path / "weights"

    def open(self, num_workers: int | None = None) -> None:
        """Take the directory for this process and write the spec, or see that it is the one already there.

        Args:
            num_workers: how many are about to train; None if nobody is.

        Raises:
            StorageError: it cannot be written to.
            RunLockedError: another process works on it.
            RunError: another experiment is in it, or the result of another number of workers.
            CorruptFileError: one of its files cannot be read.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / "lock")
            if (self.path / "spec.json").exists():
                self._check_spec()
            else:
                write_atomic(self.path / "spec.json", self.experiment.to_json())
            if num_workers is not None:
                self._check_workers(num_workers)
        except RunError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StorageError(
                f"{self.path} cannot be written to: {error}. Choose another folder with --runs."
            ) from error

    def close(self) -> None:
        """Let other processes have the directory; one in which nothing was begun is removed."""
        if self._lock is not None:
            if {path.name for path in self.path.glob("*")} <= {"lock", "spec.json"}:
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def result(self) -> Result | None:
        """Return the result if the run is finished."""
        return read_result(self.path) if is_finished(self.path) else None

    def write_history(self, history: list[Metrics]) -> None:
        """Replace metrics.jsonl by what a checkpoint knows: lines of a session that was killed are not in it."""
        write_atomic(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: Metrics) -> None:
        """Append an epoch to metrics.jsonl."""
        _append(self.path / "metrics.jsonl", line)

    def add_speed(self, line: Metrics) -> None:
        """Append how fast an epoch was to speed.jsonl."""
        _append(self.path / "speed.jsonl", line)

    def write_noise(self, rate: float, seed: int, flipped: list[int]) -> None:
        """Record which training labels were flipped."""
        content = {"rate": rate, "seed": seed, "num_flipped": len(flipped), "flipped": flipped}
        write_atomic(self.path / "label_noise.json", json.dumps(content) + "\n")

    def add_environment(self, facts: dict[str, Any]) -> None:
        """Record where a session of the run takes place: versions, hardware, commit."""
        sessions = [*read_sessions(self.path), environment() | facts]
        write_atomic(self.path / "environment.json", json.dumps({"sessions": sessions}, indent=2) + "\n")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of what else became known of the run, which need not have begun."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path / name} cannot be written: {error}.") from error
        write_atomic(self.path / name, json.dumps(content, indent=2) + "\n")

    def finish(self, history: list[Metrics], time_seconds: float) -> Result:
        """Write the result: from now on the run is finished."""
        content = {
            "name": self.experiment.name,
            "seed": self.seed,
            "metrics": history[-1],
            "history": history,
            "time_seconds": time_seconds,
        }
        write_atomic(self.path / "result.json", json.dumps(content, indent=2) + "\n")
        return Result(
            experiment=self.experiment, seed=self.seed, directory=self.path, history=history, time_seconds=time_seconds
        )

    def _check_spec(self) -> None:
        if read_spec(self.path).run_hash() != self.experiment.run_hash():
            raise RunError(
                f"{self.path} belongs to another experiment: its spec.json is not the one asked for. A default "
                "may have changed since. Move the directory away, or choose another folder with --runs."
            )

    def _check_workers(self, count: int) -> None:
        """Refuse the result of another number of workers; an unfinished run may go on with another number."""
        earlier = {session["num_workers"] for session in read_sessions(self.path) if "num_workers" in session}
        if earlier <= {count}:
            return
        before, now = " and ".join(map(_workers, sorted(earlier))), _workers(count)
        if not is_finished(self.path):
            warnings.warn(f"{self.path} was begun by {before} and goes on with {now}.", stacklevel=2)
        elif count not in earlier:
            # Batch norm sees the examples of one worker together, and with SAM they share an eps.
            number = max(earlier)
            same = f"with torchrun --nproc-per-node {number}" if number > 1 else "without torchrun"
            raise RunError(
                f"{self.path} was trained by {before}, and here {'is' if count == 1 else 'are'} {now}: that is another "
                f"experiment. For the result that is there run the same command {same}; to train anew choose another "
                "folder with --runs."
            )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def is_finished(path: Path) -> bool:
    """Return whether the directory is that of a finished run."""
    return (path / "result.json").exists()


def read_result(path: Path) -> Result:
    """Read a finished run from its directory.

    Raises:
        RunError: there is no finished run.
        CorruptFileError: a file of it cannot be read.
    """
    try:
        experiment, text = read_spec(path), (path / "result.json").read_bytes()
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is not the directory of a finished run: {Path(error.filename).name} is missing."
        ) from None
    try:
        content = json.loads(text)
        return Result(
            experiment=experiment,
            seed=content["seed"],
            directory=path,
            history=content["history"],
            time_seconds=content["time_seconds"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(path / "result.json", error) from None


def read_spec(path: Path) -> Experiment:
    """Read the experiment of a run from its directory.

    Raises:
        FileNotFoundError: it has no spec.
        CorruptFileError: the spec cannot be read.
    """
    try:
        return Experiment.from_json((path / "spec.json").read_text(encoding="utf-8"))
    except (SpecError, ValueError) as error:
        raise CorruptFileError(path / "spec.json", error) from None


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Read where the sessions of a run took place, the latest last; none if that is not known.

    Raises:
        CorruptFileError: the file cannot be read.
    """
    file = path / "environment.json"
    try:
        sessions: list[dict[str, Any]] = json.loads(file.read_bytes())["sessions"]
        return sessions
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(file, error) from None


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is there in full or not at all.

    Raises:
        StorageError: it cannot be written; what was there before is untouched.
    """
    temporary = path.with_suffix(".part")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}. What was saved before is untouched.") from error


def _append(path: Path, line: Metrics) -> None:
    try:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}. What was saved before is untouched.") from error


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
