"""Tables 1, 5 and 9 (Section 3.1, Appendices B.1 and C.3): models trained from scratch.

    flatmin reproduce table1       --scale laptop    # 70 minutes on two cores
    flatmin reproduce svhn-fashion --scale laptop    # 6 minutes on two cores
    flatmin reproduce rho-0.05     --scale laptop    # no runs beyond Table 1's

Without augmentation, on Fashion-MNIST, SAM with m = 16 has a lower error than SGD. With augmentation SGD with twice the
epochs is better, because 40 epochs are too few. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.appendix import CIFAR_RHO_005, SVHN_FASHION
from flatmin.lab.foret2021.claims.tables import AUGMENTATIONS, CIFAR, CIFAR_ROWS
from flatmin.lab.foret2021.item_findings import table_item
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
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.study import Scale

LABELS = {"label_columns": ("model", "augmentation")}
FAMILY_ROWS = {
    "wrn": "WRN-28-10 (200 epochs)",
    "shake-shake": "Shake-Shake (26 2x96d)",
    "pyramidnet-shakedrop": "PyramidNet+ShakeDrop",
    "pyramidnet": "PyramidNet",
}
"""The rows of Table 1, by the family of the model."""
SMOKE_FAMILIES = ("wrn-10-1", "shake-shake-26-2x2d", "pyramidnet-11-6", "pyramidnet-11-6-shakedrop")


def table1_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 1; on a laptop the first is the cheapest."""
    if scale == "paper":
        return _cifar_paper(CIFAR, None)
    if scale == "laptop":
        return [
            _laptop_condition("none", "fashion-mnist", every_m=True),
            _laptop_condition("basic", "cifar10"),
            _laptop_condition("basic", "cifar10", model="shake-shake-26-2x8d", lrs=LAPTOP_LRS[-1:], small=True),
        ]
    augments: tuple[Augment, ...] = ("basic", "cutout", "autoaugment", "none")
    return [_smoke_condition(model, augment) for model, augment in zip(SMOKE_FAMILIES, augments, strict=True)]


def svhn_fashion_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 5."""
    if scale == "paper":
        return [
            _paper_condition(row, augment, dataset, training, SVHN_FASHION, None)
            for (row, dataset), training in settings.SVHN_FASHION.items()
            for augment in ("basic", "autoaugment")
        ]
    if scale == "laptop":
        return [_laptop_condition("basic", "fashion-mnist", small=True)]
    return [_smoke_condition(SMOKE_FAMILIES[0], "basic"), _smoke_condition(SMOKE_FAMILIES[1], "cutout")]


def default_rho_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 9: Table 1's with rho = 0.05 throughout, nothing chosen."""
    rhos = (settings.DEFAULT_RHO,)
    if scale == "paper":
        return _cifar_paper(CIFAR_RHO_005, settings.DEFAULT_RHO)
    if scale == "laptop":
        cifar = _laptop_condition("basic", "cifar10", rhos=rhos)
        names = {"sgd": cifar.methods[0].name, "sam": cifar.methods[-1].name}
        return [replace(cifar, claimed=CIFAR_RHO_005.errors(FAMILY_ROWS["wrn"], "basic", "cifar10", **names))]
    return [_smoke_condition(SMOKE_FAMILIES[0], "basic", rhos=rhos)]


def _cifar_paper(source: Claims, rho: float | None) -> list[Condition]:
    return [
        _paper_condition(row, augment, dataset, settings.CIFAR[row, dataset], source, rho)
        for row in CIFAR_ROWS
        for augment in AUGMENTATIONS
        for dataset in ("cifar10", "cifar100")
    ]


def _paper_condition(
    row: str, augment: str, dataset: str, training: Training, source: Claims, rho: float | None
) -> Condition:
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
    return Condition(
        labels=(row, augment),
        column=dataset,
        start=start,
        methods=sgd_and_sam(training.rho if rho is None else rho, training.m),
        claimed=source.errors(row, augment, dataset),
    )


def sgd_and_sam(rho: float, m: int | None, doubles: bool = True) -> tuple[Method, ...]:
    """Return SGD, also for twice as many epochs if it doubles, and SAM, with nothing to choose."""
    sgd = Method(name="SGD", candidates=no_tuning)
    baselines = (sgd, double_epochs(sgd)) if doubles else (sgd,)
    names = tuple(method.name for method in baselines)
    return (*baselines, Method(name="SAM", candidates=with_rho([rho], m), after="SGD", against=(names,)))


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
    source, labels = _nearest_claims(start.model.name, augment, dataset)
    return Condition(
        labels=(start.model.name, f"{augment}, {SMALL_IMAGE_SIZE} pixels" if small else augment),
        column=dataset,
        start=start,
        methods=methods,
        claimed=source.errors(*labels, sgd=sgd, sam=sam),
    )


def _nearest_claims(model: str, augment: Augment, dataset: str) -> tuple[Claims, tuple[str, str, str]]:
    """Return where the paper's numbers are for the condition that is most like one of the laptop's."""
    family = next(prefix for prefix in FAMILY_ROWS if model.startswith(prefix))
    if dataset == "fashion-mnist":  # where "auto augment" is Cutout
        row = FAMILY_ROWS[family] if family == "shake-shake" else "Wide-ResNet-28-10"
        return SVHN_FASHION, (row, "autoaugment" if augment == "cutout" else "basic", dataset)
    row = FAMILY_ROWS["pyramidnet-shakedrop" if model.endswith("shakedrop") else family]
    return CIFAR, (row, augment if augment in AUGMENTATIONS else "basic", dataset)


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


TABLE1 = table_item("table1", table1_conditions, shape=lambda _: LABELS)
"""Table 1: CIFAR-10 and CIFAR-100, five models, three augmentations."""
SVHN_AND_FASHION = table_item("svhn-fashion", svhn_fashion_conditions, shape=lambda _: LABELS)
"""Table 5: SVHN and Fashion-MNIST, two models, two augmentations."""
DEFAULT_RHO = table_item("rho-0.05", default_rho_conditions, shape=lambda _: LABELS)
