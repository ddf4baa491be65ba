"""What the directories of runs say of them: results, problems, where and with what they ran.

A report must also be possible where runs are half there, so nothing here raises over what a file holds.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatmin.lab.errors import SpecError
from flatmin.lab.report.numbers import NOTHING, TIMES
from flatmin.lab.runs.directory import PACKAGES
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.findings import Cell, Comparison, Findings
from flatmin.lab.sweeps.jobs import PROBLEM_FILE

State = Literal["finished", "came to nothing", "not finished", "not there", "not readable"]
ERRORS = ("train_error", "valid_error", "test_error")
_WORD = r"""[^\s/\\'",;:()<>]+"""
_ABSOLUTE = re.compile(rf"""(?<![\w./\\])(?:[A-Za-z]:[\\/]|~?/)(?:{_WORD}[\\/])+({_WORD})""")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its files tell it."""

    name: str
    state: State
    reason: str = ""
    """Why it came to nothing or cannot be read."""
    spec: dict[str, Any] = field(default_factory=dict)
    experiment: Experiment | None = None
    seed: int | None = None
    history: Sequence[dict[str, Any]] = ()
    time_seconds: float | None = None
    sessions: Sequence[dict[str, Any]] = ()

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.state in ("finished", "came to nothing")

    @property
    def epochs(self) -> int | None:
        """How many epochs it was to train."""
        return self.experiment.epochs if self.experiment is not None else None

    def error(self, metric: str) -> float | None:
        """Return an error after the last epoch in %, or None where it was not measured."""
        value = self.history[-1].get(metric) if self.history else None
        return None if value is None else 100 * float(value)

    @property
    def hardware(self) -> str:
        """The processors of its last session."""
        session = self._session
        gpus: list[str] = session.get("gpus") or []
        counted = [f"{gpus.count(gpu)} {TIMES} {gpu}" for gpu in dict.fromkeys(gpus)]
        return ", ".join([*counted, str(session["cpu"])]) if session.get("cpu") else ", ".join(counted) or NOTHING

    @property
    def cores_and_threads(self) -> str:
        """How many cores the machine had, and how many threads the run used."""
        session = self._session
        return f"{session.get('num_cores', NOTHING)} / {session.get('num_threads', NOTHING)}" if session else NOTHING

    @property
    def precision(self) -> str:
        """The precision that was really used, "auto" resolved."""
        return str(self._session.get("precision") or NOTHING)

    @property
    def versions(self) -> str:
        """The version of torch; `session_text` has the others."""
        return f"torch {self._session['torch']}" if self._session.get("torch") else NOTHING

    @property
    def commit(self) -> str:
        """The commit of flatmin in brief; with a + where files differed from it."""
        commit = self._session.get("commit")
        return commit[:10] + ("+" if commit.endswith("+") else "") if commit else NOTHING

    @property
    def _session(self) -> dict[str, Any]:
        return self.sessions[-1] if self.sessions else {}


def session_text(session: dict[str, Any]) -> str:
    """Return where and with what a session of a run took place, in one line, without any path."""
    known = ("flatmin", "python", *PACKAGES)
    versions = ", ".join(f"{name} {session[name]}" for name in known if session.get(name))
    parts = [
        f"begun {session['started']}" if session.get("started") else "",
        str(session.get("platform") or ""),
        f"{session['num_workers']} workers" if session.get("num_workers", 1) != 1 else "",
        f"commit {session['commit']}" if session.get("commit") else "",
        versions,
    ]
    return "; ".join(part for part in parts if part)


def read_run(name: str, runs: Path) -> RunRecord:
    """Return what a folder of runs knows of one of them."""
    path = runs / name
    # A name is that of a directory in the folder: anything else would read files elsewhere.
    if Path(name).name != name or name in ("", "..") or not path.is_dir():
        return RunRecord(name=name, state="not there")
    facts: dict[str, Any] = {"name": name, "seed": _seed(name)}
    try:
        text = _read(path / "spec.json")
        if text is not None:
            facts["spec"] = without_paths(json.loads(text))
            facts["experiment"] = Experiment.from_json(text)
        facts["sessions"] = (_json(path / "environment.json") or {}).get("sessions", ())
        problem, result = _json(path / PROBLEM_FILE), _json(path / "result.json")
        if result is not None:
            facts |= {name: result[name] for name in ("seed", "history", "time_seconds")}
        if problem is not None:
            return RunRecord(**facts, state="came to nothing", reason=without_paths(str(problem["problem"])))
        return RunRecord(**facts, state="not finished" if result is None else "finished")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError) as error:
        reason = without_paths(f"{type(error).__name__}: {error}")
        return RunRecord(name=name, seed=_seed(name), state="not readable", reason=reason)


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


def num_missing(findings: Findings, records: dict[str, RunRecord]) -> int:
    """Return how many runs are wanting: those the study counted, or those it names that have no result, if more."""
    wanting = {name for name in named_runs(findings) if not records[name].complete}
    return max(findings.num_missing, len(wanting))


def without_paths(value: Any) -> Any:
    """Return JSON's objects or a text with every absolute path cut down to its last name.

    A page is published; where files lay on somebody's machine is not part of an experiment.

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


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _json(path: Path) -> Any:
    text = _read(path)
    return None if text is None else json.loads(text)


def _seed(name: str) -> int | None:
    # A run that came to nothing has no result to say it.
    found = re.search(r"-seed(\d+)$", name)
    return int(found.group(1)) if found else None
