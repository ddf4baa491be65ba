"""What is known of a run: one record for sweeps, studies, reports and the evidence in git.

A record is read from the directory of a run, or from a line of ``runs.jsonl`` (`write_records`), once per command.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatmin.lab.errors import CorruptFileError, RunError, SpecError
from flatmin.lab.runs.directory import (
    PROBLEM_FILE,
    Metrics,
    is_finished,
    read_result,
    read_spec,
    run_directories,
    run_seed,
)
from flatmin.lab.runs.environment import read_sessions
from flatmin.lab.runs.json_files import read_json, write_atomic
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.spec.fields import build, finite, map_leaves, plain

State = Literal["finished", "failed", "not finished", "missing", "not readable", "planned"]
MeasurementResult = dict[str, Any]
RUNS_FILE, ENVIRONMENTS_FILE = "runs.jsonl", "environments.json"
DIGITS = 7
"""Of measurements in ``runs.jsonl``: what float32 has."""
_WORD = r"""[^\s/\\'",;:()<>]+"""
_ABSOLUTE = re.compile(rf"""(?<![\w./\\])(?:[A-Za-z]:[\\/]|~?/)(?:{_WORD}[\\/])+({_WORD})""")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    name: str
    state: State
    reason: str = ""
    """Why it failed or cannot be read."""
    is_final: bool = True
    """Whether a failure is the run's own; if not (a process was killed, say), the next sweep tries again."""
    experiment: Experiment | None = None
    seed: int | None = None
    history: Sequence[Metrics] = ()
    """One line for each epoch; in ``runs.jsonl`` the last one alone, or what a study draws of the others."""
    time_seconds: float = 0.0
    """Of training, over all sessions."""
    measured: dict[str, MeasurementResult] = field(default_factory=dict)
    """By the names of the measurements."""
    sessions: Sequence[dict[str, Any]] = ()
    """Where and with what it ran, the latest last."""

    @property
    def metrics(self) -> Metrics:
        """The last epoch's metrics; none if it is not finished."""
        return self.history[-1] if self.state == "finished" else {}

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train."""
        return self.state == "finished" or (self.state == "failed" and self.is_final)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, without absolute paths."""
        spec = {} if self.experiment is None else plain(self.experiment, leave_defaults_out=True)
        shown: dict[str, Any] = without_paths({name: value for name, value in spec.items() if value != {}})
        return shown


class Records(dict[str, RunRecord]):
    """Runs by name, each read from its directory when it is first asked for; one that does not exist is "missing".

    They are in a directory of runs, or in ``runs.jsonl`` there.
    """

    def __init__(self, runs: Path | None = None) -> None:
        super().__init__()
        self._runs = runs
        if runs is not None and (runs / RUNS_FILE).is_file():
            self.update(read_records(runs))
            self._runs = None

    def __missing__(self, name: str) -> RunRecord:
        record = RunRecord(name=name, state="missing") if self._runs is None else read_record(name, self._runs)
        self[name] = record
        return record


def all_records(runs: Path) -> Records:
    """Return every run of a directory, by name; a RunError if there is none."""
    known = Records(runs)
    if not known:
        for path in run_directories(runs):
            known[path.name] = read_record(path.name, runs)
    if not known:
        raise RunError(
            f"There are no runs in {runs}: no directory in it has a spec.json. Choose another one with --runs."
        )
    return known


class PlannedRecords(Records):
    """Records in which every run that is not complete is "planned": a study then names all that it will ask for."""

    def __init__(self, known: Records) -> None:
        super().__init__()
        self._known = known

    def __missing__(self, name: str) -> RunRecord:
        record = self._known[name]
        return record if record.is_complete else RunRecord(name=name, state="planned")


def read_record(name: str, runs: Path) -> RunRecord:
    """Return what the directory of a run says; nothing is raised over the content of a file."""
    path = runs / name
    # A name is a directory in `runs`: anything else would read files elsewhere.
    if Path(name).name != name or name in ("", "..") or not path.is_dir():
        return RunRecord(name=name, state="missing")
    facts: dict[str, Any] = {"name": name, "seed": run_seed(path)}
    try:
        facts["experiment"] = read_spec(path) if (path / "spec.json").exists() else None
        facts["sessions"] = read_sessions(path)
        problem = read_json(path / PROBLEM_FILE) if (path / PROBLEM_FILE).exists() else None
        if is_finished(path):
            result = read_result(path)
            facts |= {"history": result.history, "time_seconds": result.time_seconds}
            facts["measured"] = {file.stem: read_measurement(file) for file in sorted(path.glob("measures/*.json"))}
        if problem is not None:
            return RunRecord(**facts, state="failed", reason=without_paths(str(problem.get("problem", ""))))
        return RunRecord(**facts, state="finished" if is_finished(path) else "not finished")
    except (OSError, RunError) as error:
        return RunRecord(**facts, state="not readable", reason=without_paths(str(error)))


def read_measurement(file: Path) -> MeasurementResult:
    """Return what was measured; in curves and grids a null is a number that is not finite."""
    numbers: MeasurementResult = _with_nan(read_json(file))
    return numbers


def read_records(results: Path) -> dict[str, RunRecord]:
    """Read RESULTS/runs.jsonl and RESULTS/environments.json; a CorruptFileError names the one that cannot be used."""
    file = results / RUNS_FILE
    try:
        environments = json.loads((results / ENVIRONMENTS_FILE).read_bytes())
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        return {line["name"]: _record(line, environments) for line in lines}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, SpecError) as error:
        raise CorruptFileError(file, error, "Restore it, or collect the runs again.") from None


def write_records(results: Path, records: Iterable[RunRecord], curves: dict[str, tuple[str, ...]]) -> None:
    """Write RESULTS/runs.jsonl, one line per run, sorted by name, and the environments that the lines refer to.

    ``curves`` says by the names of runs which metrics to keep of every epoch; of the others the last epoch is kept.
    Environments are only added to, and written first: so after a kill the lines of before still mean theirs.
    """
    stored = json.loads((results / ENVIRONMENTS_FILE).read_bytes()) if (results / RUNS_FILE).exists() else []
    environments = {json.dumps(environment): number for number, environment in enumerate(stored)}
    lines = []
    for record in sorted(records, key=lambda record: record.name):
        line: dict[str, Any] = {
            "name": record.name,
            "seed": record.seed,
            "spec": record.settings,
            "time_seconds": record.time_seconds,
            "sessions": [],
        }
        for session in record.sessions:
            facts = {k: v for k, v in without_paths(session).items() if k != "started"}
            number = environments.setdefault(json.dumps(facts), len(environments))
            line["sessions"].append({"started": session.get("started"), "environment": number})
        if record.state == "failed":
            line["problem"] = record.reason
        else:
            line["metrics"] = record.metrics
            drawn = ("epoch", *curves.get(record.name, ()))
            line["curves"] = {key: [epoch.get(key) for epoch in record.history] for key in drawn if len(drawn) > 1}
            # What was measured is rounded. The spec is exact, because the run's name is its hash, and so are the
            # metrics, because ties between runs decide ranks.
            line["measured"] = map_leaves(_rounded, record.measured)
        kept = {key: finite(value) for key, value in line.items() if value not in ({}, [])}
        lines.append(json.dumps(kept, separators=(",", ":"), ensure_ascii=False) + "\n")
    text = ",\n".join(environments)
    write_atomic(results / ENVIRONMENTS_FILE, f"[\n{text}\n]\n")
    write_atomic(results / RUNS_FILE, "".join(lines))


def _record(line: dict[str, Any], environments: list[dict[str, Any]]) -> RunRecord:
    curves, metrics = line.get("curves", {}), line.get("metrics")
    experiment: Experiment = build(Experiment, line.get("spec", {}), "")
    if experiment.run_name(line["seed"]) != line["name"] and "\N{HORIZONTAL ELLIPSIS}" not in str(line.get("spec")):
        raise ValueError(f"the spec of {line['name']} belongs to another run")
    history = [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]
    return RunRecord(
        name=line["name"],
        state="failed" if metrics is None else "finished",
        reason=line.get("problem", ""),
        experiment=experiment,
        seed=line["seed"],
        history=[] if metrics is None else [*history[:-1], metrics],
        time_seconds=line["time_seconds"],
        measured=_with_nan(line.get("measured", {})),
        sessions=[{"started": s["started"]} | environments[s["environment"]] for s in line.get("sessions", [])],
    )


def without_paths(value: Any) -> Any:
    """Return JSON's objects or a text with every absolute path cut down to its last name.

    A page is published; where files are on somebody's machine is not part of an experiment.

    Example:
        >>> without_paths("cannot write /home/ada/runs/x.json: folder:/data/birds, timm/x")
        'cannot write …/x.json: folder:…/birds, timm/x'
    """
    return map_leaves(lambda leaf: _ABSOLUTE.sub(r"…/\1", leaf) if isinstance(leaf, str) else leaf, value)


def _rounded(leaf: Any) -> Any:
    return float(f"{leaf:.{DIGITS}g}") if isinstance(leaf, float) else leaf


def _with_nan(tree: Any) -> Any:
    """Return what was measured with NaN for each null in a list."""
    if isinstance(tree, dict):
        return {name: _with_nan(value) for name, value in tree.items()}
    return [math.nan if v is None else _with_nan(v) for v in tree] if isinstance(tree, list) else tree
