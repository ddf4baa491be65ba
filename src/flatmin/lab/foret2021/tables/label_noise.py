"""Tables 4 and 8 (Section 3.3, Appendix C.1): models trained on noisy labels.

    flatmin reproduce label-noise   --scale laptop    # 75 minutes on two cores
    flatmin reproduce noise-and-rho --scale laptop    # 12 minutes on two cores

SAM is far better than SGD with noisy labels, and bootstrapped it is better still.
All verdicts are in docs/reproduction.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.appendix import NOISE_VALIDATION
from flatmin.lab.foret2021.claims.tables import LABEL_NOISE, NOISE_LITERATURE, NOISE_METHODS, NOISE_PERCENT
from flatmin.lab.foret2021.item_findings import findings, hyperparameters, item, table_item
from flatmin.lab.foret2021.protocol import MOST_NOISY_TRAIN_ERROR
from flatmin.lab.foret2021.scales import (
    LAPTOP,
    LAPTOP_DECAYS,
    LAPTOP_LRS,
    LAPTOP_M,
    LAPTOP_RHOS,
    SMALL_IMAGE_SIZE,
    small_images,
    smoke,
)
from flatmin.lab.spec.experiment import Experiment
from flatmin.lab.studies.conditions import (
    SEEDS,
    TUNING_SEED,
    Candidates,
    Condition,
    Method,
    MethodResult,
    baselines,
    double_epochs,
    no_tuning,
    sam_and_small_m,
    with_rates,
    with_rho,
)
from flatmin.lab.studies.contrasts import Contrast
from flatmin.lab.studies.findings import Cell, Findings, Table, Verdict
from flatmin.lab.studies.replicas import Replicas, replicas_of
from flatmin.lab.studies.study import Known, Scale
from flatmin.lab.sweeps.jobs import Job

LAPTOP_ALPHAS = (1.0, 8.0)
SMOKE_PERCENT = (20, 80)
LAPTOP_PERCENT, LAPTOP_FULL = (20, 40), 40
"""The noise levels of Table 4 on a laptop, and the one with all methods and images of full size."""
PERCENTS: Mapping[Scale, tuple[int, ...]] = {"paper": NOISE_PERCENT, "laptop": LAPTOP_PERCENT, "smoke": SMOKE_PERCENT}
TABLE8_PERCENTS: Mapping[Scale, tuple[int, ...]] = {**PERCENTS, "laptop": (20, 40, 80)}
TABLE8_RHOS: Mapping[Scale, tuple[float, ...]] = {
    "paper": settings.RHO_GRID,
    "laptop": tuple(rho for rho in settings.RHO_GRID if rho >= 0.05),
    "smoke": (0.1,),
}


def label_noise_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 4: SGD, Mixup and SAM, and the latter two bootstrapped, on noisy labels."""
    return [_condition(scale, percent) for percent in PERCENTS[scale]]


def noise_and_rho_jobs(scale: Scale, known: Known) -> dict[tuple[float, int], list[Job]]:
    """Return the runs of Table 8, by rho and noise."""
    jobs = {}
    for percent in TABLE8_PERCENTS[scale]:
        base = _start(scale, percent)
        base = small_images(base) if scale == "laptop" else base
        held_out = replace(base.data, validation=settings.VALIDATION, bootstrap=True)
        for rho in (0.0, *TABLE8_RHOS[scale]):
            experiment = replace(base, data=held_out, optim=replace(base.optim, rho=rho, m=base_m(scale)))
            name = f"noise-and-rho/{percent} %/rho {rho:g}"
            jobs[rho, percent] = [Job(experiment=replace(experiment, name=name), seed=TUNING_SEED)]
    return jobs


def noise_and_rho(scale: Scale, known: Known) -> Findings:
    """Table 8: the validation error of bootstrapped SAM for each rho and noise level."""
    percents, m, rhos = TABLE8_PERCENTS[scale], base_m(scale), (0.0, *TABLE8_RHOS[scale])
    jobs = noise_and_rho_jobs(scale, known)
    runs = replicas_of(jobs, known)
    num_missing = sum(not record.is_complete for run in runs.values() for record in run.records)
    best = ", ".join(f"{p} %: {_best_rho({rho: runs[rho, p] for rho in rhos})}" for p in percents)
    return findings(
        "noise-and-rho",
        scale,
        tables=[
            Table(
                title="Validation error of bootstrapped SAM",
                columns=("rho", *(f"{percent} % noise" for percent in percents)),
                rows=[[f"{rho:g}", *(_cell(runs[rho, p], rho, p, scale) for p in percents)] for rho in rhos],
                note="One run each; the validation set is clean.",
            )
        ],
        verdicts=[
            Verdict(
                claim=statement.claim,
                status="not tested" if num_missing else "inconclusive",
                evidence=f"One run each cannot tell a rho from its neighbor. Best here: {best}.",
            )
            for statement in NOISE_VALIDATION.statements
        ],
        hyperparameters=hyperparameters(
            "noise-and-rho", scale, [job.experiment for (job,) in jobs.values()], ("rho", rhos), ("m", m)
        ),
    )


def _cell(run: Replicas, rho: float, percent: int, scale: Scale) -> Cell:
    claimed, (record,) = NOISE_VALIDATION.cells.get((rho, percent)), run.records
    return run.cell(
        "valid_error",
        claimed=claimed.printed if claimed is not None and scale != "smoke" else None,
        note=None if record.state != "failed" else "diverged" if record.is_final else "failed",
    )


def _best_rho(runs: Mapping[float, Replicas]) -> str:
    errors = {rho: error for rho, run in runs.items() for error in run.by_seed("valid_error").values()}
    return f"rho {min(errors, key=errors.__getitem__):g}" if errors else "not run"


def base_m(scale: Scale) -> int | None:
    """Return how many examples share a perturbation at a scale."""
    return {"paper": settings.LABEL_NOISE[20].optim.m, "laptop": LAPTOP_M, "smoke": 10}[scale]


def _start(scale: Scale, percent: int) -> Experiment:
    if scale == "paper":
        start = settings.without_sam(settings.LABEL_NOISE[percent])
    else:
        start = LAPTOP["fashion-mnist"] if scale == "laptop" else smoke("cnn-2")
    return replace(start, data=replace(start.data, label_noise=percent / 100))


def _condition(scale: Scale, percent: int) -> Condition:
    if scale == "paper":
        optim = settings.LABEL_NOISE[percent].optim
        sgd, longer = baselines(no_tuning)
        sam: tuple[Method, ...] = (Method(name="SAM", candidates=with_rho([optim.rho], optim.m), after="SGD"),)
        alphas: Sequence[float] = settings.MIXUP_ALPHAS
    elif scale == "laptop":
        sgd, longer = baselines(with_rates(LAPTOP_LRS, LAPTOP_DECAYS))
        sam, alphas = sam_and_small_m(LAPTOP_RHOS, LAPTOP_M), LAPTOP_ALPHAS
    else:
        sgd, longer = baselines(no_tuning)
        sam, alphas = (Method(name="SAM", candidates=with_rho((0.05, 0.1)), after="SGD"),), (1.0,)
    mixup = Method(name="Mixup", candidates=_with_mixup(alphas), after="SGD")
    mixups = (mixup, double_epochs(mixup))
    rivals = ((sgd.name, longer.name), tuple(m.name for m in mixups))
    sam = tuple(replace(m, against=rivals) if m.name == "SAM" else m for m in sam)
    claimed = {(name, "test_error"): LABEL_NOISE[name, percent] for name in NOISE_METHODS if scale != "smoke"}
    start, column = _start(scale, percent), _column(percent, scale)
    gate = MOST_NOISY_TRAIN_ERROR if scale == "laptop" else None
    if _is_small(percent, scale):
        methods = (sgd, longer, *mixups, *(m for m in sam if m.name == "SAM"))
        start = small_images(start)
        return Condition(labels=(), column=column, start=start, methods=methods, claimed=claimed, most_train_error=gate)
    methods = (
        sgd,
        longer,
        *mixups,
        Method(name="Bootstrap + Mixup", candidates=_bootstrapped, after="Mixup"),
        *sam,
        *(
            Method(name=f"Bootstrap + {m.name}", candidates=_bootstrapped, after=m.name, against=((m.name,),))
            for m in sam
            if m.name.startswith("SAM")
        ),
    )
    return Condition(labels=(), column=column, start=start, methods=methods, claimed=claimed, most_train_error=gate)


def _is_small(percent: int, scale: Scale) -> bool:
    return scale == "laptop" and percent != LAPTOP_FULL


def _column(percent: int, scale: Scale) -> str:
    return f"{percent} % ({SMALL_IMAGE_SIZE} pixels)" if _is_small(percent, scale) else f"{percent} %"


def _with_mixup(alphas: Sequence[float]) -> Candidates:
    return lambda base: [replace(base, data=replace(base.data, mixup=alpha)) for alpha in alphas]


def _bootstrapped(base: Experiment) -> list[Experiment]:
    return [replace(base, data=replace(base.data, bootstrap=True))]


def _literature(scale: Scale) -> dict[str, dict[str, Cell]]:
    return {
        method: {
            _column(percent, scale): Cell(claimed=LABEL_NOISE[method, percent].printed, note="cited")
            for percent in PERCENTS[scale]
            if (method, percent) in LABEL_NOISE.cells
        }
        for method in NOISE_LITERATURE
    }


def _dropped(entries: Sequence[MethodResult]) -> list[tuple[str, list[Contrast]]]:
    """Return the comparisons at 80 % noise, which were planned on a laptop and dropped when other p-values were known.

    They stay in the family that Holm's correction is for.
    """
    columns = {entry.condition.column for entry in entries}
    if columns != {_column(percent, "laptop") for percent in LAPTOP_PERCENT}:
        return []
    quantity, num = "80 % noise: test error, %", len(SEEDS)
    waiting = [
        Contrast(quantity=quantity, lower_name="SAM", higher_name=rival, lower={}, higher={}, num_asked=num)
        for rival in ("SGD", "Mixup")
    ]
    return [("80 %: SAM has a lower test error than SGD and than Mixup.", waiting)]


TABLE4 = table_item(
    "label-noise",
    label_noise_conditions,
    _dropped,
    shape=lambda scale: {
        "label_columns": (),
        "layout": "methods in rows",
        "accuracy": True,
        "literature": _literature(scale) if scale != "smoke" else {},
    },
)
TABLE8 = item("noise-and-rho", noise_and_rho_jobs, noise_and_rho)
