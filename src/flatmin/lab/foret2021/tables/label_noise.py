"""Tables 4 and 8 (Section 3.3, Appendix C.1): models trained on noisy labels.

    flatmin reproduce label-noise   --scale laptop    # three and a half hours on two cores
    flatmin reproduce noise-and-rho --scale laptop    # half an hour on two cores

On a laptop the protocol is `protocol`'s. SGD may also stop early, on a clean validation set or on a noisy one.
All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.foret2021 import protocol, settings
from flatmin.lab.foret2021.claims.appendix import NOISE_VALIDATION
from flatmin.lab.foret2021.claims.tables import LABEL_NOISE, NOISE_LITERATURE, NOISE_METHODS, NOISE_PERCENT
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item, table_item
from flatmin.lab.foret2021.scales import LAPTOP, LAPTOP_M, TABLE8_REPLICAS, jobs_for, small_images, smoke
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.conditions import Condition, replica_seeds
from flatmin.lab.studies.contrasts import Contrast, Family, mean
from flatmin.lab.studies.findings import Cell, Findings, Table
from flatmin.lab.studies.methods import Candidates, Method, baselines, no_tuning, stopped_early, with_rho
from flatmin.lab.studies.printed import Claimed
from flatmin.lab.studies.replicas import Replicas, replicas_of
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job

LAPTOP_ALPHAS = (1.0, 8.0, 32.0)
LAPTOP_FULL = 40
"""The noise level with all methods, in %."""
EPOCHS_BETWEEN_STOPS = 10
PERCENTS: Mapping[Scale, tuple[int, ...]] = {"paper": NOISE_PERCENT, "laptop": (20, 40, 80), "smoke": (20, 80)}
TABLE8_RHOS: Mapping[Scale, tuple[float, ...]] = {
    "paper": settings.RHO_GRID,
    "laptop": tuple(rho for rho in settings.RHO_GRID if rho >= 0.05),
    "smoke": (0.1,),
}
TABLE8_M: Mapping[Scale, int | None] = {"paper": settings.LABEL_NOISE[20].optim.m, "laptop": LAPTOP_M, "smoke": 10}
PAPERS_BEST_RHO = {20: 0.1, 40: 0.1, 60: 0.1, 80: 0.05}


RULES = (
    *protocol.RULES[:5],
    "Mixup's alpha is 1, 8 or 32, chosen like rho. SGD that stops early is evaluated every "
    f"{EPOCHS_BETWEEN_STOPS} epochs on a tenth of Fashion-MNIST, with clean or with noisy labels; it is ours.",
    "Basic augmentation as in the paper at 20 and 40 % noise. At 80 % SGD's training error after 200 epochs with it "
    "was 9.5 % (one pilot): there 100 epochs without augmentation, where a pilot ended at 0.0 %. Pilots at 20 and 40 % "
    "ended at 2.0 and 3.3 %. All had the seed 2000, which no other run has.",
    "Known when the plan was registered: the runs of an earlier protocol (40 epochs, no augmentation, 20 and 40 %), in "
    "which SAM's error was below SGD's by 3.5 and 13.0 points.",
)


TABLE8_RULES = (
    "Gate: at each noise level, a comparison is a test only if the runs without SAM end with a training error of at "
    f"most {protocol.MOST_NOISY_TRAIN_ERROR:g} %, on the labels that the first model predicts.",
    "The paper's rho (0.1, and 0.05 at 80 % noise) is compared with training without SAM, and with the best of the "
    "other rhos above 0: the one with the lowest mean. rho is not in units of the suggestion: the claim names values.",
    f"Three replicas of each cell (seeds 0 to {TABLE8_REPLICAS - 1}): 40 epochs without augmentation, as before. "
    "The error is on the clean validation set, a tenth of Fashion-MNIST, as in the paper's table.",
    "Tests: paired by seed, two-sided t-test, 5 %, Holm's correction over the six comparisons.",
    "Known when the plan was registered: one run of each cell, with the seed 1000. Its lowest error was at rho = 0.2 "
    "at 20 and 40 % noise and at 0.1 at 80 %, and the training error without SAM ended at 0.0 to 0.1 %. Those runs are "
    "in results/noise-and-rho-one-run.",
)


def label_noise_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 4: SGD, Mixup and SAM, and the latter two bootstrapped, on noisy labels."""
    return [_condition(scale, percent) for percent in PERCENTS[scale]]


def noise_and_rho_jobs(scale: Scale, known: Known) -> dict[tuple[str, str], list[Job]]:
    """Return the runs of Table 8, by noise and rho."""
    jobs = {}
    for percent in PERCENTS[scale]:
        base = _start(scale, percent)
        base = small_images(base) if scale == "laptop" else base
        held_out = replace(base.data, validation=settings.VALIDATION, bootstrap=True)
        for rho in (0.0, *TABLE8_RHOS[scale]):
            experiment = replace(base, data=held_out, optim=replace(base.optim, rho=rho, m=TABLE8_M[scale]))
            key = f"{percent} %", f"rho {rho:g}"
            jobs[key] = jobs_for(experiment, "/".join(("noise-and-rho", *key)), replica_seeds(scale)[:TABLE8_REPLICAS])
    return jobs


def noise_and_rho(scale: Scale, known: Known) -> Findings:
    """Table 8: the validation error of bootstrapped SAM for each rho and noise level."""
    percents, rhos = PERCENTS[scale], (0.0, *TABLE8_RHOS[scale])
    jobs = noise_and_rho_jobs(scale, known)
    replicas = replicas_of(jobs, known)
    names = {rho: f"rho = {rho:g}" if rho else "without SAM" for rho in rhos}
    runs = {(r, p): replace(replicas[f"{p} %", f"rho {r:g}"], name=names[r]) for p in percents for r in rhos}
    claimed = {
        f"{percent} % noise: rho = {rho:g} has a lower validation error than {what}.": contrast
        for percent in percents
        for rho in [PAPERS_BEST_RHO[percent] if scale != "smoke" else rhos[-1]]
        for what, contrast in _contrasts({r: runs[r, percent] for r in rhos}, rho, percent, scale).items()
    }
    family = Family(claimed.values())
    table = Table(
        title="Validation error of bootstrapped SAM",
        columns=("rho", *(f"{percent} % noise" for percent in percents)),
        rows=[[f"{rho:g}", *(_cell(runs[rho, p], rho, p, scale) for p in percents)] for rho in rhos],
        note="The validation set is clean.",
    )
    return findings(
        "noise-and-rho",
        scale,
        tables=[table],
        verdicts=[family.judge(claim, [contrast]) for claim, contrast in claimed.items()],
        hyperparameters=hyperparameters(
            "noise-and-rho", scale, [own[0].experiment for own in jobs.values()], ("rho", rhos), ("m", TABLE8_M[scale])
        ),
        planned=family.names,
        rules=TABLE8_RULES,
        notes=[f'The paper says: "{s.claim}" {s.own_numbers}' for s in NOISE_VALIDATION.statements],
    )


def _contrasts(runs: Mapping[float, Replicas], rho: float, percent: int, scale: Scale) -> dict[str, Contrast]:
    """Return the claims that a rho beats training without SAM, and the other rhos: the one of them that is best here.

    The second has no pairs before all replicas of the noise level are there: neither is it known which one is best nor
    whether training without SAM fits its labels.
    """
    quantity = f"validation error, {percent} % noise, %"
    others = [group for other, group in runs.items() if other not in (0.0, rho)]
    contrasts = {"training without SAM": runs[rho].lower_than(runs[0.0], quantity, "valid_error")}
    if others:
        complete = all(len(group.by_seed("valid_error")) == len(group.records) for group in runs.values())
        rival = min(others, key=lambda group: mean(group.by_seed("valid_error").values())) if complete else others[0]
        against = runs[rho].lower_than(rival, quantity, "valid_error")
        what = f"the best other rho ({', '.join(group.name.removeprefix('rho = ') for group in others)})"
        contrasts[what] = (
            against if complete else replace(against, lower={}, higher={}, higher_name="the best other rho")
        )
    error = mean(runs[0.0].by_seed("train_error").values())
    most = protocol.MOST_NOISY_TRAIN_ERROR
    if scale != "laptop" or any(c.waits for c in contrasts.values()) or error <= most:
        return contrasts
    why = f"without SAM the training error ends at {error:.1f} %, above {most:g} %"
    return {what: replace(c, lower={}, higher={}, untestable=why) for what, c in contrasts.items()}


def _cell(group: Replicas, rho: float, percent: int, scale: Scale) -> Cell:
    claimed = NOISE_VALIDATION.cells.get((rho, percent))
    lost = sum(record.state == "failed" for record in group.records)
    return group.cell(
        "valid_error",
        claimed=claimed.printed if claimed is not None and scale != "smoke" else None,
        note=f"{lost} of {len(group.records)} failed" if lost else None,
    )


def _start(scale: Scale, percent: int) -> Experiment:
    if scale == "paper":
        start = settings.without_sam(settings.LABEL_NOISE[percent])
    else:
        start = LAPTOP["fashion-mnist"] if scale == "laptop" else smoke("cnn-2")
    return replace(start, data=replace(start.data, label_noise=percent / 100))


def _condition(scale: Scale, percent: int) -> Condition:
    methods = _laptop_methods(percent) if scale == "laptop" else _methods(scale, percent)
    return Condition(
        labels=(),
        column=f"{percent} %",
        start=protocol.noisy(percent) if scale == "laptop" else _start(scale, percent),
        methods=methods,
        claimed=_claimed(scale, percent),
        most_train_error=protocol.MOST_NOISY_TRAIN_ERROR if scale == "laptop" else None,
    )


def _claimed(scale: Scale, percent: int) -> dict[tuple[str, str], Claimed]:
    """Return the paper's numbers; on a laptop its SAM, with m = 32, is next to SAM with m = 16."""
    if scale == "smoke":
        return {}
    names = {name: name.replace("SAM", protocol.SAM_WITH_M) if scale == "laptop" else name for name in NOISE_METHODS}
    return {(own, "test_error"): LABEL_NOISE[name, percent] for name, own in names.items()}


def _methods(scale: Scale, percent: int) -> tuple[Method, ...]:
    """Return the paper's methods with its settings, or few at the smoke scale."""
    sgd, longer = baselines(no_tuning)
    optim = settings.LABEL_NOISE[percent].optim
    rhos, m = ([optim.rho], optim.m) if scale == "paper" else ((0.05, 0.1), None)
    alphas = settings.MIXUP_ALPHAS if scale == "paper" else (1.0,)
    mixups = baselines(_with_mixup(alphas), "Mixup", after="SGD")
    rivals = ((sgd.name, longer.name), tuple(method.name for method in mixups))
    sam = Method(name="SAM", candidates=with_rho(rhos, m), after="SGD", against=rivals)
    early = () if scale == "paper" else (stopped_early(sgd, 1, noisy=True),)
    return (sgd, longer, *mixups, _bootstrap(mixups[0]), sam, _bootstrap(sam, against=((sam.name,),)), *early)


def _laptop_methods(percent: int) -> tuple[Method, ...]:
    """Return SGD (longer, or stopped early), Mixup, and SAM with the paper's m; at 40 % noise also the other arms."""
    sgd, longer = protocol.baselines()
    mixup = Method(name="Mixup", candidates=_with_mixup(LAPTOP_ALPHAS), after="SGD")
    clean, noisy = (stopped_early(sgd, EPOCHS_BETWEEN_STOPS, noisy=noisy) for noisy in (False, True))
    rivals = ((sgd.name, longer.name), (mixup.name,))
    with_m = protocol.sam((sgd, longer), m=protocol.M)
    if percent != LAPTOP_FULL:
        return (sgd, longer, mixup, clean, replace(with_m, against=(*rivals, (clean.name,))))
    controls = protocol.baselines(protocol.M)
    return (
        *(sgd, longer, *controls, mixup, clean, noisy),
        replace(protocol.sam((sgd, longer)), against=rivals),
        replace(with_m, against=(tuple(c.name for c in controls), *rivals, (clean.name,), (noisy.name,))),
        protocol.sam((sgd, longer), part=protocol.PART),
        _bootstrap(with_m, against=((with_m.name,),)),
    )


def _bootstrap(method: Method, against: tuple[tuple[str, ...], ...] = ()) -> Method:
    def relabeled(base: Experiment) -> list[Experiment]:
        return [replace(base, data=replace(base.data, bootstrap=True))]

    return Method(name=f"Bootstrap + {method.name}", candidates=relabeled, after=method.name, against=against)


def _with_mixup(alphas: Sequence[float]) -> Candidates:
    return lambda base: [replace(base, data=replace(base.data, mixup=alpha)) for alpha in alphas]


def _literature(scale: Scale) -> dict[str, dict[str, Cell]]:
    return {
        method: {
            f"{percent} %": Cell(claimed=LABEL_NOISE[method, percent].printed, note="cited")
            for percent in PERCENTS[scale]
            if (method, percent) in LABEL_NOISE.cells
        }
        for method in NOISE_LITERATURE
    }


def _shape(scale: Scale) -> dict[str, Any]:
    return {
        **protocol.table_shape(scale, (), RULES),
        "layout": "methods in rows",
        "accuracy": True,
        "literature": _literature(scale) if scale != "smoke" else {},
    }


TABLE4 = table_item("label-noise", label_noise_conditions, shape=_shape)
TABLE8 = item("noise-and-rho", noise_and_rho_jobs, noise_and_rho)
