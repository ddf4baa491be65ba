"""Table 2 (Section 3.1): ResNets on ImageNet, for more and more epochs.

    flatmin reproduce imagenet --scale laptop    # 40 minutes on two cores

Not judged yet. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims import tables as claims
from flatmin.lab.foret2021.claims.tables import ImageNetCell
from flatmin.lab.foret2021.item_findings import table_findings
from flatmin.lab.foret2021.scales import LAPTOP, smoke
from flatmin.lab.foret2021.tables.from_scratch import sgd_and_sam
from flatmin.lab.spec.experiment import Data, Experiment, Model
from flatmin.lab.studies.conditions import Condition, MethodResult
from flatmin.lab.studies.contrasts import Contrast, contrast_between, metric_by_seed
from flatmin.lab.studies.findings import Findings
from flatmin.lab.studies.item import Scale
from flatmin.lab.sweeps.runners import Runner


def imagenet(scale: Scale, runner: Runner) -> Findings:
    """Table 2: ResNets on ImageNet for 100, 200 and 400 epochs, top-1 and top-5 error; nothing doubles."""
    return table_findings(
        "imagenet",
        scale,
        runner,
        imagenet_conditions(scale),
        claims.IMAGENET,
        "imagenet",
        further=_over_epochs,
        label_columns=("model",),
        metrics=("test_error", "test_top5_error") if scale == "paper" else ("test_error",),
    )


def _over_epochs(entries: Sequence[MethodResult]) -> list[tuple[str, list[Contrast]]]:
    """Return the claims that with SAM the error falls with more epochs, and that without it rises in the end."""
    _, falls, rises = (statement.claim for statement in claims.IMAGENET.statements)
    read = partial(metric_by_seed, metric="test_error")
    falling: list[Contrast] = []
    rising: list[Contrast] = []
    for model in dict.fromkeys(e.condition.labels[0] for e in entries):
        for method, contrasts in (("SAM", falling), ("SGD", rising)):
            own = [e for e in entries if e.condition.labels[0] == model and e.method.name == method]
            own.sort(key=lambda e: e.condition.start.epochs)
            replicas = [(e.condition.column, e.replicas) for e in own]
            for shorter, longer in pairwise(replicas if method == "SAM" else replicas[-2:]):
                low, high = (longer, shorter) if method == "SAM" else (shorter, longer)
                contrasts.append(contrast_between(f"test error of {model} with {method}, %", low, high, read))
    return [(falls, falling), (rises, rising)]


def imagenet_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 2."""
    if scale == "paper":
        return [_imagenet_contest(model, epochs) for model, epochs in settings.IMAGENET]
    return _epochs_contests(scale)


def _imagenet_contest(model: str, epochs: int) -> Condition:
    training = settings.IMAGENET[model, epochs]
    start = Experiment(
        data=Data(
            name="imagenet",
            augment="imagenet",
            batch_size=training.batch_size,
            image_size=settings.IMAGENET_IMAGE_SIZE,
            resize=settings.RESIZE,
            crop_padding=settings.CROP_PADDING,
            drop_last=settings.DROP_LAST,
        ),
        model=Model(name=model),
        optim=training.optim(rho=0.0),
        epochs=epochs,
    )
    claimed = {
        (name, metric): claims.IMAGENET[ImageNetCell(model, epochs, key, top)]
        for name, key in (("SGD", "sgd"), ("SAM", "sam"))
        for metric, top in (("test_error", 1), ("test_top5_error", 5))
    }
    methods = sgd_and_sam(training.rho, training.m, doubles=False)
    return Condition(labels=(model,), column=f"{epochs} epochs", start=start, methods=methods, claimed=claimed)


LAPTOP_IMAGE_SIZE = 16
"""Half of CIFAR-10's: a quarter of the cost."""


def _epochs_contests(scale: Scale) -> list[Condition]:
    """Return what Table 2 asks, on a small scale: more and more epochs, with and without SAM."""
    conditions = []
    for factor in (1, 2, 4):
        if scale == "laptop":
            start = LAPTOP["cifar10"]
            start = replace(start, data=replace(start.data, augment="basic", image_size=LAPTOP_IMAGE_SIZE))
        else:
            start = smoke("wrn-10-1")
        epochs = factor * (start.epochs if scale == "smoke" else start.epochs // 2)
        start = replace(start, epochs=epochs, evaluate_every=epochs)
        methods = sgd_and_sam(settings.IMAGENET["resnet-50", 100].rho, None, doubles=False)
        claimed = {
            (name, "test_error"): claims.IMAGENET[ImageNetCell("resnet-50", 100 * factor, key, 1)]
            for name, key in (("SGD", "sgd"), ("SAM", "sam"))
            if scale == "laptop"
        }
        conditions.append(
            Condition(
                labels=(start.model.name,), column=f"{epochs} epochs", start=start, methods=methods, claimed=claimed
            )
        )
    return conditions
