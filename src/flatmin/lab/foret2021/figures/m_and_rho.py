"""Figure 3, middle (Section 4.1): what SAM gains, by the number m of examples that share a perturbation.

    flatmin reproduce m-and-rho --scale laptop    # 40 minutes on two cores

With micro-batches of m, batch norm sees as few examples at once as SAM does, which is a regularizer by itself. So SAM
with m is compared with SGD by micro-batches of m, and the claim is on the difference of two such differences: that of
a small m, and that of the whole batch. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping
from dataclasses import replace

from flatmin.lab.foret2021 import protocol
from flatmin.lab.foret2021.claims.figures import CLAIMS
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item, power_note
from flatmin.lab.foret2021.scales import replica_seeds, start
from flatmin.lab.foret2021.settings import M_GRID, M_SHARPNESS, RHO_GRID
from flatmin.lab.studies.condition_tables import GATE, METRIC_NAMES, OUR_METRICS, TRAINING_NOTE, UNITS, choices
from flatmin.lab.studies.conditions import (
    Condition,
    Method,
    MethodResult,
    condition_jobs,
    condition_results,
    validation_error,
    with_m,
    with_rho,
)
from flatmin.lab.studies.contrasts import Contrast, Family, changes
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Series, Table, Verdict
from flatmin.lab.studies.replicas import series_over
from flatmin.lab.studies.study import Groups, Known, Scale
from flatmin.lab.sweeps.jobs import Job

M_VALUES: Mapping[Scale, tuple[int, ...]] = {"paper": M_GRID, "laptop": (4, 16, 64, 128), "smoke": (5, 20)}
"""The last is the whole batch."""
LAPTOP_EPOCHS = 50
METRICS = protocol.METRICS
RULES = (
    "Claim: what SAM with m changes in the test error, compared with SGD by micro-batches of the same m (batch norm "
    "then sees as few examples at once), is further below 0 with m = 4, 16 and 64 than with m = 128, the whole batch: "
    "three differences of differences, paired by seed, two-sided t-test, 5 %, Holm's correction for the three. Test "
    "loss and calibration error: six more, which are ours and corrected apart.",
    "Gate: a comparison is a test of the claim only if both of its baselines, SGD with either m, end with a training "
    f"error of at most {protocol.MOST_TRAIN_ERROR:g} %, and if rho is inside its grid for both. Otherwise the verdict "
    "is “not tested at this scale”.",
    f"{protocol.RULES[1]} The suggestion is the one for the method's own m.",
    "Condition: 1,000 images of Fashion-MNIST at 14 x 14 pixels, WRN-10-2, without augmentation, 50 epochs, learning "
    "rate 0.1, weight decay 0.0005, batches of 125. With augmentation 200 epochs are needed to fit, and an epoch by "
    "micro-batches of 4 takes about three times as long as one by whole batches: five replicas of four m would not "
    "fit into the budget.",
    "Known when the plan was registered: the runs of an earlier protocol (40 epochs, m = 16 and 128, four values of "
    "rho, no SGD by micro-batches), in which m = 16 had an error of 17.11 % and m = 128 of 18.09 %; one run each on "
    "CIFAR-10 with basic augmentation, in which SAM gained 3.5 points with the whole batch and 2.0 with m = 16; "
    "and a pilot (SGD, m = 4, seed 2000, which no other run has), which ended with a training error of 0.4 % and a "
    "test error of 17.0 %.",
)
NOTE = (
    "The last column is a difference of differences, negative where SAM gains more: paired by seed, two-sided t-test; "
    "Holm's correction is for all {num} comparisons that are planned."
)


def m_and_rho_condition(scale: Scale) -> Condition:
    """Return SGD and SAM by micro-batches of each m, in one setting."""
    base = start(scale, M_SHARPNESS, rho=0.0)
    if scale == "laptop":
        base = replace(base, epochs=LAPTOP_EPOCHS, evaluate_every=LAPTOP_EPOCHS)
    methods: list[Method] = []
    for m in M_VALUES[scale]:
        own = None if m >= base.data.batch_size else m
        sgd = Method(name=_name("SGD", m), candidates=with_m(own))
        rhos = RHO_GRID if scale == "paper" else (0.05, 0.1)
        candidates = protocol.with_factors(own) if scale == "laptop" else with_rho(rhos, own)
        sam = Method(name=_name("SAM", m), candidates=candidates, after=sgd.name, extends=scale == "laptop")
        methods += [sgd, sam]
    return Condition(
        labels=(base.model.name,),
        column=base.data.name,
        start=base,
        methods=tuple(methods),
        claimed={},
        most_train_error=protocol.MOST_TRAIN_ERROR if scale == "laptop" else None,
    )


def m_and_rho_jobs(scale: Scale, known: Known) -> Groups:
    """Return the runs that choose rho for each m, and the replicas of SGD and SAM."""
    jobs: dict[tuple[str, ...], list[Job]] = condition_jobs(
        [m_and_rho_condition(scale)], known, "m-and-rho", replica_seeds(scale)
    )
    return jobs


def m_and_rho(scale: Scale, known: Known) -> Findings:
    """Compare what SAM gains over SGD by the same micro-batches, for several m (Figure 3, middle)."""
    condition = m_and_rho_condition(scale)
    entries = condition_results([condition], known, "m-and-rho", replica_seeds(scale))
    by_name = {entry.method.name: entry for entry in entries}
    pairs = {m: (by_name[_name("SGD", m)], by_name[_name("SAM", m)]) for m in M_VALUES[scale]}
    contrasts = {metric: gain_contrasts(pairs, metric) for metric in METRICS}
    families = {ours: Family(_flat(contrasts, ours)) for ours in (False, True)}
    family_of = {metric: families[metric in OUR_METRICS] for metric in METRICS}
    return findings(
        "m-and-rho",
        scale,
        tables=[
            *(_table(pairs, metric, contrasts[metric], family_of[metric]) for metric in METRICS),
            _table(pairs, "train_error", {}, None),
            *choices(entries),
        ],
        figures=[figure for figure in (_over_m(pairs), _over_rho(pairs)) if figure.series],
        verdicts=[
            _verdict(pairs, m, metric, contrast, family_of[metric])
            for metric, group in contrasts.items()
            for m, contrast in group.items()
        ],
        planned=[
            name + (" (ours)" if metric in OUR_METRICS else "")
            for metric, group in contrasts.items()
            for name in Family(group.values()).names
        ],
        rules=[*RULES, *power_note("m-and-rho", scale)] if scale == "laptop" else (),
        hyperparameters=hyperparameters("m-and-rho", scale, [condition.start], ("m", M_VALUES[scale])),
        notes=[
            "A difference is SAM minus SGD by micro-batches of the same m; the whole batch is the last m.",
            "Batch norm normalizes each micro-batch by itself, as it does on accelerators.",
        ],
    )


def gain_contrasts(pairs: Mapping[int, tuple[MethodResult, MethodResult]], metric: str) -> dict[int, Contrast]:
    """Return for each m but the largest the claim that SAM lowers a metric more than with the largest m.

    The numbers of each seed are (SAM - SGD) with m and (SAM - SGD) with the largest; there are none until all replicas
    of the four methods exist.
    """
    largest = max(pairs)
    found = {}
    for m in (m for m in pairs if m != largest):
        four = [*pairs[m], *pairs[largest]]
        missing = any(entry.incomplete_reason for entry in four)
        low, high = (changes(sgd.values(metric), sam.values(metric)) for sgd, sam in (pairs[m], pairs[largest]))
        found[m] = Contrast(
            quantity=f"SAM's change of the {METRIC_NAMES[metric]}",
            lower_name=f"m = {m}",
            higher_name=f"m = {largest}",
            lower={} if missing else low,
            higher={} if missing else high,
            num_asked=len(four[0].replicas.records),
            runs=tuple(record.name for entry in four for record in entry.replicas.records),
            unit=UNITS.get(metric, "%"),
            relative=False,
        )
    return found


def _name(method: str, m: int) -> str:
    return f"{method}, m = {m}"


def _flat(contrasts: Mapping[str, Mapping[int, Contrast]], ours: bool) -> list[Contrast]:
    return [c for metric, group in contrasts.items() if (metric in OUR_METRICS) == ours for c in group.values()]


def _verdict(
    pairs: Mapping[int, tuple[MethodResult, MethodResult]], m: int, metric: str, contrast: Contrast, family: Family
) -> Verdict:
    largest, what = max(pairs), METRIC_NAMES[metric]
    said = f"{CLAIMS['m-and-rho'].statements[0].claim.removesuffix('.')}:"
    claim = f"SAM lowers the {what} more with m = {m} than with m = {largest}, each compared with SGD by as many."
    claim = f"{claim} (ours)" if metric in OUR_METRICS else f"{said} {claim}"
    judged = family.judge(claim, [contrast])
    if contrast.waits:
        return judged
    notes = [note for k in (m, largest) for entry in pairs[k] for note in _notes(entry)]
    if not notes:
        return judged
    return replace(judged, status="not tested at this scale", evidence=f"{GATE} {'; '.join(notes)}. {judged.evidence}")


def _notes(entry: MethodResult) -> list[str]:
    """Return why a method's runs are not a test of the claim: SGD does not fit, or rho is at the edge."""
    note = entry.gate_note if entry.chosen is not None and entry.chosen.optim.uses_sam else entry.unfit_note
    return [] if note is None else [note]


def _table(
    pairs: Mapping[int, tuple[MethodResult, MethodResult]],
    metric: str,
    contrasts: Mapping[int, Contrast],
    family: Family | None,
) -> Table:
    """Return a metric of SGD and SAM by m, the difference, and that minus the largest m's."""
    unit = UNITS.get(metric, "%")
    rows: list[Row] = []
    for m, (sgd, sam) in pairs.items():
        difference = changes(sgd.values(metric), sam.values(metric))
        runs = tuple(r.name for e in (sgd, sam) for r in e.replicas.records if r.seed in difference)
        both = replace(sam.replicas.cell_of(difference, unit=unit), runs=runs)
        cells: Row = [
            f"m = {m}",
            *(e.replicas.cell_of(e.values(metric), unit=unit, note=_note(e)) for e in (sgd, sam)),
            *([both] if family else []),
        ]
        rows.append([*cells, *([family.comparison(contrasts[m]) if m in contrasts else ""] if family else [])])
    columns = ["", "SGD", "SAM", "SAM - SGD", f"compared with m = {max(pairs)}"]
    return Table(
        title=f"SGD and SAM by micro-batches of m: {METRIC_NAMES[metric]}",
        columns=columns if family else columns[:3],
        rows=rows,
        note=TRAINING_NOTE if family is None else NOTE.format(num=len(family.contrasts)),
    )


def _note(entry: MethodResult) -> str | None:
    return (entry.incomplete_reason or entry.edge_note) if entry.replicas.runs else None


def _over_m(pairs: Mapping[int, tuple[MethodResult, MethodResult]]) -> LineFigure:
    series = [
        series_over(name, {float(m): pair[number].values("test_error") for m, pair in pairs.items()})
        for number, name in enumerate(("SGD by micro-batches of m", "SAM, one eps for every m"))
    ]
    return LineFigure(
        title="Test error with micro-batches of m",
        x_label="m",
        y_label="test error, %",
        series=[one for one in series if one.x],
        log_x=True,
        runs=tuple(run for pair in pairs.values() for entry in pair for run in entry.replicas.runs),
    )


def _over_rho(pairs: Mapping[int, tuple[MethodResult, MethodResult]]) -> LineFigure:
    series, runs = [], []
    in_units = False
    for m, (_, sam) in pairs.items():
        tried = [(e, r, error) for e, r in sam.tried if (error := validation_error(r)) is not None]
        points = sorted((e.optim.rho_number, error) for e, _, error in tried)
        runs += [record.name for _, record, _ in tried]
        in_units |= any(e.optim.rho_factor is not None for e, _ in sam.tried)
        if points:
            series.append(Series(name=f"m = {m}", x=[x for x, _ in points], y=[y for _, y in points]))
    return LineFigure(
        title="Validation error over rho for each m",
        x_label="rho, in units of what flatmin.suggest_rho says for m" if in_units else "rho",
        y_label="validation error, %",
        series=series,
        log_x=True,
        note="One run each: what rho was chosen by.",
        runs=runs,
    )


M_AND_RHO = item("m-and-rho", m_and_rho_jobs, m_and_rho)
