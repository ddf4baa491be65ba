"""What a report says, as text and numbers: one set of data for the page and for its Markdown twin."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from flatmin.lab.report.answer import answer
from flatmin.lab.report.figures import ForestFigure, inline_svg, standalone_svg, svg, x_text, y_text
from flatmin.lab.report.runs import ERRORS, environment_of, named_runs, num_missing, session_text
from flatmin.lab.report.tables import NOTHING, effect_text, number_text, plural, setting_text, shown_table
from flatmin.lab.runs.record import RunRecord
from flatmin.lab.studies.findings import Cell, Comparison, Findings, LineFigure, SurfaceFigure, Verdict
from flatmin.lab.studies.replicas import metric
from flatmin.lab.studies.statistics import SIGNIFICANT, Interval, p_text
from flatmin.lab.sweeps.progress import time_text

MOST_CHARACTERS = 60
"""Of a file's name: some file systems take no more than 143."""
CONDITION_LIMIT = 60.0
"""How far the axis of the first plot goes, in %: one diverged condition must not squeeze all others."""
LOGARITHM = "log10 of "  # how the name of a logarithm begins
MOST_POINTS = 150
"""A figure with more points is not repeated as a table: nobody would read it."""
RUN_COLUMNS = (
    *("run", "seed", "epochs", *(f"{name}, %" for name in ERRORS.values()), "time", "hardware"),
    *("cores / threads", "precision", "versions", "commit"),
)
HOW_TO_READ = (
    "A measured value is the mean over n replicas (same settings, different seeds) ± half of its 95 % confidence "
    "interval (Student's t). A single replica has no interval. The paper's numbers are quoted as printed.",
    "A comparison is the mean difference between runs with the same seed, with its 95 % interval, the p-value of the "
    "two-sided paired t-test, and that p-value after Holm's correction for all comparisons of the table (Holm, 1979), "
    f'bold if it is below {SIGNIFICANT:g}. "No test" means fewer than two pairs, or the same difference in every pair. '
    '"Inconclusive" does not mean that there is no difference.',
    "In the overview, an effect in % is the difference divided by the baseline's mean, which is taken as exact. The "
    "cost of a claim is the training time of the runs behind it; a run behind several claims counts for each of them.",
    "Every number comes from the files of a run.",
)


def report_content(findings: Sequence[Findings], records: dict[str, RunRecord], title: str) -> dict[str, Any]:
    """Return all that the templates show; records are of every run that the findings name, by name."""
    anchors = [f"item-{number}-{slug(one.item)}" for number, one in enumerate(findings, 1)]
    told = answer(findings, records)
    every_claim = _every_claim(findings)
    each_condition = _each_condition(told["effects"]) if len(findings) > 1 else None
    return {
        "title": title,
        "about": about_runs(findings, records),
        "alarm": alarm(findings, records),
        "answer": {**told, "forest": each_condition or every_claim},
        "overview": {
            "rows": _overview_rows(findings, anchors, records),
            "forest": every_claim if each_condition else None,
        },
        "items": [
            _item(number, one, anchor, records, len(findings) > 1)
            for number, (one, anchor) in enumerate(zip(findings, anchors, strict=True), 1)
        ],
        "run_columns": RUN_COLUMNS,
        "runs": [_run(record) for record in records.values()],
        "run_anchors": run_anchors(records),
        "total_time": time_text(sum(record.time_seconds for record in records.values())),
        "how_to_read": HOW_TO_READ,
    }


def about_runs(findings: Sequence[Findings], records: dict[str, RunRecord]) -> str:
    """Return what the report covers, in numbers."""
    states = Counter(record.state for record in records.values())
    total = sum(record.time_seconds for record in records.values())
    scales = ", ".join(dict.fromkeys(one.scale for one in findings if one.scale))
    items = f"{plural(len(findings), 'item')} at scale {scales}, from " if scales else ""
    text = f"{items}{plural(states['finished'], 'finished run')}"
    if total:
        text += f" ({time_text(total)} of training)"
    entries = [entry for one in findings for table in one.tables for entry in table.entries]
    if any(isinstance(entry, Cell) and entry.claimed is not None for entry in entries):
        text += ". The paper's numbers are next to the measured ones"
    return f"{text}."


def alarm(findings: Sequence[Findings], records: dict[str, RunRecord]) -> list[str]:
    """Return what is missing in the whole report: a headline and a line for each item, or nothing."""
    missing = {one.title: " ".join(lines) for one in findings if (lines := item_alarm(one, records))}
    lines = [f"{title}: {text}" for title, text in missing.items()] if len(findings) > 1 else list(missing.values())
    if not lines:
        return []
    if any(num_missing(one, records) for one in findings):
        return ["Runs are missing: this report is incomplete.", *lines]
    return ["Some runs failed.", *lines]


def item_alarm(findings: Findings, records: dict[str, RunRecord]) -> list[str]:
    """Return what is missing in one item: runs that do not exist yet, and runs that failed."""
    lines = []
    missing = num_missing(findings, records)
    if missing:
        lines.append(missing_text(missing, " of this item"))
    failed = sum(records[name].state == "failed" for name in set(named_runs(findings)))
    if failed:
        lines.append(f"{plural(failed, 'run')} failed; the list of runs says why.")
    return lines


def missing_text(count: int, of_what: str = "") -> str:
    """Return that runs are missing."""
    return f"{plural(count, 'run')}{of_what} {'is' if count == 1 else 'are'} missing."


def slug(text: str) -> str:
    """Return a text as a part of a file's name or an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MOST_CHARACTERS].strip("-") or "item"


def run_anchors(names: Iterable[str]) -> dict[str, str]:
    """Return the anchor of each run's row: equal for equal names on every page, different for different ones."""
    anchors: dict[str, str] = {}
    for name in dict.fromkeys(names):
        plain = anchor = "run-" + re.sub(r"[^A-Za-z0-9._-]", "_", name)
        number = 2
        while anchor in anchors.values():
            anchor, number = f"{plain}-{number}", number + 1
        anchors[name] = anchor
    return anchors


def _overview_rows(
    findings: Sequence[Findings], anchors: Sequence[str], records: dict[str, RunRecord]
) -> list[dict[str, Any]]:
    """Return all claims at once, as rows of a table; their numbers are on the plot of every claim too."""
    claims = [(one, anchor, verdict) for one, anchor in zip(findings, anchors, strict=True) for verdict in one.verdicts]
    return [
        {
            "number": number,
            "item": one.item,
            "anchor": anchor,
            "claim": verdict.claim,
            "status": verdict.status,
            "effects": [_effect(comparison) for comparison in verdict.comparisons],
            "cost": time_text(cost) if (cost := _cost(one, verdict, records)) else NOTHING,
        }
        for number, (one, anchor, verdict) in enumerate(claims, 1)
    ]


def _each_condition(effects: Sequence[tuple[str, Verdict]]) -> dict[str, Any] | None:
    """Return the plot of one SAM and its rivals in each condition; None without effects."""
    rows = [
        (label, verdict.status, effect)
        for label, verdict in effects
        if (effect := relative_effect(verdict.comparisons[0])) is not None
    ]
    note = "Left of 0: SAM's test error is lower. Where a number stands, the difference is off the axis."
    figure = ForestFigure("SAM and its rivals in each condition", [("", rows)], limit=CONDITION_LIMIT)
    return _forest(figure, note, "figures/answer.svg") if rows else None


def _every_claim(findings: Sequence[Findings]) -> dict[str, Any] | None:
    """Return the plot of every claim that has a comparison; None if none has."""
    claims = [(one, verdict) for one in findings for verdict in one.verdicts]
    groups = _forest_groups(claims, len(findings) > 1)
    note = (
        "Left of 0: lower than the baseline, as claimed. A difference is significant if its p-value (in the table) is "
        f"below {SIGNIFICANT:g} after Holm's correction."
    )
    effects = [[relative_effect(comparison) for comparison in verdict.comparisons] for _, verdict in claims]
    if not all(of_claim and None not in of_claim for of_claim in effects):
        note += " Claims without such a comparison are in the table only."
    figure = ForestFigure("Effect of each claim, with its 95 % interval", groups)
    return _forest(figure, note, "figures/overview.svg") if groups else None


def _forest(figure: ForestFigure, note: str, file: str) -> dict[str, Any]:
    return {"title": figure.title, "note": note, "picture": _pictures(figure, file)}


def _forest_groups(claims: Sequence[tuple[Findings, Verdict]], several_items: bool) -> list[tuple[str, list[Any]]]:
    """Return the rows of the forest plot under their item, and under conditions if rows of the item share one."""
    rows = [
        (one, verdict, comparison, effect, f"{number}. ")
        for number, (one, verdict) in enumerate(claims, 1)
        for comparison in verdict.comparisons
        if (effect := relative_effect(comparison)) is not None
    ]
    conditions = Counter((one.item, condition_of(verdict)) for one, verdict, *_ in rows)
    shared = {item for (item, condition), count in conditions.items() if condition and count > 1}
    groups: dict[str, list[Any]] = {}
    for one, verdict, comparison, effect, number in rows:
        condition = condition_of(verdict)
        in_heading = condition if one.item in shared else ""
        heading = ": ".join(filter(None, (one.place if several_items else "", in_heading)))
        where = f"{condition}: " if condition and not in_heading else ""
        label = number + where + short_claim(comparison, condition)
        groups.setdefault(heading, []).append((label, verdict.status, effect))
    return list(groups.items())


def condition_of(verdict: Verdict) -> str:
    """Return the condition that a claim begins with, or nothing."""
    condition, colon, _ = verdict.claim.partition(": ")
    return condition if colon and len(condition) < MOST_CHARACTERS else ""


def short_claim(comparison: Comparison, condition: str = "") -> str:
    """Return what a plot calls a comparison: both methods, and what is compared unless it is the test error.

    Example:
        >>> compared = Comparison(name="SAM - SGD", quantity="validation error, 40 % noise, %", p_value=0.01,
        ...                       difference=Interval(-1.0, 0.5), p_holm=0.01, num_pairs=5)
        >>> short_claim(compared, condition="40 % noise")
        'SAM vs. SGD (validation error)'
    """
    quantity = comparison.quantity.removesuffix(", %").removeprefix(LOGARITHM)
    if condition and quantity.lower().endswith(condition.lower()):
        quantity = quantity[: -len(condition)].rstrip(", ")
    what = "" if quantity == "test error" else f" ({quantity})"
    return f"{comparison.name.replace(' - ', ' vs. ')}{what}"


def relative_effect(comparison: Comparison) -> Interval | None:
    """Return a difference in % of the baseline's mean, or None without a baseline.

    A difference of logarithms is a ratio; its interval is then to first order.

    Example:
        >>> tenth = Comparison(name="SAM - SGD", quantity="log10 of lambda_max", difference=Interval(-1.0, 0.1),
        ...                    baseline=0.5, p_value=0.01, p_holm=0.01, num_pairs=5)
        >>> round(relative_effect(tenth).mean, 6), round(relative_effect(tenth).half_width, 6)
        (-90.0, 2.302585)
    """
    difference, baseline = comparison.difference, comparison.baseline
    if not math.isfinite(baseline) or baseline == 0:
        return None
    if comparison.quantity.startswith(LOGARITHM):
        ratio = 10**difference.mean
        return Interval(100 * (ratio - 1), 100 * ratio * math.log(10) * difference.half_width)
    return Interval(100 / abs(baseline) * difference.mean, 100 / abs(baseline) * difference.half_width)


def _effect(comparison: Comparison) -> dict[str, Any]:
    relative = relative_effect(comparison)
    return {
        "text": effect_text(comparison),
        "quantity": comparison.quantity,
        "name": comparison.name,
        "relative": "" if relative is None else f"{relative.mean:+.0f} %".replace("-", "\N{MINUS SIGN}"),
        "n": comparison.num_pairs,
        "p": p_text(comparison.p_holm),
    }


def _cost(findings: Findings, verdict: Verdict, records: dict[str, RunRecord]) -> float:
    runs = {run for comparison in verdict.comparisons for run in comparison.runs}
    if not runs and verdict.status != "not tested":  # a claim on all runs at once
        runs = set(findings.runs)
    return sum(records[run].time_seconds for run in runs)


def _item(
    number: int, findings: Findings, anchor: str, records: dict[str, RunRecord], repeat_alarm: bool
) -> dict[str, Any]:
    return {
        "anchor": anchor,
        "findings": findings,
        "alarm": " ".join(item_alarm(findings, records)) if repeat_alarm else "",
        "tables": [shown_table(table) for table in findings.tables],
        "figures": [_figure(f"{number}-{index}", findings.item, f) for index, f in enumerate(findings.figures, 1)],
        "hyperparameters": [(h.name, setting_text(h.value), h.source, h.note) for h in findings.hyperparameters],
    }


def _figure(number: str, item: str, figure: LineFigure | SurfaceFigure) -> dict[str, Any]:
    numbers = None
    if isinstance(figure, LineFigure) and sum(len(series.x) for series in figure.series) <= MOST_POINTS:
        named = any(series.hover for series in figure.series)
        rows = [
            (
                series.name,
                x_text(x),
                y_text(figure, series, index),
                *([series.hover[index] if series.hover else ""] if named else []),
            )
            for series in figure.series
            for index, x in enumerate(series.x)
        ]
        numbers = (("series", figure.x_label, figure.y_label, *(("point",) if named else ())), rows)
    file = f"figures/{number}-{slug(item)}-{slug(figure.title)}.svg"
    wide = isinstance(figure, SurfaceFigure)
    return {"figure": figure, "wide": wide, "numbers": numbers, "picture": _pictures(figure, file)}


def _pictures(figure: LineFigure | SurfaceFigure | ForestFigure, file: str) -> dict[str, str]:
    drawn = svg(figure)
    name = slug(file.removesuffix(".svg"))
    return {"file": file, "inline": inline_svg(drawn, figure.title, name), "content": standalone_svg(drawn)}


def _run(record: RunRecord) -> dict[str, Any]:
    done = record.state == "finished"
    return {
        "name": record.name,
        "state": record.state,
        "reason": record.reason,
        "sessions": [session_text(session) for session in record.sessions],
        "settings": json.dumps(record.settings, indent=1, ensure_ascii=False) if record.settings else "",
        "numbers": [
            NOTHING if record.seed is None else str(record.seed),
            NOTHING if record.experiment is None else str(record.experiment.epochs),
        ],
        "results": [
            *(number_text(metric(name)(record)) for name in ERRORS),
            time_text(record.time_seconds) if done else NOTHING,
        ],
        "environment": environment_of(record),
    }
