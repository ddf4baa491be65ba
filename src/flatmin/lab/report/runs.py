"""Runs as a report shows them: which ones findings name, where each ran, and a directory of runs as findings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

from flatmin.lab.report.tables import NOTHING, TIMES, plural, setting_text
from flatmin.lab.runs.environment import PACKAGES
from flatmin.lab.runs.record import Records, RunRecord, without_paths
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.spec.fields import plain
from flatmin.lab.studies.findings import Cell, Findings, LineFigure, Table
from flatmin.lab.studies.replicas import Replicas, metric, series_over

ERRORS = {"train_error": "train error", "valid_error": "validation error", "test_error": "test error"}


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
    yield from (run for table in findings.tables for e in table.entries if not isinstance(e, str) for run in e.runs)
    yield from (run for figure in findings.figures for run in figure.runs)
    yield from (run for verdict in findings.verdicts for c in verdict.comparisons for run in c.runs)


def num_missing(findings: Findings, records: dict[str, RunRecord]) -> int:
    """Return how many runs are missing: those the study counted, or those it names that have no result, if more."""
    missing = {name for name in named_runs(findings) if not records[name].is_complete}
    return max(findings.num_missing, len(missing))


MOST_CURVES = 10
"""A figure with more curves could not be read."""


@dataclass(frozen=True)
class _Group:
    """Replicas of one experiment."""

    experiment: Experiment
    records: list[RunRecord]

    @property
    def name(self) -> str:
        return self.experiment.name or f"{without_paths(self.experiment.data.name)}, {self.experiment.model.name}"

    @property
    def settings(self) -> dict[str, Any]:
        return dict(_flat(without_paths(plain(self.experiment))))

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.name, [record for record in self.records if record.state == "finished"])


def describe_runs(known: Records) -> Findings:
    """Return runs by experiment: mean, 95 % confidence interval and number of seeds of each error.

    Unfinished runs count as missing.
    """
    records = list(known.values())
    groups = _by_experiment(records)
    varied = _varied_settings(groups)
    groups.sort(key=lambda group: (group.name, [_order(group.settings[name]) for name in varied]))
    errors = {name: title for name, title in ERRORS.items() if any(metric(name)(r) is not None for r in records)}
    rows: list[list[str | Cell]] = [
        [group.name, *_values(group, varied), *(_cell(group, name) for name in errors)] for group in groups
    ]
    header = ["experiment", *_short(varied), *errors.values()]
    return Findings(
        item="runs",
        scale="as run",
        title=f"{plural(len(groups), 'experiment')}",
        source="Runs of one directory",
        about_scale=f"{plural(len(records), 'run')}, grouped by experiment. Nothing is tested here: the settings are "
        "those in the list of runs.",
        tables=[Table(title="Errors after the last epoch", columns=header, rows=rows)] if rows else [],
        figures=_curves(groups, varied),
        notes=[
            f"{record.name} cannot be read: {record.reason}" for record in records if record.state == "not readable"
        ],
        runs=list(known),
        num_missing=sum(not record.is_complete for record in records),
    )


def _by_experiment(records: Sequence[RunRecord]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for record in sorted(records, key=lambda record: (record.seed or 0, record.name)):
        if record.experiment is not None:
            groups.setdefault(record.experiment.run_hash(), _Group(record.experiment, [])).records.append(record)
    return list(groups.values())


def _varied_settings(groups: Sequence[_Group]) -> list[str]:
    """Return the settings in which experiments differ, and always the epochs; labels do not change a run."""
    settings = [group.settings for group in groups]
    names = [name for name in settings[0] if name != "name"] if settings else []
    apart = [name for name in names if name == "epochs" or len({repr(own[name]) for own in settings}) > 1]
    # How often it was evaluated goes along with the epochs, and is a column only where nothing else tells two apart.
    fewer = [name for name in apart if name != "evaluate_every"]
    told_apart = {tuple(repr(own[name]) for name in fewer) for own in settings}
    return fewer if len(told_apart) == len(groups) else apart


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _short(varied: Sequence[str]) -> list[str]:
    """Return each setting in one word where that is enough to tell it from the others: rho of optim.rho."""
    last = [name.removesuffix(".name").rpartition(".")[2] for name in varied]
    return [word if last.count(word) == 1 else name for name, word in zip(varied, last, strict=True)]


def _values(group: _Group, varied: Sequence[str]) -> list[str]:
    return [NOTHING if (value := group.settings[name]) is None else setting_text(value) for name in varied]


def _cell(group: _Group, error: str) -> Cell:
    counts = {state: sum(record.state == state for record in group.records) for state in ("failed", "not finished")}
    note = "; ".join(f"{count} of {len(group.records)} {state}" for state, count in counts.items() if count) or None
    return group.replicas.cell(error, note=note)


def _curves(groups: Sequence[_Group], varied: Sequence[str]) -> list[LineFigure]:
    one_name = len({group.name for group in groups}) == 1
    series = []
    used: list[str] = []
    for group in groups:
        replicas = group.replicas
        by_epoch = replicas.by_epoch(methodcaller("get", "test_error"))
        errors = {epoch: values for epoch, values in by_epoch.items() if len(values) == len(replicas.records)}
        if len(errors) < 2:  # evaluated at the end only
            continue
        settings = zip(_short(varied), _values(group, varied), strict=True)
        differs = ", ".join(f"{name} {value}" for name, value in settings if value != NOTHING)
        curve = series_over(differs if one_name else f"{group.name}; {differs}", errors)
        series.append(curve if len(replicas.records) > 1 else replace(curve, half_width=None))
        used += replicas.runs
    figure = LineFigure(
        title="Test error over training",
        x_label="epoch",
        y_label="test error, %",
        series=series,
        note="Mean over seeds and its 95 % confidence interval.",
        runs=used,
    )
    return [figure] if 0 < len(series) <= MOST_CURVES else []
