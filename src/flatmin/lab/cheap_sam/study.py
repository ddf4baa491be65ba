"""SAM's gain over its cost: which ways to spend fewer passes keep it.

Not in the paper: a study of our own, by the same protocol. Settings are chosen on the validation split, replicas are
paired by seed, and each arm is tested for keeping at least 90 % of SAM's gain (one-sided paired t-test, Holm's
correction over all arms of all conditions).

    flatmin reproduce cheap-sam --scale laptop      # about five hours of two cores with bf16
    flatmin reproduce cheap-sam --scale smoke       # a minute
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flatmin.lab.cheap_sam.arms import ARMS, BASE, PLAIN, SAM, conditions, cost_in_passes
from flatmin.lab.studies.condition_tables import setting_of
from flatmin.lab.studies.conditions import MethodResult, condition_jobs, condition_results
from flatmin.lab.studies.contrasts import Family, OneSided
from flatmin.lab.studies.contrasts import mean as mean_of
from flatmin.lab.studies.findings import Cell, Findings, LineFigure, Row, Series, Table, Verdict, own_settings
from flatmin.lab.studies.replicas import runs_of
from flatmin.lab.studies.statistics import Interval, mean_and_interval
from flatmin.lab.studies.study import Groups, Item, Known, Scale

KEPT = 0.9
"""The share of SAM's gain that a cheap method has to keep."""
FAMILIES = {arm.name: arm.family for arm in ARMS} | {BASE: BASE}
CODES = {arm.name: arm.code for arm in ARMS} | {BASE: PLAIN}
ABOUT = (
    "1,000 images of Fashion-MNIST at 14 x 14 pixels (a quarter of the cost of 28 x 28), WRN-10-2, 40 epochs; then "
    "2,000 images of CIFAR-10 at full size with basic augmentation, and a small vision transformer with AdamW. The "
    "replicas share one subset of the images and one draw of the noisy labels. Cost counts the examples that pass "
    "forward and backward, relative to training without SAM."
)
TITLE, SOURCE = "SAM at nearly the cost of SGD", "Our own study, not in the paper"


class Point(NamedTuple):
    """A method in the plane of cost and error."""

    name: str
    cost: float
    error: Interval


def cheap_sam_jobs(scale: Scale, known: Known) -> Groups:
    """Return all arms in all conditions."""
    groups = [condition_jobs([condition], known, "cheap-sam", seeds) for condition, seeds in conditions(scale)]
    return {key: jobs for group in groups for key, jobs in group.items()}


def results_of(scale: Scale, known: Known) -> list[list[MethodResult]]:
    """Return what is known of all arms, condition by condition."""
    return [condition_results([condition], known, "cheap-sam", seeds) for condition, seeds in conditions(scale)]


def cheap_sam(scale: Scale, known: Known) -> Findings:
    """Say which arms keep SAM's gain."""
    results = results_of(scale, known)
    kept = {(r.condition.name, r.method.name): _kept(r, entries) for entries in results for r in _tested(entries)}
    family = Family(kept.values())
    verdicts = [_verdict(r, kept[r.condition.name, r.method.name], family) for rs in results for r in _tested(rs)]
    chosen = [r.chosen for entries in results for r in entries if r.chosen is not None]
    return Findings(
        item="cheap-sam",
        scale=scale,
        title=TITLE,
        source=SOURCE,
        about_scale=ABOUT if scale == "laptop" else "One epoch on 40 digits: this shows that everything runs.",
        tables=[_choice_table(results), *(_table(entries) for entries in results)],
        figures=[_pareto_figure(entries) for entries in results],
        verdicts=verdicts,
        hyperparameters=own_settings(chosen),
        notes=(
            f"An arm keeps SAM's gain if its error is below that without SAM minus {KEPT:.0%} of what "
            "SAM gains (one-sided paired t-test, Holm's correction over all arms of all conditions). It does not "
            "if the 95 % interval of the excess lies above 0.",
        ),
    )


def _by_name(entries: Sequence[MethodResult]) -> dict[str, MethodResult]:
    return {entry.method.name: entry for entry in entries}


def _tested(entries: Sequence[MethodResult]) -> list[MethodResult]:
    """Return the cheap methods: all that cost less than SAM."""
    return [e for e in entries if e.method.name not in (BASE, SAM, "no SAM, twice the epochs", "SAM, m = 16")]


def _kept(entry: MethodResult, entries: Sequence[MethodResult]) -> OneSided:
    r"""Return the claim that an arm's error is below :math:`(1 - k)\, e_0 + k\, e_{SAM}` with k = 0.9."""
    without, sam = (_by_name(entries)[name].values("test_error") for name in (BASE, SAM))
    limit = {seed: (1 - KEPT) * without[seed] + KEPT * sam[seed] for seed in without.keys() & sam.keys()}
    return OneSided(
        quantity="test error, %",
        lower_name=entry.method.name,
        higher_name=f"the error without SAM less {KEPT:.0%} of SAM's gain",
        lower=entry.values("test_error"),
        higher=limit,
        num_asked=max(2, len(entry.replicas.records), len(_by_name(entries)[SAM].replicas.records)),
        runs=runs_of(_by_name(entries)[name].replicas for name in (BASE, SAM, entry.method.name)),
    )


def _verdict(entry: MethodResult, contrast: OneSided, family: Family) -> Verdict:
    cost = "" if entry.chosen is None else f", at {_cost(entry):g} {'pass' if _cost(entry) == 1 else 'passes'}"
    claim = f"{entry.condition.name}: {entry.method.name} keeps at least {KEPT:.0%} of SAM's gain{cost}."
    verdict = family.judge(claim, [contrast])
    if verdict.status == "reproduced":
        return replace(verdict, status="kept")
    if not contrast.waits:
        excess = mean_and_interval(contrast.differences)
        if excess.mean - excess.half_width > 0:
            return replace(verdict, status="not kept")
    return verdict


def _cost(entry: MethodResult) -> float:
    assert entry.chosen is not None
    return cost_in_passes(entry.chosen, entry.condition.start.epochs)


def sam_gains(entries: Sequence[MethodResult]) -> bool:
    """Return whether SAM's gain is known well enough to divide by: its 95 % interval is within half of it."""
    base, sam = (_by_name(entries)[name].replicas for name in (BASE, SAM))
    differences = sam.lower_than(base, "test error, %", "test_error").differences
    gain = mean_and_interval([-difference for difference in differences]) if differences else Interval(0.0, math.inf)
    return gain.mean > 2 * gain.half_width


def share_of_gain(means: Mapping[str, float], name: str) -> str:
    """Return the share of SAM's gain that a method has, given mean errors; only where there is a gain (`sam_gains`).

    Example:
        >>> share_of_gain({"no SAM": 40.0, "SAM": 30.0, "part 1/8": 29.0}, "part 1/8")
        '110 %'
    """
    return "" if name in (BASE, SAM) else f"{100 * (means[BASE] - means[name]) / (means[BASE] - means[SAM]):.0f} %"


def _table(entries: Sequence[MethodResult]) -> Table:
    means = {
        e.method.name: mean_of(values.values())
        for e in entries
        if (values := e.values("test_error")) and e.incomplete_reason is None
    }
    sam, gains = _by_name(entries)[SAM], sam_gains(entries)
    rows: list[Row] = []
    for entry in sorted(entries, key=lambda e: math.inf if e.chosen is None else _cost(e)):
        name = entry.method.name
        known = name in means and BASE in means and SAM in means
        difference: Cell | str = ""
        if known and name != SAM:
            contrast = entry.replicas.lower_than(sam.replicas, "test error, %", "test_error")
            interval = mean_and_interval(contrast.differences)
            by_seed = tuple(contrast.differences)
            difference = Cell(measured=interval, unit="points", values=by_seed, runs=contrast.runs)
        rows.append(
            [
                name,
                "" if entry.chosen is None else f"{_cost(entry):g}",
                entry.chosen.optim.rho_text if entry.chosen is not None and entry.chosen.optim.uses_sam else "",
                entry.replicas.cell("test_error", note=entry.edge_note),
                entry.replicas.cell("train_error"),
                share_of_gain(means, name) if known and gains else "",
                difference,
            ]
        )
    columns = ("method", "passes", "rho", "test error", "training error", "share of SAM's gain", "method - SAM")
    base = _by_name(entries)[BASE].chosen
    shared = "" if base is None else f"All arms share the settings chosen without SAM: {setting_of(base)}. "
    return Table(
        title=entries[0].condition.name,
        columns=columns,
        rows=rows,
        note=f"{shared}rho was chosen on the validation split."
        f"{'' if gains else ' The interval of the gain of SAM is too wide here for shares of it.'}",
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
        Point(e.method.name, _cost(e), mean_and_interval(list(e.values("test_error").values())))
        for e in entries
        if e.incomplete_reason is None
    ]


def _choice_table(results: Sequence[Sequence[MethodResult]]) -> Table:
    """Return what to use for what can be spent: the front of each condition, with its code."""
    rows: list[Row] = []
    for entries in results:
        by_name = _by_name(entries)
        for point in pareto_front(points_of(entries)):
            error = by_name[point.name].replicas.cell("test_error")
            rows.append([entries[0].condition.name, f"{point.cost:g}", point.name, error, CODES[point.name]])
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
    for family in dict.fromkeys(FAMILIES[p.name] for p in points):
        own = sorted((p for p in points if FAMILIES[p.name] == family), key=lambda p: p.cost)
        series.append(_series(family, own, half_width=[p.error.half_width for p in own], mode="markers"))
    if front:
        series.append(_series("Pareto front", front, mode="lines"))
    return LineFigure(
        title=f"Error over cost: {entries[0].condition.name}",
        x_label="cost: passes over the training set, relative to training without SAM",
        y_label="test error, %",
        series=series,
        note="Bars are 95 % confidence intervals over replicas; the line joins the methods that nothing else beats.",
        runs=runs_of(e.replicas for e in entries),
    )


def _series(name: str, points: Sequence[Point], **look: Any) -> Series:
    x, y, names = ([p.cost for p in points], [p.error.mean for p in points], [p.name for p in points])
    return Series(name=name, x=x, y=y, hover=names, **look)


CHEAP_SAM = Item(name="cheap-sam", title=TITLE, source=SOURCE, jobs=cheap_sam_jobs, findings=cheap_sam)
