"""Contests as tables in the paper's shape, comparisons with the baseline, and verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from flatmin.lab.findings import Cell, Comparison, Findings, Held, Hyperparameter, Table, Verdict
from flatmin.lab.jobs import Outcome
from flatmin.lab.papers.claimed import Claims
from flatmin.lab.papers.item import Scale
from flatmin.lab.papers.protocol import Contest, Entry
from flatmin.lab.spec import Experiment
from flatmin.lab.statistics import holm, mean_and_interval, paired_p_value

SIGNIFICANCE = 0.05
Rows = list[list[str | Cell | Comparison]]
Literature = Mapping[str, Mapping[str, Cell]]
NOTE = (
    "Mean and 95 % confidence interval (Student's t) over replicas; what the paper claims beside it. A baseline's "
    "number is the better mean of the standard and the doubled number of epochs."
)
NOT_THE_SAME = (
    "The paper's numbers are for its own networks and all of the data, in the condition most like the one here: not to "
    "be reached at this scale. (Its SAM had m = 32.)"
)
METRIC_NAMES = {"test_error": "test error", "test_top5_error": "top-5 test error"}


def contest_findings(
    entries: Sequence[Entry],
    needed: Sequence[Outcome],
    *,
    item: str,
    scale: Scale,
    claims: Claims[Any],
    about_scale: str,
    label_columns: Sequence[str],
    layout: Literal["methods in columns", "methods in rows"] = "methods in columns",
    metrics: Sequence[str] = ("test_error",),
    accuracy: bool = False,
    literature: Literature | None = None,
    hyperparameters: Sequence[Hyperparameter] = (),
    notes: Sequence[str] = (),
) -> Findings:
    """Return what contests show.

    Args:
        entries: what came of each method in each contest; a contest's first method is its baseline.
        needed: all runs that were asked for.
        item: its name.
        scale: at which it was run.
        claims: the paper's numbers.
        about_scale: what differs from the paper's experiment.
        label_columns: what a contest's labels are.
        layout: the paper's.
        metrics: what is compared, in %.
        accuracy: whether the table has accuracies instead of errors.
        literature: what is only cited (methods in rows), by method and column.
        hyperparameters: those that were not chosen here.
        notes: beside the paper's slips.
    """
    tables = []
    verdicts: list[Verdict] = []
    for metric in metrics:
        cells = {(e.contest.name, e.method.name): _cell(e, metric, accuracy) for e in entries}
        if layout == "methods in columns":
            columns, rows = _methods_in_columns(entries, cells, label_columns)
        else:
            columns, rows = _methods_in_rows(entries, cells, literature or {})
        what = METRIC_NAMES[metric].replace("error", "accuracy") if accuracy else METRIC_NAMES[metric]
        where = claims.source.partition(",")[0]
        tables.append(
            Table(
                title=f"{where}: {what}, %" if scale == "paper" else f"{where} at {scale} scale: {what}, %",
                columns=columns,
                rows=rows,
                note=NOTE if scale == "paper" else f"{NOTE} {NOT_THE_SAME}",
            )
        )
        comparisons = _comparisons(entries, metric)
        if comparisons:
            tables.append(
                Table(
                    title=f"Against the baseline: {METRIC_NAMES[metric]}",
                    columns=("condition", "method", "difference, p, Holm's p"),
                    rows=[[c.name, entry.method.name, comparison] for (c, entry), comparison in comparisons],
                    note="Paired by seed, two-sided t-test; Holm's correction is for all lines of this table. "
                    "A negative difference is a lower error.",
                )
            )
        verdicts += [_verdict(entry, comparison, metric) for (_, entry), comparison in comparisons]
    if scale == "smoke":
        verdicts = [
            replace(v, held="not tested", evidence=f"A smoke test judges nothing. {v.evidence}") for v in verdicts
        ]
    chosen_table = _choices(entries)
    not_tested = [
        Verdict(claim=s.claim, held="not tested", evidence=f"{s.own_numbers} (the paper's own numbers)")
        for s in claims.statements
    ]
    done = [outcome for outcome in needed if outcome.complete]
    return Findings(
        item=item,
        scale=scale,
        title=claims.title,
        source=claims.source,
        about_scale=about_scale,
        tables=[*tables, *([chosen_table] if chosen_table else [])],
        verdicts=verdicts or not_tested,
        hyperparameters=[*_chosen_hyperparameters(entries), *hyperparameters],
        notes=[*claims.notes, *notes],
        runs=list(dict.fromkeys(outcome.job.name for outcome in done)),
        num_missing=len({outcome.job.name for outcome in needed if not outcome.complete})
        + sum(entry.chosen is None for entry in entries),
    )


def _cell(entry: Entry, metric: str, accuracy: bool) -> Cell:
    claimed = entry.contest.claimed.get((entry.method.name, metric))
    by_seed = entry.values(metric)
    values = tuple(100 - v if accuracy else v for _, v in sorted(by_seed.items()))
    counted = [o for o in entry.counted(metric) if o.job.seed in by_seed]
    return Cell(
        claimed=claimed.printed() if claimed is not None else None,
        measured=mean_and_interval(values) if values else None,
        values=values,
        runs=tuple(o.job.name for o in sorted(counted, key=lambda o: o.job.seed)),
        note=entry.note if values else None,
    )


def _methods_in_columns(
    entries: Sequence[Entry], cells: dict[tuple[str, str], Cell], label_columns: Sequence[str]
) -> tuple[list[str], Rows]:
    shown = _shown_contests(entries, cells)
    methods = list(dict.fromkeys(e.method.name for e in entries))
    columns = list(dict.fromkeys(c.column for c in shown))
    header = [*label_columns, *(f"{column}: {method}" for column in columns for method in methods)]
    rows: Rows = []
    for labels in dict.fromkeys(c.labels for c in shown):
        row: list[str | Cell | Comparison] = [*labels]
        by_column = {c.column: c for c in shown if c.labels == labels}
        for column in columns:
            contest = by_column.get(column)
            row += [cells.get((contest.name, m), Cell()) if contest is not None else Cell() for m in methods]
        rows.append(row)
    return header, rows


def _methods_in_rows(
    entries: Sequence[Entry], cells: dict[tuple[str, str], Cell], literature: Literature
) -> tuple[list[str], Rows]:
    contests = _shown_contests(entries, cells)
    methods = list(dict.fromkeys(e.method.name for e in entries))
    cited: Rows = [[method, *(by.get(c.column, Cell()) for c in contests)] for method, by in literature.items()]
    rows: Rows = [[method, *(cells.get((c.name, method), Cell()) for c in contests)] for method in methods]
    return ["method", *(c.column for c in contests)], [*cited, *rows]


def _shown_contests(entries: Sequence[Entry], cells: dict[tuple[str, str], Cell]) -> list[Contest]:
    """Return the contests with anything measured, or all of them where there is nothing at all."""
    contests = {e.contest.name: e.contest for e in entries}
    measured = {name for (name, _), cell in cells.items() if cell.measured is not None}
    return [c for name, c in contests.items() if name in measured or not measured]


def _comparisons(entries: Sequence[Entry], metric: str) -> list[tuple[tuple[Contest, Entry], Comparison]]:
    found = []
    for entry in entries:
        first = next(e for e in entries if e.contest.name == entry.contest.name)
        base, own = first.values(metric), entry.values(metric)
        seeds = sorted(base.keys() & own.keys())
        if entry is first or len(seeds) < 2:
            continue
        differences = tuple(own[s] - base[s] for s in seeds)
        runs = [o.job.name for e in (first, entry) for o in e.counted(metric) if o.job.seed in seeds]
        found.append(
            (
                (entry.contest, entry),
                Comparison(
                    name=f"{entry.method.name} - {first.method.name}",
                    difference=mean_and_interval(differences),
                    p_value=paired_p_value([own[s] for s in seeds], [base[s] for s in seeds]),
                    p_holm=math.nan,
                    num_pairs=len(seeds),
                    values=differences,
                    runs=tuple(runs),
                ),
            )
        )
    corrected = holm([comparison.p_value for _, comparison in found])
    return [(key, replace(c, p_holm=p)) for (key, c), p in zip(found, corrected, strict=True)]


def _verdict(entry: Entry, comparison: Comparison, metric: str) -> Verdict:
    return Verdict(
        claim=f"{entry.contest.name}: {entry.method.name} has a lower {METRIC_NAMES[metric]} than "
        f"{comparison.name.rpartition(' - ')[2]}.",
        held=held_if_negative(comparison),
        evidence=f"{comparison.difference.mean:+.2f} ± {comparison.difference.half_width:.2f} points over "
        f"{comparison.num_pairs} pairs, p = {comparison.p_value:.2g}, {comparison.p_holm:.2g} after Holm's correction.",
    )


def held_if_negative(comparison: Comparison) -> Held:
    """Say whether a difference is below 0, as far as the runs can show."""
    if not comparison.p_holm < SIGNIFICANCE:
        return "no difference shown"
    return "held" if comparison.difference.mean < 0 else "did not hold"


def _choices(entries: Sequence[Entry]) -> Table | None:
    rows: Rows = [
        [entry.contest.name, entry.method.name, setting_of(e), _error(error), "chosen" if e is entry.chosen else ""]
        for entry in entries
        for e, error in entry.tried
        if any(known is not None for _, known in entry.tried)
    ]
    if not rows:
        return None
    return Table(
        title="What was chosen on the validation split",
        columns=("condition", "method", "setting", "validation error, %", ""),
        rows=rows,
        note="One run each, with a seed that none of the replicas has; the test set had no part in it.",
    )


def setting_of(experiment: Experiment) -> str:
    """Return what methods choose, in brief."""
    optim = experiment.optim
    parts = [f"lr {optim.lr:g}", f"decay {optim.weight_decay:g}"]
    parts += [f"rho {optim.rho:g}"] if optim.rho else []
    parts += [f"m {optim.m}"] if optim.m is not None else []
    parts += [f"mixup {experiment.data.mixup:g}"] if experiment.data.mixup else []
    return ", ".join(parts)


def _error(value: float | None) -> str:
    if value is None:
        return "not run"
    return f"{value:.2f}" if math.isfinite(value) else "diverged"


def _chosen_hyperparameters(entries: Sequence[Entry]) -> list[Hyperparameter]:
    return [
        Hyperparameter(
            name=f"{entry.contest.name}, {entry.method.name}",
            value=setting_of(entry.chosen),
            source="validation",
            note=f"the best of {len(entry.tried)}",
        )
        for entry in entries
        if entry.chosen is not None and entry.tried
    ]
