"""What a study asks of a sweep: models to train, what to measure of them, and what came of it."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatmin.lab.runs.directory import Result, is_finished, read_problem, read_result
from flatmin.lab.runs.json_files import read_json
from flatmin.lab.spec.experiment import Experiment

MeasurementResult = dict[str, Any]
MeasurementKind = Literal["sharpness", "spectrum", "landscape", "bound", "noise", "cosine", "rho"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Something to measure of a trained model; what is found is kept in RUN/measures as JSON."""

    kind: MeasurementKind
    settings: tuple[tuple[str, Any], ...] = ()
    """Names and values of the measure's other arguments."""
    epoch: int | None = None
    """At the weights after this epoch (the run must have kept them, `keep_every`); at the last ones if None."""

    def file_name(self) -> str:
        """Return the name of its JSON file: what it is, in brief, and a hash of all of it."""
        key = json.dumps([self.kind, sorted(self.settings), self.epoch])
        where = "" if self.epoch is None else f"-epoch{self.epoch}"
        return f"{self.kind}{where}-{hashlib.sha256(key.encode()).hexdigest()[:10]}.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, and what to measure when it is finished."""

    experiment: Experiment
    seed: int = 0
    measurements: tuple[Measurement, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.experiment.run_name(self.seed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is known of a job."""

    job: Job
    result: Result | None = None
    """None: not run, not finished, or it failed."""
    measured: dict[Measurement, MeasurementResult] = field(default_factory=dict)
    failure: str | None = None
    """Why it failed, for example that the loss diverged."""
    final: bool = True
    """Whether a problem is the run's own; if not (a process was killed, say), the next sweep tries again."""

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do for it."""
        if self.failure is not None:
            return self.final
        return self.result is not None and self.measured.keys() >= set(self.job.measurements)


def read_outcome(job: Job, runs: Path) -> Outcome:
    """Return what a directory of runs knows of a job."""
    path = runs / job.name
    problem = read_problem(path)
    if problem is not None:
        return Outcome(job=job, failure=problem)
    if not is_finished(path):
        return Outcome(job=job)
    files = {m: path / "measures" / m.file_name() for m in job.measurements}
    measured = {m: _read_facts(file) for m, file in files.items() if file.exists()}
    return Outcome(job=job, result=read_result(path), measured=measured)


def _read_facts(file: Path) -> MeasurementResult:
    return {name: _numbers(value) if isinstance(value, list) else value for name, value in read_json(file).items()}


def _numbers(values: list[Any]) -> list[Any]:
    """Return a curve or a grid with NaN for null, which is how JSON stores a loss that is not finite."""
    return [_numbers(v) if isinstance(v, list) else math.nan if v is None else v for v in values]
