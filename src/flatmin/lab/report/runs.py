"""What the directories of runs say: results, failures, where and with what they ran.

A report must be possible even if some runs are incomplete, so nothing here raises over the content of a file.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatmin.lab.errors import RunError
from flatmin.lab.report.numbers import NOTHING, TIMES
from flatmin.lab.runs.directory import is_finished, read_problem, read_result, read_spec, run_seed
from flatmin.lab.runs.environment import PACKAGES, read_sessions
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.spec.fields import plain
from flatmin.lab.studies.findings import Cell, Comparison, Findings

State = Literal["finished", "failed", "not finished", "missing", "not readable"]
ERRORS = {"train_error": "train error", "valid_error": "validation error", "test_error": "test error"}
_WORD = r"""[^\s/\\'",;:()<>]+"""
_ABSOLUTE = re.compile(rf"""(?<![\w./\\])(?:[A-Za-z]:[\\/]|~?/)(?:{_WORD}[\\/])+({_WORD})""")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its files describe it."""

    name: str
    state: State
    reason: str = ""
    """Why it failed or cannot be read."""
    experiment: Experiment | None = None
    seed: int | None = None
    history: Sequence[dict[str, Any]] = ()
    time_seconds: float = 0.0
    sessions: Sequence[dict[str, Any]] = field(default=())

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.state in ("finished", "failed")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, without absolute paths."""
        spec = {} if self.experiment is None else plain(self.experiment, leave_defaults_out=True)
        shown: dict[str, Any] = without_paths({name: value for name, value in spec.items() if value != {}})
        return shown

    def error(self, metric: str) -> float | None:
        """Return an error after the last epoch in %, or None where it was not measured."""
        value = self.history[-1].get(metric) if self.history else None
        return None if value is None else 100 * float(value)

    @property
    def environment(self) -> list[str]:
        """Hardware, cores and threads, precision, version of torch and commit of the last session."""
        session: dict[str, Any] = self.sessions[-1] if self.sessions else {}
        gpus: list[str] = session.get("gpus") or []
        hardware = [f"{gpus.count(gpu)} {TIMES} {gpu}" for gpu in dict.fromkeys(gpus)]
        hardware += [str(session["cpu"])] if session.get("cpu") else []
        commit = str(session.get("commit") or "")
        facts = [
            ", ".join(hardware),
            f"{session.get('num_cores', NOTHING)} / {session.get('num_threads', NOTHING)}" if session else "",
            str(session.get("precision") or ""),  # the one that was used, "auto" resolved
            f"torch {session['torch']}" if session.get("torch") else "",
            commit[:10] + ("+" if commit.endswith("+") else ""),
        ]
        return [fact or NOTHING for fact in facts]


def session_text(session: dict[str, Any]) -> str:
    """Return where and with what a session of a run took place, in one line, without any path."""
    known = ("flatmin", "python", "torch", *PACKAGES)
    versions = ", ".join(f"{name} {session[name]}" for name in known if session.get(name))
    parts = [
        f"started {session['started']}" if session.get("started") else "",
        str(session.get("platform") or ""),
        f"{session['num_workers']} workers" if session.get("num_workers", 1) != 1 else "",
        f"commit {session['commit']}" if session.get("commit") else "",
        versions,
    ]
    return "; ".join(part for part in parts if part)


def read_run(name: str, runs: Path) -> RunRecord:
    """Return what the directory of a run says."""
    path = runs / name
    # A name is that of a directory in `runs`: anything else would read files elsewhere.
    if Path(name).name != name or name in ("", "..") or not path.is_dir():
        return RunRecord(name=name, state="missing")
    facts: dict[str, Any] = {"name": name, "seed": run_seed(path)}
    try:
        facts["experiment"] = read_spec(path) if (path / "spec.json").exists() else None
        facts["sessions"] = read_sessions(path)
        problem = read_problem(path)
        if is_finished(path):
            result = read_result(path)
            facts |= {"history": result.history, "time_seconds": result.time_seconds}
        if problem is not None:
            return RunRecord(**facts, state="failed", reason=without_paths(problem))
        return RunRecord(**facts, state="finished" if is_finished(path) else "not finished")
    except (OSError, RunError) as error:
        return RunRecord(**facts, state="not readable", reason=without_paths(str(error)))


def read_runs(findings: Sequence[Findings], runs: Path) -> dict[str, RunRecord]:
    """Return a record for every run that is named anywhere in the findings, in the order of their names."""
    names = {name for one in findings for name in named_runs(one)}
    return {name: read_run(name, runs) for name in sorted(names)}


def named_runs(findings: Findings) -> Iterator[str]:
    """Yield the name of every run in the findings, repeated as often as it is named."""
    yield from findings.runs
    for table in findings.tables:
        for row in table.rows:
            for entry in row:
                if isinstance(entry, Cell | Comparison):
                    yield from entry.runs
    for figure in findings.figures:
        yield from figure.runs
    for verdict in findings.verdicts:
        for comparison in verdict.comparisons:
            yield from comparison.runs


def num_missing(findings: Findings, records: dict[str, RunRecord]) -> int:
    """Return how many runs are missing: those the study counted, or those it names that have no result, if more."""
    missing = {name for name in named_runs(findings) if not records[name].complete}
    return max(findings.num_missing, len(missing))


def without_paths(value: Any) -> Any:
    """Return JSON's objects or a text with every absolute path cut down to its last name.

    A page is published; where files are on somebody's machine is not part of an experiment.

    Example:
        >>> without_paths("cannot write /home/ada/runs/x.json: folder:/data/birds, timm/x")
        'cannot write …/x.json: folder:…/birds, timm/x'
    """
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_paths(inner) for inner in value]
    if isinstance(value, str):
        return _ABSOLUTE.sub(r"…/\1", value)
    return value
