"""Tables 3 and 10 (Section 3.2, Appendices C.2 and C.3): fine-tuning of pretrained models.

    flatmin reproduce fine-tuning          --scale laptop    # 25 minutes on two cores
    flatmin reproduce fine-tuning-rho-0.05 --scale laptop    # 8 minutes more

SAM is far worse than training twice as long: 3 epochs are too few. All verdicts are in docs/reproduction.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.appendix import FINETUNING_RHO_005
from flatmin.lab.foret2021.claims.tables import FINETUNING, FINETUNING_DATASETS, PREVIOUS_BEST, PREVIOUS_METHODS
from flatmin.lab.foret2021.item_findings import table_item
from flatmin.lab.foret2021.protocol import MOST_TRAIN_ERROR
from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import VALIDATION, Condition, Method, double_epochs, no_tuning, with_rho
from flatmin.lab.studies.findings import Cell, Row, Table
from flatmin.lab.studies.printed import Claims
from flatmin.lab.studies.study import Scale
from flatmin.lab.sweeps.jobs import Job

CHECKPOINTS = Path("checkpoints")
"""Where pretrained weights are, relative to the working directory: MODEL.safetensors (or .pth, .pt)."""
LAPTOP_MODEL = "timm/tf_efficientnet_lite0"
LAPTOP_CHECKPOINT = "checkpoints/efficientnet-lite0.pth"
LAPTOP_RHOS: tuple[float, ...] = (0.01, 0.02, 0.05)
SMOKE_PRETRAINING = Job(
    experiment=replace(smoke("wrn-10-1"), name="fine-tuning/pretraining", data=replace(smoke("wrn-10-1").data, seed=1))
)


def fine_tuning_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 3."""
    if scale != "paper":
        return [_small_condition(scale, FINETUNING, rho=None)]
    return [
        _paper_condition(model, dataset, FINETUNING, rho=None)
        for dataset in FINETUNING_DATASETS
        for model in settings.FINETUNING
    ]


def default_rho_conditions(scale: Scale) -> list[Condition]:
    """Return the conditions of Table 10: EfficientNet-b7 with rho = 0.05 throughout, nothing chosen."""
    if scale != "paper":
        return [_small_condition(scale, FINETUNING_RHO_005, settings.DEFAULT_RHO)]
    return [
        _paper_condition("efficientnet-b7", dataset, FINETUNING_RHO_005, settings.DEFAULT_RHO)
        for dataset in FINETUNING_DATASETS
        if dataset != "imagenet"  # not in the paper's table: its rho is 0.05 anyway
    ]


def pretraining(scale: Scale) -> dict[str, list[Job]]:
    """Return the run whose model the smallest scale fine-tunes; at the others the weights are a file."""
    return {"pretraining": [SMOKE_PRETRAINING]} if scale == "smoke" else {}


def _methods(rhos: Sequence[float], m: int | None) -> tuple[Method, ...]:
    base = Method(name="without SAM", candidates=no_tuning)
    longer = double_epochs(base)
    sam = Method(name="SAM", candidates=with_rho(rhos, m), after=base.name, against=((base.name, longer.name),))
    return base, longer, sam


def _paper_condition(model: str, dataset: str, source: Claims, rho: float | None) -> Condition:
    paper, small_images = settings.finetuning(model, dataset), dataset in settings.SMALL_IMAGES
    start = replace(
        settings.without_sam(paper),
        data=replace(
            paper.data,
            augment="autoaugment" if small_images else "imagenet",
            image_size=settings.FINETUNING[model].image_size,
            resize=settings.RESIZE,
            crop_padding=None if small_images else settings.CROP_PADDING,
            cutout_shared=settings.CUTOUT_SHARED and small_images,
        ),
        model=replace(
            paper.model,
            checkpoint=str(CHECKPOINTS / f"{model}.safetensors"),
            head="keep" if dataset == "imagenet" else "new",
            freeze_batch_norm=True,
            dropout=settings.FINETUNING_DROPOUT,
            drop_connect=settings.FINETUNING_DROP_CONNECT,
        ),
    )
    fixed = rho if rho is not None else settings.DEFAULT_RHO if dataset == "imagenet" else None
    # On ImageNet the paper's number without SAM is the checkpoint's own.
    checkpoint = [Method(name="checkpoint", candidates=lambda base: [replace(base, epochs=0)])]
    methods = _methods(settings.RHO_GRID if fixed is None else (fixed,), paper.optim.m)
    return Condition(
        labels=(dataset,),
        column=model,
        start=start,
        methods=(*checkpoint, *methods) if dataset == "imagenet" else methods,
        claimed=source.errors(dataset, model, sgd="checkpoint" if dataset == "imagenet" else "without SAM"),
        tuning_epochs=settings.finetuning(model, dataset, held_out=VALIDATION).epochs,
    )


def _small_condition(scale: Scale, source: Claims, rho: float | None) -> Condition:
    if scale == "laptop":
        start = Experiment(
            data=Data(name="flowers102", augment="imagenet", batch_size=32, image_size=64),
            model=Model(name=LAPTOP_MODEL, checkpoint=LAPTOP_CHECKPOINT, head="new", freeze_batch_norm=True),
            optim=Optim(lr=0.02, weight_decay=1e-5, clip_norm=1.0),
            epochs=3,
            evaluate_every=3,
        )
        rhos = LAPTOP_RHOS
    else:
        start = smoke("wrn-10-1")
        checkpoint = f"run:{SMOKE_PRETRAINING.name}"
        start = replace(start, model=replace(start.model, checkpoint=checkpoint, head="new", freeze_batch_norm=True))
        rhos = (0.02, 0.05)
    return Condition(
        labels=(start.data.name,),
        column=start.model.name,
        start=start,
        methods=_methods(rhos if rho is None else (rho,), None),
        claimed=source.errors("flowers102", "efficientnet-b7", sgd="without SAM") if scale == "laptop" else {},
        most_train_error=MOST_TRAIN_ERROR if scale == "laptop" else None,
    )


def _previous_best() -> Table:
    rows: list[Row] = []
    for dataset in FINETUNING_DATASETS:
        bests = [PREVIOUS_BEST[dataset, model] for model in settings.FINETUNING]
        notes = [f"{best.method}, {PREVIOUS_METHODS[best.method]}" for best in bests]
        cells = (Cell(claimed=b.error.printed, note=note) for b, note in zip(bests, notes, strict=True))
        rows.append([dataset, *cells])
    return Table(
        title="The best before, as the paper cites it: top-1 error",
        columns=("dataset", "from ImageNet alone (next to b7)", "from any data (next to L2)"),
        rows=rows,
    )


FINE_TUNING = table_item(
    "fine-tuning",
    fine_tuning_conditions,
    shape=lambda scale: {"label_columns": ("dataset",), "more": [_previous_best()] if scale == "paper" else []},
    first=pretraining,
)
"""Table 3: nine datasets, EfficientNet-b7 and -L2, with rho chosen for each."""
FINE_TUNING_DEFAULT_RHO = table_item(
    "fine-tuning-rho-0.05",
    default_rho_conditions,
    shape=lambda _: {"label_columns": ("dataset",)},
    first=pretraining,
)
