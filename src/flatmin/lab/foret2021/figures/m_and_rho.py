"""Figure 3, middle (Section 4.1): what SAM gains, by the number m of examples that share a perturbation.

    flatmin reproduce m-and-rho --scale laptop    # 40 minutes on two cores

With micro-batches of m, batch norm sees as few examples at once as SAM does, which is a regularizer by itself. So SAM
with m is compared with SGD by micro-batches of m, and the claim is on the difference of two such differences: with a
small m, and with the whole batch. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flatmin.lab.foret2021 import protocol
from flatmin.lab.foret2021.claims.figures import FIGURES
from flatmin.lab.foret2021.item_findings import findings, hyperparameters
from flatmin.lab.foret2021.scales import start
from flatmin.lab.foret2021.settings import M_GRID, M_SHARPNESS, RHO_GRID
from flatmin.lab.studies.condition_tables import METRIC_NAMES, OUR_METRICS, TRAINING_NOTE, choices
from flatmin.lab.studies.conditions import Condition, MethodResult, conditions_item, unit_of, validation_error
from flatmin.lab.studies.contrasts import Contrast, Family, changes
from flatmin.lab.studies.findings import Findings, LineFigure, Row, Series, Table, Verdict
from flatmin.lab.studies.methods import Method, with_factors, with_m, with_rho
from flatmin.lab.studies.replicas import series_over
from flatmin.lab.studies.study import Scale

M_VALUES: Mapping[Scale, tuple[int, ...]] = {"paper": M_GRID, "laptop": (4, 16, 64, 128), "smoke": (5, 20)}
"""The last is the whole batch."""
LAPTOP_EPOCHS = 50
CLAIMS, METRICS = FIGURES["m-and-rho"], protocol.METRICS
Pairs = Mapping[int, tuple[MethodResult, MethodResult]]
"""SGD and SAM, by m."""
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
        candidates = with_factors(m=own) if scale == "laptop" else with_rho(rhos, own)
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


def m_and_rho(scale: Scale, entries: Sequence[MethodResult]) -> Findings:
    """Compare what SAM gains over SGD by the same micro-batches, for several m (Figure 3, middle)."""
    by_name = {entry.method.name: entry for entry in entries}
    pairs = {m: (by_name[_name("SGD", m)], by_name[_name("SAM", m)]) for m in M_VALUES[scale]}
    contrasts = {metric: gain_contrasts(pairs, metric) for metric in METRICS}
    family_of: dict[str, Family] = {}
    for together in (set(METRICS) - set(OUR_METRICS), OUR_METRICS):  # ours are corrected apart
        family = Family(c for metric in METRICS if metric in together for c in contrasts[metric].values())
        family_of |= dict.fromkeys(together, family)
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
        planned=[name + _ours(metric) for metric, group in contrasts.items() for name in Family(group.values()).names],
        rules=RULES,
        hyperparameters=hyperparameters("m-and-rho", scale, [entries[0].condition.start], ("m", M_VALUES[scale])),
        notes=[
            "A difference is SAM minus SGD by micro-batches of the same m; the whole batch is the last m.",
            "Batch norm normalizes each micro-batch by itself, as it does on accelerators.",
        ],
    )


def gain_contrasts(pairs: Pairs, metric: str) -> dict[int, Contrast]:
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
        contrast = Contrast(
            quantity=f"SAM's change of the {METRIC_NAMES[metric]}",
            lower_name=f"m = {m}",
            higher_name=f"m = {largest}",
            lower={} if missing else low,
            higher={} if missing else high,
            num_asked=len(four[0].replicas.records),
            runs=tuple(record.name for entry in four for record in entry.replicas.records),
            unit=unit_of(metric),
            relative=False,
        )
        # Not a test of the claim: SGD does not fit, or rho is at the edge.
        notes = [note for sgd, sam in (pairs[m], pairs[largest]) for note in (sgd.unfit_note, sam.gate_note)]
        found[m] = contrast if missing else contrast.gated(notes)
    return found


def _name(method: str, m: int) -> str:
    return f"{method}, m = {m}"


def _ours(metric: str) -> str:
    return " (ours)" if metric in OUR_METRICS else ""


def _verdict(pairs: Pairs, m: int, metric: str, contrast: Contrast, family: Family) -> Verdict:
    largest, what = max(pairs), METRIC_NAMES[metric]
    papers = "" if metric in OUR_METRICS else f"{CLAIMS.statements[0].claim.removesuffix('.')}: "
    claim = f"SAM lowers the {what} more with m = {m} than with m = {largest}, each relative to SGD with the same m."
    return family.judge(f"{papers}{claim}{_ours(metric)}", [contrast])


def _table(pairs: Pairs, metric: str, contrasts: Mapping[int, Contrast], family: Family | None) -> Table:
    """Return a metric of SGD and SAM by m, the difference, and that minus the largest m's."""
    rows: list[Row] = []
    for m, (sgd, sam) in pairs.items():
        difference = changes(sgd.values(metric), sam.values(metric))
        runs = tuple(r.name for e in (sgd, sam) for r in e.replicas.records if r.seed in difference)
        rows.append([f"m = {m}", sgd.cell(metric), sam.cell(metric)])
        if family is not None:
            both = replace(sam.replicas.cell_of(difference, unit=unit_of(metric)), runs=runs)
            rows[-1] += [both, family.comparison(contrasts[m]) if m in contrasts else ""]
    columns = ["", "SGD", "SAM", "SAM - SGD", f"compared with m = {max(pairs)}"]
    return Table(
        title=f"SGD and SAM by micro-batches of m: {METRIC_NAMES[metric]}",
        columns=columns if family else columns[:3],
        rows=rows,
        note=TRAINING_NOTE if family is None else NOTE.format(num=len(family.contrasts)),
    )


def _over_m(pairs: Pairs) -> LineFigure:
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


def _over_rho(pairs: Pairs) -> LineFigure:
    series, runs = [], []
    for m, (_, sam) in pairs.items():
        tried = [(e, r, error) for e, r in sam.tried if (error := validation_error(r)) is not None]
        points = sorted((e.optim.rho_number, error) for e, _, error in tried)
        runs += [record.name for _, record, _ in tried]
        if points:
            series.append(Series(name=f"m = {m}", x=[x for x, _ in points], y=[y for _, y in points]))
    in_units = any(e.optim.rho_factor is not None for _, sam in pairs.values() for e, _ in sam.tried)
    return LineFigure(
        title="Validation error over rho for each m",
        x_label="rho, in units of what flatmin.suggest_rho says for m" if in_units else "rho",
        y_label="validation error, %",
        series=series,
        log_x=True,
        note="One run each: what rho was chosen by.",
        runs=runs,
    )


M_AND_RHO = conditions_item(
    "m-and-rho", CLAIMS.title, CLAIMS.source, lambda scale: [m_and_rho_condition(scale)], m_and_rho
)
