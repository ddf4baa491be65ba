"""Runs as a report shows them: which ones findings name, and where and with what each of them ran."""

from collections.abc import Iterator
from typing import Any

from flatmin.lab.report.numbers import NOTHING, TIMES
from flatmin.lab.runs.environment import PACKAGES
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.studies.findings import Cell, Comparison, Findings

ERRORS = {"train_error": "train error", "valid_error": "validation error", "test_error": "test error"}


def error_of(record: RunRecord, metric: str) -> float | None:
    """Return an error after the last epoch in %, or None where it was not measured."""
    value = record.metrics.get(metric)
    return None if value is None else 100 * float(value)


def environment_of(record: RunRecord) -> list[str]:
    """Return hardware, cores and threads, precision, version of torch and commit of the last session."""
    session: dict[str, Any] = record.sessions[-1] if record.sessions else {}
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
    missing = {name for name in named_runs(findings) if not records[name].is_complete}
    return max(findings.num_missing, len(missing))
