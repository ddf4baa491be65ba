"""Conditions as tables in the paper's shape, comparisons with the baseline, and verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flatmin.lab.runs.record import RunRecord
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.conditions import Condition, MethodResult, better, unit_of, validation_error
from flatmin.lab.studies.contrasts import Contrast, Family, gate_text
from flatmin.lab.studies.findings import Cell, Hyperparameter, Row, Table, Verdict, own_settings
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.statistics import mean_and_interval, p_text
from flatmin.lab.studies.study import Scale

Literature = Mapping[str, Mapping[str, Cell]]
NOTE = "Mean and 95 % confidence interval (Student's t) over replicas; the paper's numbers next to it."
NOT_THE_SAME = (
    "The paper's numbers are for its own models and all of the data, in the condition most like the one here: not to "
    "be reached at this scale. (Its SGD and SAM had m = 32, an eighth of a batch.)"
)
TRAINING_NOTE = "Over the last epoch, at the weights of each step, with what was trained on: noisy labels included."
METRIC_NAMES = {"test_error": "test error", "test_top5_error": "top-5 test error", "train_error": "training error"}
METRIC_NAMES |= {"test_loss": "test loss", "test_ece": "calibration error"}
OUR_METRICS = ("test_loss", "test_ece")
"""What the paper does not report: claims on it are ours."""


@dataclass(frozen=True)
class _Compared:
    """A method that is compared with the best of its rivals in a metric."""

    entry: MethodResult
    rivals: Sequence[MethodResult]
    metric: str
    contrast: Contrast

    @property
    def is_ours(self) -> bool:
        return self.metric in OUR_METRICS or any(e.method.ours for e in (self.entry, *self.rivals))

    @property
    def planned(self) -> str:
        rivals = " or ".join(e.method.name for e in self.rivals)
        said = f"{METRIC_NAMES[self.metric]}: {self.entry.method.name} vs. {rivals}"
        return f"{self.entry.condition.name}: {said}{' (ours)' if self.is_ours else ''}"

    def claim(self, rival: str) -> str:
        entry = self.entry
        return f"{entry.condition.name}: {entry.method.name} has a lower {METRIC_NAMES[self.metric]} than {rival}."

    def verdict(self, family: Family) -> Verdict:
        contrast = self.contrast
        if contrast.untestable:
            return family.judge(f"{self.claim(contrast.higher_name)}{' (ours)' if self.is_ours else ''}", [contrast])
        comparison, correction = contrast.comparison(family.p_holm(contrast)), family.correction([contrast])
        difference, points = comparison.difference, "points" if unit_of(self.metric) else "nats"
        size = f"{difference.mean:+.2f} ± {difference.half_width:.2f} {points} over {comparison.num_pairs} pairs"
        said = f" ({correction})" if correction else ""
        return Verdict(
            claim=f"{self.claim(contrast.higher_name)}{' (ours)' if self.is_ours else ''}",
            status=family.status(contrast),
            evidence=f"{gate_text(contrast.gate)}{size}, {p_text(comparison.p_holm)}{said}.",
            comparisons=[comparison],
        )


def condition_tables(
    entries: Sequence[MethodResult],
    claims: Claims,
    scale: Scale,
    *,
    label_columns: Sequence[str],
    layout: Literal["methods in columns", "methods in rows"] = "methods in columns",
    metrics: Sequence[str] = ("test_error",),
    accuracy: bool = False,
    literature: Literature | None = None,
    hyperparameters: Sequence[Hyperparameter] = (),
    further: Sequence[tuple[str, Sequence[Contrast]]] = (),
) -> dict[str, Any]:
    """Return what conditions show: the tables, verdicts and hyperparameters of `Findings`.

    A condition's first method is its baseline. ``literature`` is only cited, by method and column; ``further`` are
    claims on several conditions with the comparisons that each consists of. Without ``hyperparameters``, what the
    methods have in common is listed as ours.
    """
    tables = []
    verdicts: list[Verdict] = []
    compared = [c for metric in metrics for c in _compared(entries, metric)]
    families = {ours: Family(c.contrast for c in compared if c.is_ours == ours) for ours in (False, True)}
    families[False] = Family([*families[False].contrasts, *(contrast for _, group in further for contrast in group)])
    where = claims.source.partition(",")[0] + ("" if scale == "paper" else f" at {scale} scale")
    claimed = any(e.condition.claimed for e in entries)
    note = f"{NOTE} {NOT_THE_SAME}" if claimed and scale != "paper" else NOTE
    for metric in (*metrics, "train_error"):
        as_accuracy = accuracy and metric not in OUR_METRICS
        cells = {(e.condition.name, e.method.name): e.cell(metric, accuracy=as_accuracy) for e in entries}
        if layout == "methods in columns":
            columns, rows = _methods_in_columns(entries, cells, label_columns)
        else:
            columns, rows = _methods_in_rows(entries, cells, (literature or {}) if metric == metrics[0] else {})
        what = METRIC_NAMES[metric].replace("error", "accuracy") if as_accuracy else METRIC_NAMES[metric]
        shown = note if metric in metrics else TRAINING_NOTE
        tables.append(Table(title=f"{where}: {what}", columns=columns, rows=rows, note=shown))
        own = [c for c in compared if c.metric == metric]
        for ours, family in families.items():
            there = [c for c in own if not c.contrast.waits and c.is_ours == ours]
            if there:
                tables.append(
                    Table(
                        title=f"Comparisons: {METRIC_NAMES[metric]}{' (ours)' if ours else ''}",
                        columns=("condition", "difference, p, Holm's p"),
                        rows=[[c.entry.condition.name, family.comparison(c.contrast)] for c in there],
                        note=f"Paired by seed, two-sided t-test; Holm's correction is for all {len(family.contrasts)} "
                        "comparisons that are planned. A negative difference is a lower error.",
                    )
                )
        verdicts += [c.verdict(families[c.is_ours]) for c in own if not c.contrast.waits]
        verdicts += _open_questions(entries, [c for c in own if c.contrast.waits and not c.is_ours], metric)
    verdicts += [families[False].judge(claim, contrasts) for claim, contrasts in further]
    trained = [e.chosen for e in entries if e.chosen is not None] or [e.condition.start for e in entries]
    return {
        "tables": tables + choices(entries),
        "verdicts": verdicts,
        "planned": [
            *(c.planned for c in compared),
            *(name for _, contrasts in further for name in Family(contrasts).names),
        ],
        "hyperparameters": [*_chosen_hyperparameters(entries), *(hyperparameters or own_settings(trained))],
    }


def _methods_in_columns(
    entries: Sequence[MethodResult], cells: dict[tuple[str, str], Cell], label_columns: Sequence[str]
) -> tuple[list[str], list[Row]]:
    shown = {(c.labels, c.column): c.name for c in _shown_conditions(entries, cells)}
    columns, methods = (dict.fromkeys(names) for names in ((c for _, c in shown), (e.method.name for e in entries)))
    present = {(e.condition.column, e.method.name) for e in entries if e.condition.name in shown.values()}
    pairs = [(column, method) for column in columns for method in methods if (column, method) in present]
    rows: list[Row] = [
        [*labels, *(cells.get((shown.get((labels, column), ""), method), Cell()) for column, method in pairs)]
        for labels in dict.fromkeys(labels for labels, _ in shown)
    ]
    return [*label_columns, *(f"{column}: {method}" for column, method in pairs)], rows


def _methods_in_rows(
    entries: Sequence[MethodResult], cells: dict[tuple[str, str], Cell], literature: Literature
) -> tuple[list[str], list[Row]]:
    conditions = _shown_conditions(entries, cells)
    methods = list(dict.fromkeys(e.method.name for e in entries))
    cited: list[Row] = [[method, *(by.get(c.column, Cell()) for c in conditions)] for method, by in literature.items()]
    rows: list[Row] = [[method, *(cells.get((c.name, method), Cell()) for c in conditions)] for method in methods]
    return ["method", *(c.column for c in conditions)], [*cited, *rows]


def _shown_conditions(entries: Sequence[MethodResult], cells: dict[tuple[str, str], Cell]) -> list[Condition]:
    """Return the conditions with anything measured, or all of them where there is nothing at all."""
    conditions = {e.condition.name: e.condition for e in entries}
    measured = {name for (name, _), cell in cells.items() if cell.measured is not None}
    return [c for name, c in conditions.items() if name in measured or not measured]


def _compared(entries: Sequence[MethodResult], metric: str) -> list[_Compared]:
    """Contrast each method with each group of rivals; with no pairs until all replicas of all of them exist."""
    by_name = {(e.condition.name, e.method.name): e for e in entries}
    compared = []
    for entry, names in ((e, names) for e in entries for names in e.method.against):
        rivals = [by_name[entry.condition.name, name] for name in names]
        missing = any(e.incomplete_reason for e in (entry, *rivals))
        rival = rivals[0] if missing else better(rivals, metric)
        contrast = entry.lower_than(rival, METRIC_NAMES[metric], metric)
        if missing:
            contrast = replace(contrast, lower={}, higher={})
        elif without := [e.method.name for e in (entry, rival) if len(e.values(metric)) < len(e.replicas.records)]:
            why = f"not every replica of {' and '.join(without)} has a finite {METRIC_NAMES[metric]}"
            contrast = replace(contrast, lower={}, higher={}, untestable=why)
        else:
            contrast = contrast.gated((rival.unfit_note, rival.gate_note, entry.gate_note))
        compared.append(_Compared(entry, rivals, metric, contrast))
    return compared


def _open_questions(entries: Sequence[MethodResult], waiting: Sequence[_Compared], metric: str) -> list[Verdict]:
    """Return a verdict for each comparison that waits for runs, in conditions that have begun."""
    begun = {e.condition.name for e in entries if e.values(metric)}
    verdicts = []
    for c in waiting:
        missing = [e.incomplete_reason for e in (c.entry, *c.rivals) if e.incomplete_reason is not None]
        if missing and (c.entry.condition.name in begun or not begun):
            claim, evidence = c.claim(c.rivals[0].method.name), f"Not yet: {'; '.join(missing)}."
            verdicts.append(Verdict(claim=claim, status="not tested", evidence=evidence))
    return verdicts


def choices(entries: Sequence[MethodResult]) -> list[Table]:
    """Return all candidates with their validation errors, in one table; nothing where none has run."""
    rows: list[Row] = [
        [
            *(entry.condition.name, entry.method.name, setting_of(e), _rho(record), _error(record)),
            "chosen" if e is entry.chosen else "",
        ]
        for entry in entries
        for e, record in entry.tried
        if any(validation_error(known) is not None for _, known in entry.tried)
    ]
    table = Table(
        title="What was chosen on the validation split",
        columns=("condition", "method", "setting", "rho", "validation error", ""),
        folded=True,
        rows=rows,
        note="One run each, with a seed that none of the replicas has; the test set was not used.",
    )
    return [table] if rows else []


def setting_of(experiment: Experiment) -> str:
    """Return what methods choose, in brief."""
    optim = experiment.optim
    parts = [f"lr {optim.lr:g}", f"decay {optim.weight_decay:g}"]
    parts += [f"rho {optim.rho_text}"] if optim.uses_sam else []
    parts += [f"m {optim.m}"] if optim.m is not None else []
    parts += [f"mixup {experiment.data.mixup:g}"] if experiment.data.mixup else []
    return ", ".join(parts)


def _rho(record: RunRecord) -> str:
    """Return the radius itself where the setting is a factor of the suggestion."""
    rho = record.metrics.get("rho")
    return "" if rho is None else f"{rho:.3g}"


def _error(record: RunRecord) -> str | Cell:
    error = validation_error(record)
    if error is None:
        return "not run"
    if not math.isfinite(error):
        return "diverged"
    return Cell(measured=mean_and_interval([error]), values=(error,), runs=(record.name,))


def _chosen_hyperparameters(entries: Sequence[MethodResult]) -> list[Hyperparameter]:
    return [
        Hyperparameter(
            name=f"{entry.condition.name}, {entry.method.name}",
            value=setting_of(entry.chosen),
            source="validation",
            note=f"the best of {len(entry.tried)}",
        )
        for entry in entries
        if entry.chosen is not None and entry.tried
    ]
