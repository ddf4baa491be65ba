"""SAM's gain over its cost: which ways to spend fewer passes keep it.

Not in the paper: a study of our own, by the same protocol, on conditions of its tables. Replicas are paired by seed,
and each arm that costs less than SAM is tested for keeping at least 90 % of SAM's gain (one-sided paired t-test, Holm's
correction over all arms of all conditions).

    flatmin reproduce cheap-sam --scale laptop      # 25 minutes of two cores beyond Tables 1, 4 and 5 and rho-rule
    flatmin reproduce cheap-sam --scale smoke       # a minute
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flatmin.lab.cheap_sam.arms import (
    ABOUT,
    BASE,
    CUT,
    EARLIER,
    KEPT,
    LOOKS,
    SAM,
    conditions,
    cost_in_passes,
    rules,
)
from flatmin.lab.foret2021 import protocol
from flatmin.lab.studies.condition_tables import setting_of
from flatmin.lab.studies.conditions import (
    MethodResult,
    at_best_epoch,
    by_condition,
    condition_results,
    conditions_item,
    replica_seeds,
)
from flatmin.lab.studies.contrasts import Family, OneSided
from flatmin.lab.studies.contrasts import mean as mean_of
from flatmin.lab.studies.findings import Cell, Findings, LineFigure, Row, Series, Table, Verdict, own_settings
from flatmin.lab.studies.replicas import runs_of
from flatmin.lab.studies.statistics import Interval, mean_and_interval
from flatmin.lab.studies.study import Known, Scale

TITLE, SOURCE = "SAM at nearly the cost of SGD", "Our own study, not in the paper"


class Point(NamedTuple):
    """A method in the plane of cost and error."""

    name: str
    cost: float
    error: Interval


def results_of(scale: Scale, known: Known) -> list[list[MethodResult]]:
    """Return what is known of all arms, condition by condition."""
    return by_condition(condition_results(conditions(scale), known, "cheap-sam", replica_seeds(scale)))


def cheap_sam(scale: Scale, all_entries: Sequence[MethodResult]) -> Findings:
    """Say which arms keep SAM's gain."""
    results = by_condition(all_entries)
    tested = [(e, _kept(e, own), own) for own in results for e in own if LOOKS[e.method.name].is_cheap]
    family = Family(contrast for _, contrast, _ in tested)
    begun = [entries for entries in results if points_of(entries)]
    complete = [entries for entries in begun if is_complete(entries)]
    return Findings(
        item="cheap-sam",
        scale=scale,
        title=TITLE,
        source=SOURCE,
        about_scale=ABOUT if scale == "laptop" else "Two epochs on 40 digits: this shows that everything runs.",
        tables=[*([_choice_table(complete)] if complete else []), *(_table(entries) for entries in begun)],
        figures=[_pareto_figure(entries) for entries in complete],
        verdicts=[_verdict(entry, contrast, family, entries) for entry, contrast, entries in tested],
        hyperparameters=own_settings([e.chosen for e in all_entries if e.chosen is not None]),
        planned=[_claim(entry, entries) for entry, _, entries in tested],
        rules=rules() if scale == "laptop" else (),
        notes=[EARLIER] if scale == "laptop" else [],
        cut=CUT if scale == "laptop" else (),
    )


def is_complete(entries: Sequence[MethodResult]) -> bool:
    """Return whether all arms of a condition have all replicas: a front of some of them would mislead."""
    return all(entry.incomplete_reason is None for entry in entries)


def _by_name(entries: Sequence[MethodResult]) -> dict[str, MethodResult]:
    return {entry.method.name: entry for entry in entries}


def reference(entries: Sequence[MethodResult]) -> MethodResult:
    """Return the method whose gain counts: SAM with one eps for the batch, or with the paper's m where that is not."""
    by_name = _by_name(entries)
    return by_name.get(SAM) or by_name[protocol.SAM_WITH_M]


def cost_of(entry: MethodResult) -> float | None:
    """Return what a method cost; None while nothing is chosen, or no run tells where it stopped."""
    if entry.chosen is None:
        return None
    if not entry.method.stops_early:
        return cost_in_passes(entry.chosen, entry.condition.start.epochs)
    stops = entry.replicas.by_seed(at_best_epoch("epoch", 1.0)).values()
    return cost_in_passes(entry.chosen, entry.condition.start.epochs, mean_of(stops)) if stops else None


def _kept(entry: MethodResult, entries: Sequence[MethodResult]) -> OneSided:
    r"""Return the claim that an arm's error is below :math:`(1 - k)\, e_0 + k\, e_{SAM}` with k = 0.9."""
    base, sam = _by_name(entries)[BASE], reference(entries)
    without, with_sam = base.values("test_error"), sam.values("test_error")
    limit = {seed: (1 - KEPT) * without[seed] + KEPT * with_sam[seed] for seed in without.keys() & with_sam.keys()}
    contrast = OneSided(
        quantity="test error, %",
        lower_name=entry.method.name,
        higher_name=f"SGD's error less {KEPT:.0%} of the gain of {sam.method.name}",
        lower=entry.values("test_error"),
        higher=limit,
        num_asked=max(2, len(entry.replicas.records), len(sam.replicas.records)),
        runs=runs_of(e.replicas for e in (base, sam, entry)),
    )
    notes = (base.unfit_note, sam.gate_note, entry.gate_note, gain_note(entries))
    return contrast if contrast.waits else contrast.gated(notes)


def _claim(entry: MethodResult, entries: Sequence[MethodResult]) -> str:
    gain = f"{KEPT:.0%} of the gain of {reference(entries).method.name}"
    return f"{entry.condition.name}: {entry.method.name} keeps at least {gain}"


def _verdict(entry: MethodResult, contrast: OneSided, family: Family, entries: Sequence[MethodResult]) -> Verdict:
    passes = cost_of(entry)
    cost = "" if passes is None else f", at {passes:.4g} {'pass' if passes == 1 else 'passes'}"
    verdict = family.judge(f"{_claim(entry, entries)}{cost}.", [contrast])
    return verdict if contrast.waits else contrast.kept(verdict)


def sam_gains(entries: Sequence[MethodResult]) -> bool:
    """Return whether SAM's gain is known well enough to divide by: its 95 % interval is within half of it."""
    gain = _sam_gain(entries)
    return gain.mean > 2 * gain.half_width


def gain_note(entries: Sequence[MethodResult]) -> str | None:
    """Says that SAM has no significant gain to keep; None if it has one."""
    gain = _sam_gain(entries)
    if gain.mean > gain.half_width:
        return None
    return (
        f"the gain of {reference(entries).method.name}, {gain.mean:.1f} ± {gain.half_width:.1f} points, may be nothing"
    )


def _sam_gain(entries: Sequence[MethodResult]) -> Interval:
    base, sam = _by_name(entries)[BASE], reference(entries)
    differences = base.lower_than(sam, "test error, %", "test_error").differences
    return mean_and_interval(differences) if differences else Interval(0.0, math.inf)


def share_of_gain(means: Mapping[str, float], name: str, sam: str = SAM) -> str:
    """Return the share of SAM's gain that a method has, given mean errors; only where there is a gain (`sam_gains`).

    Example:
        >>> share_of_gain({"SGD": 40.0, "SAM": 30.0, "SAM on 1/8": 29.0}, "SAM on 1/8")
        '110 %'
    """
    return "" if name in (BASE, sam) else f"{100 * (means[BASE] - means[name]) / (means[BASE] - means[sam]):.0f} %"


def _table(entries: Sequence[MethodResult]) -> Table:
    means = {p.name: p.error.mean for p in points_of(entries)}
    sam, gains = reference(entries).method.name, sam_gains(entries)
    rows: list[Row] = []
    for entry in sorted(entries, key=lambda e: math.inf if cost_of(e) is None else cost_of(e) or 0.0):
        name, passes = entry.method.name, cost_of(entry)
        known = {name, BASE, sam} <= means.keys()
        difference: Cell | str = ""
        if known and name != sam:
            contrast = entry.lower_than(reference(entries), "test error, %", "test_error")
            values = tuple(contrast.differences)
            difference = Cell(measured=mean_and_interval(values), unit="points", values=values, runs=contrast.runs)
        rows.append(
            [
                name,
                "" if passes is None else f"{passes:.4g}",
                entry.chosen.optim.rho_text if entry.chosen is not None and entry.chosen.optim.uses_sam else "",
                entry.cell("test_error"),
                entry.replicas.cell_of(entry.values("train_error")),
                share_of_gain(means, name, sam) if known and gains else "",
                difference,
            ]
        )
    columns = ("method", "passes", "rho", "test error", "training error", "share of SAM's gain", "method - SAM")
    base = _by_name(entries)[BASE].chosen
    shared = "" if base is None else f"All arms share SGD's settings: {setting_of(base)}. "
    wide = " The interval of the gain of SAM is too wide here for shares of it." if {BASE, sam} <= means.keys() else ""
    return Table(
        title=entries[0].condition.name,
        columns=columns,
        rows=rows,
        note=f"{shared}rho, in units of the suggestion, was chosen on the validation split. SAM is “{sam}” here."
        f"{'' if gains else wide}",
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in error at the same cost or less, by rising cost.

    Example:
        >>> points = [Point("a", 1, Interval(9, 0)), Point("b", 2, Interval(9.5, 0)), Point("c", 2, Interval(7, 0))]
        >>> [point.name for point in pareto_front(points)]
        ['a', 'c']
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.error.mean)):
        if not front or point.error.mean < front[-1].error.mean:
            front.append(point)
    return front


def points_of(entries: Sequence[MethodResult]) -> list[Point]:
    """Return cost and error of the methods whose replicas are all there."""
    return [
        Point(e.method.name, cost, mean_and_interval(list(e.values("test_error").values())))
        for e in entries
        if e.incomplete_reason is None and (cost := cost_of(e)) is not None
    ]


def _choice_table(results: Sequence[Sequence[MethodResult]]) -> Table:
    """Return what to use for what can be spent: the front of each condition, with its code."""
    rows: list[Row] = []
    for entries in results:
        by_name = _by_name(entries)
        for point in pareto_front(points_of(entries)):
            entry = by_name[point.name]
            error = entry.replicas.cell_of(entry.values("test_error"))
            rows.append([entries[0].condition.name, f"{point.cost:.4g}", point.name, error, LOOKS[point.name].code])
    return Table(
        title="Which to use: the lowest error for what you can spend",
        columns=("problem", "passes", "method", "test error", "in code"),
        rows=rows,
        note="Every method that no other one beats at the same cost or less, by mean error.",
    )


def _pareto_figure(entries: Sequence[MethodResult]) -> LineFigure:
    points = points_of(entries)
    front = pareto_front(points)
    series = []
    for family in dict.fromkeys(LOOKS[p.name].family for p in points):
        own = sorted((p for p in points if LOOKS[p.name].family == family), key=lambda p: p.cost)
        series.append(_series(family, own, half_width=[p.error.half_width for p in own], mode="markers"))
    if front:
        series.append(_series("Pareto front", front, mode="lines"))
    return LineFigure(
        title=f"Error over cost: {entries[0].condition.name}",
        x_label="cost: passes over the training set, relative to SGD",
        y_label="test error, %",
        series=series,
        note="Bars are 95 % confidence intervals over replicas; the line joins the methods that nothing else beats.",
        runs=runs_of(e.replicas for e in entries),
    )


def _series(name: str, points: Sequence[Point], **look: Any) -> Series:
    x, y, names = ([p.cost for p in points], [p.error.mean for p in points], [p.name for p in points])
    return Series(name=name, x=x, y=y, hover=names, **look)


CHEAP_SAM = conditions_item("cheap-sam", TITLE, SOURCE, conditions, cheap_sam)
