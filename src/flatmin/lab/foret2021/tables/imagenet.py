"""Table 2 (Section 3.1): ResNets on ImageNet, for more and more epochs.

    flatmin reproduce imagenet --scale laptop    # 12 minutes on two cores

On CIFAR-10 at 16 x 16 pixels rho = 0.05 changes nothing measurable, for 20, 40 or 80 epochs.
All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.tables import IMAGENET as CLAIMS
from flatmin.lab.foret2021.item_findings import table_item
from flatmin.lab.foret2021.protocol import MOST_TRAIN_ERROR
from flatmin.lab.foret2021.scales import LAPTOP, smoke
from flatmin.lab.foret2021.tables.from_scratch import sgd_and_sam
from flatmin.lab.studies.conditions import Condition, MethodResult
from flatmin.lab.studies.contrasts import Contrast
from flatmin.lab.studies.study import Scale

LAPTOP_IMAGE_SIZE = 16
"""Half of CIFAR-10's: a quarter of the cost."""


def _over_epochs(entries: Sequence[MethodResult]) -> list[tuple[str, list[Contrast]]]:
    """Return the claims that with SAM the error falls with more epochs, and that without it rises in the end.

    Both numbers of epochs must be enough for SGD to fit.
    """
    _, falls, rises = (statement.claim for statement in CLAIMS.statements)
    unfit = {e.condition.name: e.unfit_note for e in entries if e.method.name == "SGD"}
    contrasts: dict[str, list[Contrast]] = {"SAM": [], "SGD": []}
    for model in dict.fromkeys(e.condition.labels[0] for e in entries):
        for method, claimed in contrasts.items():
            own = [e for e in entries if e.condition.labels[0] == model and e.method.name == method]
            own.sort(key=lambda e: e.condition.start.epochs)
            for shorter, longer in pairwise(own if method == "SAM" else own[-2:]):
                low, high = (replace(e.replicas, name=e.condition.column) for e in (shorter, longer))
                if method == "SAM":
                    low, high = high, low
                contrast = low.lower_than(high, f"test error of {model} with {method}, %", "test_error")
                notes = {e.condition.column: unfit[e.condition.name] for e in (shorter, longer)}
                gate = [f"{column}: {note}" for column, note in notes.items() if note is not None]
                claimed.append(contrast if contrast.waits else contrast.gated(gate))
    return [(falls, contrasts["SAM"]), (rises, contrasts["SGD"])]


def imagenet_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 2; at other scales what it asks: more and more epochs, with and without SAM."""
    if scale == "paper":
        return [_paper_condition(model, epochs) for model, epochs in settings.IMAGENET]
    start = smoke("wrn-10-1") if scale == "smoke" else LAPTOP["cifar10"]
    if scale == "laptop":
        small = replace(start.data, augment="basic", image_size=LAPTOP_IMAGE_SIZE)
        start = replace(start, data=small, epochs=start.epochs // 2)
    return [
        Condition(
            labels=(start.model.name,),
            column=f"{epochs} epochs",
            start=replace(start, epochs=epochs, evaluate_every=epochs),
            methods=sgd_and_sam(settings.DEFAULT_RHO, None, doubles=False),
            claimed=CLAIMS.errors("resnet-50", papers_epochs, 1) if scale == "laptop" else {},
            most_train_error=MOST_TRAIN_ERROR if scale == "laptop" else None,
        )
        for papers_epochs, epochs in ((100, start.epochs), (200, 2 * start.epochs), (400, 4 * start.epochs))
    ]


def _paper_condition(model: str, epochs: int) -> Condition:
    paper = settings.IMAGENET[model, epochs]
    data = replace(
        paper.data,
        image_size=settings.IMAGENET_IMAGE_SIZE,
        resize=settings.RESIZE,
        crop_padding=settings.CROP_PADDING,
    )
    top5 = {(name, "test_top5_error"): claimed for (name, _), claimed in CLAIMS.errors(model, epochs, 5).items()}
    return Condition(
        labels=(model,),
        column=f"{epochs} epochs",
        start=replace(settings.without_sam(paper), data=data),
        methods=sgd_and_sam(paper.optim.rho, paper.optim.m, doubles=False),
        claimed=CLAIMS.errors(model, epochs, 1) | top5,
    )


IMAGENET = table_item(
    "imagenet",
    imagenet_conditions,
    _over_epochs,
    lambda scale: {
        "label_columns": ("model",),
        "metrics": ("test_error", "test_top5_error") if scale == "paper" else ("test_error",),
    },
)
"""Table 2: ResNets on ImageNet for 100, 200 and 400 epochs, top-1 and top-5 error; nothing doubles."""
