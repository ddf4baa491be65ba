"""Tables 1, 5 and 9 (Section 3.1, Appendices B.1 and C.3): models trained from scratch.

    flatmin reproduce table1       --scale laptop    # 70 minutes on two cores
    flatmin reproduce svhn-fashion --scale laptop    # 6 minutes on two cores
    flatmin reproduce rho-0.05     --scale laptop    # no runs beyond Table 1's

Without augmentation on Fashion-MNIST, SAM with one perturbation per batch is not significantly better.
All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims import appendix as claims_appendix
from flatmin.lab.foret2021.claims import tables as claims
from flatmin.lab.foret2021.claims.tables import AUGMENTATIONS, CIFAR_ROWS, Classification
from flatmin.lab.foret2021.item_findings import table_findings
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
from flatmin.lab.foret2021.settings import Training
from flatmin.lab.spec.experiment import Augment, Data, Experiment, Model
from flatmin.lab.studies.conditions import (
    Condition,
    Method,
    baselines,
    by_micro_batches,
    double_epochs,
    no_tuning,
    sam_and_small_m,
    with_rates,
    with_rho,
)
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.printed import Claimed, Claims
from flatmin.lab.sweeps.runners import Runner

LABELS = ("model", "augmentation")
FAMILY_ROWS = {
    "wrn": "WRN-28-10 (200 epochs)",
    "shake-shake": "Shake-Shake (26 2x96d)",
    "pyramidnet-shakedrop": "PyramidNet+ShakeDrop",
    "pyramidnet": "PyramidNet",
}
"""The rows of Table 1, by the family of the model."""
SMOKE_FAMILIES = ("wrn-10-1", "shake-shake-26-2x2d", "pyramidnet-11-6", "pyramidnet-11-6-shakedrop")


def table1(scale: Scale, runner: Runner) -> Findings:
    """Table 1: CIFAR-10 and CIFAR-100, five models, three augmentations."""
    return _table("table1", scale, runner, table1_conditions(scale), claims.CIFAR, "cifar")


def table1_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 1."""
    return {"paper": _cifar_paper, "laptop": _small_images_laptop, "smoke": _families_smoke}[scale]()


def svhn_fashion(scale: Scale, runner: Runner) -> Findings:
    """Table 5: SVHN and Fashion-MNIST, two models, two augmentations."""
    conditions = svhn_fashion_conditions(scale)
    return _table("svhn-fashion", scale, runner, conditions, claims_appendix.SVHN_FASHION, "svhn-fashion")


def svhn_fashion_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 5."""
    if scale == "paper":
        return _svhn_fashion_paper()
    if scale == "laptop":
        return [_laptop_condition("basic", "fashion-mnist", small=True)]
    return [_smoke_condition(SMOKE_FAMILIES[0], "basic"), _smoke_condition(SMOKE_FAMILIES[1], "cutout")]


def cifar_default_rho(scale: Scale, runner: Runner) -> Findings:
    """Table 9: the conditions of Table 1 with rho = 0.05 throughout, nothing chosen."""
    if scale == "paper":
        conditions = _cifar_paper(settings.DEFAULT_RHO)
    elif scale == "laptop":
        rhos, row = (settings.DEFAULT_RHO,), FAMILY_ROWS["wrn"]
        cifar = _laptop_condition("basic", "cifar10", rhos=rhos)
        claimed = {
            (cifar.methods[i].name, "test_error"): claims_appendix.CIFAR_RHO_005[
                Classification(row, "basic", "cifar10", key)
            ]
            for i, key in ((0, "sgd"), (-1, "sam"))
        }
        conditions = [replace(cifar, claimed=claimed)]
    else:
        conditions = [_smoke_condition(SMOKE_FAMILIES[0], "basic", rhos=(settings.DEFAULT_RHO,))]
    return _table("rho-0.05", scale, runner, conditions, claims_appendix.CIFAR_RHO_005, "cifar")


def _table(
    item: str, scale: Scale, runner: Runner, conditions: Sequence[Condition], claimed: Claims[Any], source: str
) -> Findings:
    return table_findings(item, scale, runner, conditions, claimed, source, label_columns=LABELS)


def _cifar_paper(rho: float | None = None) -> list[Condition]:
    source = claims.CIFAR if rho is None else claims_appendix.CIFAR_RHO_005
    return [
        _paper_condition(row, augment, dataset, settings.CIFAR[row, dataset], source, rho)
        for row in CIFAR_ROWS
        for augment in AUGMENTATIONS
        for dataset in ("cifar10", "cifar100")
    ]


def _svhn_fashion_paper() -> list[Condition]:
    return [
        _paper_condition(row, augment, dataset, training, claims_appendix.SVHN_FASHION, None)
        for (row, dataset), training in settings.SVHN_FASHION.items()
        for augment in ("basic", "autoaugment")
    ]


def _paper_condition(
    row: str, augment: str, dataset: str, training: Training, source: Claims[Classification], rho: float | None
) -> Condition:
    chosen = training.rho if rho is None else rho
    start = Experiment(
        data=Data(
            name=dataset,
            augment=settings.small_image_augment(dataset, augment),
            batch_size=training.batch_size,
            drop_last=settings.DROP_LAST,
            cutout_shared=settings.CUTOUT_SHARED,
            extra=dataset == "svhn",
        ),
        model=training.network(),
        optim=training.optim(rho=0.0),
        epochs=training.epochs,
    )
    claimed: dict[tuple[str, str], Claimed] = {
        (name, "test_error"): source[Classification(row, augment, dataset, key)]
        for name, key in (("SGD", "sgd"), ("SAM", "sam"))
    }
    return Condition(
        labels=(row, augment), column=dataset, start=start, methods=sgd_and_sam(chosen, training.m), claimed=claimed
    )


def sgd_and_sam(rho: float, m: int | None, doubles: bool = True) -> tuple[Method, ...]:
    """Return SGD, also for twice as many epochs if it doubles, and SAM, with nothing to choose."""
    sgd = Method(name="SGD", candidates=no_tuning)
    baselines = (sgd, double_epochs(sgd)) if doubles else (sgd,)
    names = tuple(method.name for method in baselines)
    return (*baselines, Method(name="SAM", candidates=with_rho([rho], m), after="SGD", against=(names,)))


def _small_images_laptop() -> list[Condition]:
    """Return Table 1's conditions for two cores; the first is the cheapest."""
    return [
        _laptop_condition("none", "fashion-mnist", every_m=True),
        _laptop_condition("basic", "cifar10"),
        _laptop_condition("basic", "cifar10", model="shake-shake-26-2x8d", lrs=LAPTOP_LRS[-1:], small=True),
    ]


def _laptop_condition(
    augment: Augment,
    dataset: str,
    model: str | None = None,
    rhos: Sequence[float] = LAPTOP_RHOS,
    lrs: Sequence[float] = LAPTOP_LRS,
    every_m: bool = False,
    small: bool = False,
) -> Condition:
    """Return a condition with the paper's m, an eighth of a batch; with every_m also with one eps for the batch."""
    start = LAPTOP[dataset]
    start = replace(start, data=replace(start.data, augment=augment))
    if model is not None:
        start = replace(start, model=Model(name=model))
    if small:
        start = small_images(start)
    rates = with_rates(lrs, LAPTOP_DECAYS)
    if every_m:
        methods, sgd, sam = (*baselines(rates), *sam_and_small_m(rhos, LAPTOP_M)), "SGD", "SAM"
    else:
        methods = by_micro_batches(rates, rhos, LAPTOP_M)
        sgd, sam = methods[0].name, methods[-1].name
    return Condition(
        labels=(start.model.name, f"{augment}, {SMALL_IMAGE_SIZE} pixels" if small else augment),
        column=dataset,
        start=start,
        methods=methods,
        claimed=_nearest_claims(start.model.name, augment, dataset, sgd, sam),
    )


def _nearest_claims(model: str, augment: Augment, dataset: str, sgd: str, sam: str) -> dict[tuple[str, str], Claimed]:
    """Return the paper's numbers for the condition that is most like one of the laptop's."""
    family = next(prefix for prefix in FAMILY_ROWS if model.startswith(prefix))
    if dataset == "fashion-mnist":  # where "auto augment" is Cutout
        source = claims_appendix.SVHN_FASHION
        row = FAMILY_ROWS[family] if family == "shake-shake" else "Wide-ResNet-28-10"
        column = "autoaugment" if augment == "cutout" else "basic"
    else:
        source, row = claims.CIFAR, FAMILY_ROWS["pyramidnet-shakedrop" if model.endswith("shakedrop") else family]
        column = augment if augment in AUGMENTATIONS else "basic"
    pairs = ((sgd, "sgd"), (sam, "sam"))
    return {(name, "test_error"): source[Classification(row, column, dataset, key)] for name, key in pairs}


def _families_smoke() -> list[Condition]:
    augments: tuple[Augment, ...] = ("basic", "cutout", "autoaugment", "none")
    return [_smoke_condition(model, augment) for model, augment in zip(SMOKE_FAMILIES, augments, strict=True)]


def _smoke_condition(model: str, augment: Augment, rhos: Sequence[float] = (0.05, 0.1)) -> Condition:
    start = smoke(model)
    start = replace(start, data=replace(start.data, augment=augment))
    return Condition(
        labels=(model, augment),
        column=start.data.name,
        start=start,
        methods=(*baselines(with_rates((0.1,), (5e-4, 1e-3))), *sam_and_small_m(rhos, 10)),
        claimed={},
    )
