"""Tables 1, 5 and 9 (Section 3.1, Appendices B.1 and C.3): models trained from scratch.

    flatmin reproduce table1       --scale laptop    # five hours on two cores
    flatmin reproduce svhn-fashion --scale laptop    # half an hour on two cores
    flatmin reproduce rho-0.05     --scale laptop    # twenty minutes beyond Table 1

On a laptop the protocol is `protocol`'s: 200 epochs, until the model fits. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.foret2021 import protocol, settings
from flatmin.lab.foret2021.claims.appendix import CIFAR_RHO_005, SVHN_FASHION
from flatmin.lab.foret2021.claims.tables import AUGMENTATIONS, CIFAR, CIFAR_ROWS
from flatmin.lab.foret2021.item_findings import table_item
from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.spec.experiment import Augment, Experiment
from flatmin.lab.studies.conditions import Condition
from flatmin.lab.studies.methods import Method, baselines, no_tuning, sam_and_small_m, with_rates, with_rho
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.study import Scale

SMOKE_FAMILIES = ("wrn-10-1", "shake-shake-26-2x2d", "pyramidnet-11-6", "pyramidnet-11-6-shakedrop")


def table1_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 1; on a laptop the first is the cheapest."""
    if scale == "paper":
        return _cifar_paper(CIFAR, None)
    if scale == "laptop":
        return [
            _laptop_condition(protocol.cifar10(augment="basic"), protocol.all_arms()),
            _laptop_condition(protocol.cifar10(augment="cutout"), protocol.few_arms()),
            _laptop_condition(protocol.cifar10(), protocol.few_arms()),
        ]
    augments: tuple[Augment, ...] = ("basic", "cutout", "autoaugment", "none")
    return [_smoke_condition(model, augment) for model, augment in zip(SMOKE_FAMILIES, augments, strict=True)]


def svhn_fashion_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 5."""
    if scale == "paper":
        return [
            _paper_condition(row, augment, experiment, SVHN_FASHION, None)
            for (row, _), experiment in settings.SVHN_FASHION.items()
            for augment in ("basic", "autoaugment")
        ]
    if scale == "laptop":
        start = protocol.fashion_mnist(augment="basic")
        return [_laptop_condition(start, protocol.few_arms(), SVHN_FASHION, "Wide-ResNet-28-10")]
    return [_smoke_condition(SMOKE_FAMILIES[0], "basic"), _smoke_condition(SMOKE_FAMILIES[1], "cutout")]


def default_rho_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 9: Table 1's with rho = 0.05 throughout, nothing chosen."""
    rhos = (settings.DEFAULT_RHO,)
    if scale == "paper":
        return _cifar_paper(CIFAR_RHO_005, settings.DEFAULT_RHO)
    if scale == "laptop":
        sgd, control = protocol.baselines(), protocol.baselines(protocol.M)
        rivals = tuple(method.name for method in control)
        sam = Method(name=protocol.SAM_WITH_M, candidates=with_rho(rhos, protocol.M), after="SGD", against=(rivals,))
        return [_laptop_condition(protocol.cifar10(augment="basic"), (*sgd, *control, sam), CIFAR_RHO_005)]
    return [_smoke_condition(SMOKE_FAMILIES[0], "basic", rhos=rhos)]


def _cifar_paper(source: Claims, rho: float | None) -> list[Condition]:
    return [
        _paper_condition(row, augment, settings.CIFAR[row, dataset], source, rho)
        for row in CIFAR_ROWS
        for augment in AUGMENTATIONS
        for dataset in ("cifar10", "cifar100")
    ]


def _paper_condition(row: str, augment: str, paper: Experiment, source: Claims, rho: float | None) -> Condition:
    dataset = paper.data.name
    data = replace(
        paper.data,
        augment=settings.small_image_augment(dataset, augment),
        cutout_shared=settings.CUTOUT_SHARED,
        extra=dataset == "svhn",
    )
    return Condition(
        labels=(row, augment),
        column=dataset,
        start=replace(settings.without_sam(paper), data=data),
        methods=sgd_and_sam(paper.optim.rho if rho is None else rho, paper.optim.m),
        claimed=source.errors(row, augment, dataset),
    )


def sgd_and_sam(rho: float | str, m: int | None, doubles: bool = True) -> tuple[Method, ...]:
    """Return SGD, also for twice as many epochs if it doubles, and SAM, with nothing to choose."""
    sgd = baselines(no_tuning)[: 2 if doubles else 1]
    names = tuple(method.name for method in sgd)
    return (*sgd, Method(name="SAM", candidates=with_rho([rho], m), after="SGD", against=(names,)))


def _laptop_condition(
    start: Experiment, methods: tuple[Method, ...], source: Claims = CIFAR, row: str = CIFAR_ROWS[0]
) -> Condition:
    """Return a condition of the laptop's protocol; the paper's numbers are next to SGD and to SAM with its m.

    They are for the condition that is most like it: where the paper always augments, basic augmentation.
    """
    augment, dataset = start.data.augment, start.data.name
    return Condition(
        labels=(start.model.name, augment),
        column=dataset,
        start=start,
        methods=methods,
        claimed=source.errors(row, "basic" if augment == "none" else augment, dataset, sam=protocol.SAM_WITH_M),
        most_train_error=protocol.MOST_TRAIN_ERROR,
    )


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


def _shape(scale: Scale) -> dict[str, Any]:
    return protocol.table_shape(scale, ("model", "augmentation"))


TABLE1 = table_item("table1", table1_conditions, shape=_shape)
"""Table 1: CIFAR-10 and CIFAR-100, five models, three augmentations."""
SVHN_AND_FASHION = table_item("svhn-fashion", svhn_fashion_conditions, shape=_shape)
"""Table 5: SVHN and Fashion-MNIST, two models, two augmentations."""
DEFAULT_RHO = table_item("rho-0.05", default_rho_conditions, shape=_shape)
