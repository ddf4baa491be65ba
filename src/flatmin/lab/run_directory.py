"""The directory of a run and the files in it.

spec.json, metrics.jsonl, speed.jsonl, label_noise.json, predicted_labels.json, environment.json, result.json,
problem.json, tensorboard/, checkpoints/, weights/, measures/.

``metrics.jsonl`` holds only what is the same in every repetition of the run, to the last bit; how fast it went is in
``speed.jsonl``. ``problem.json`` is what a sweep writes of a run whose loss diverged; sweeps do not try such a run
again until the file is deleted.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

import flatmin
from flatmin.lab.checkpoint import StorageError
from flatmin.lab.spec import Experiment

Metrics = dict[str, float | int | None]
PACKAGES = ("torch", "torchvision", "timm", "numpy", "scipy")


class RunError(RuntimeError):
    """A run cannot begin or go on; the message says why and what to do."""


class BusyError(RunError):
    """Another process works on the run."""


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

    def open(self) -> None:
        """Take the directory for this process and write the spec, or see that it is the one already there.

        Raises:
            StorageError: it cannot be written to.
            BusyError: another process works on it.
            RunError: another experiment is in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / "lock")
            if (self.path / "spec.json").exists():
                self._check_spec()
            else:
                write_whole(self.path / "spec.json", self.experiment.to_json())
        except RunError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StorageError(
                f"{self.path} cannot be written to: {error}. Choose another folder with --runs."
            ) from error

    def close(self) -> None:
        """Let other processes have the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def result(self) -> Result | None:
        """Return the result if the run is finished."""
        return read_result(self.path) if is_finished(self.path) else None

    def write_history(self, history: list[Metrics]) -> None:
        """Replace metrics.jsonl by what a checkpoint knows: lines of a session that was killed are not in it."""
        write_whole(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history))

    def add_metrics(self, line: Metrics) -> None:
        """Append an epoch to metrics.jsonl."""
        _append(self.path / "metrics.jsonl", line)

    def add_speed(self, line: Metrics) -> None:
        """Append how fast an epoch was to speed.jsonl."""
        _append(self.path / "speed.jsonl", line)

    def write_noise(self, rate: float, seed: int, flipped: list[int]) -> None:
        """Record which training labels were flipped."""
        content = {"rate": rate, "seed": seed, "num_flipped": len(flipped), "flipped": flipped}
        write_whole(self.path / "label_noise.json", json.dumps(content) + "\n")

    def add_environment(self, facts: dict[str, Any]) -> None:
        """Record where a session of the run takes place: versions, hardware, commit."""
        path = self.path / "environment.json"
        sessions = json.loads(path.read_text())["sessions"] if path.exists() else []
        write_whole(path, json.dumps({"sessions": [*sessions, environment() | facts]}, indent=2) + "\n")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of what else became known of the run, which need not have begun."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path / name} cannot be written: {error}.") from error
        write_whole(self.path / name, json.dumps(content, indent=2) + "\n")

    def finish(self, history: list[Metrics], time_seconds: float) -> Result:
        """Write the result: from now on the run is finished."""
        content = {
            "name": self.experiment.name,
            "seed": self.seed,
            "metrics": history[-1],
            "history": history,
            "time_seconds": time_seconds,
        }
        write_whole(self.path / "result.json", json.dumps(content, indent=2) + "\n")
        return Result(
            experiment=self.experiment, seed=self.seed, directory=self.path, history=history, time_seconds=time_seconds
        )

    def _check_spec(self) -> None:
        found = Experiment.from_json((self.path / "spec.json").read_text())
        if found.run_hash() != self.experiment.run_hash():
            raise RunError(
                f"{self.path} belongs to another experiment: its spec.json is not the one asked for. A default "
                "may have changed since. Move the directory away, or choose another folder with --runs."
            )


def is_finished(path: Path) -> bool:
    """Return whether the directory is that of a finished run."""
    return (path / "result.json").exists()


def read_result(path: Path) -> Result:
    """Read the directory of a finished run.

    Raises:
        RunError: there is no finished run.
    """
    try:
        experiment = Experiment.from_json((path / "spec.json").read_text())
        content = json.loads((path / "result.json").read_text())
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is not the directory of a finished run: {Path(error.filename).name} is missing."
        ) from None
    return Result(
        experiment=experiment,
        seed=content["seed"],
        directory=path,
        history=content["history"],
        time_seconds=content["time_seconds"],
    )


def environment() -> dict[str, Any]:
    """Return the facts of this machine that a result may depend on."""
    facts: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flatmin": flatmin.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.processor()),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


def _commit() -> str | None:
    """Return the commit that flatmin was imported from, with a + behind it where files differ; None outside of git."""
    try:
        if not _git("ls-files", "__init__.py"):
            return None  # installed inside of somebody else's repository
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(flatmin.__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def write_whole(path: Path, text: str) -> None:
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
            raise BusyError(f"Another process is working on {path.parent}. Wait for it, or stop it.") from None
    return file
