"""Pretrained networks trained further: Tables 3 and 10 (Section 3.2, Appendices C.2 and C.3)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims import appendix as claims_appendix
from flatmin.lab.foret2021.claims import tables as claims
from flatmin.lab.foret2021.claims.figures import said_in_text
from flatmin.lab.foret2021.claims.tables import FINETUNING_DATASETS, FinetuningCell
from flatmin.lab.foret2021.scales import PAPER_SUMMARY, SMOKE_SUMMARY, replica_seeds, smoke
from flatmin.lab.foret2021.sources import HYPERPARAMETERS
from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.condition_tables import contest_findings
from flatmin.lab.studies.conditions import Contest, Method, as_it_is, hold_contests, twice, with_rho
from flatmin.lab.studies.findings import Cell, Findings, Table
from flatmin.lab.studies.item import Scale
from flatmin.lab.studies.printed import Claimed, Claims
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.runners import Laboratory

CHECKPOINTS = Path("checkpoints")
"""Where pretrained weights are, relative to the working directory: NETWORK.safetensors (or .pth, .pt)."""
LAPTOP_NETWORK = "timm/tf_efficientnet_lite0"
LAPTOP_CHECKPOINT = "checkpoints/efficientnet-lite0.pth"
LAPTOP_RHOS: tuple[float, ...] = (0.01, 0.02, 0.05)
LAPTOP_SUMMARY = (
    "EfficientNet-Lite0, pretrained on ImageNet, on Flowers-102 at 128 pixels for 3 epochs, in place of "
    "EfficientNet-b7 and -L2 at 475 to 600 pixels for 5,000 steps of 1,024 images."
)
SUMMARIES: dict[Scale, str] = {"paper": PAPER_SUMMARY, "laptop": LAPTOP_SUMMARY, "smoke": SMOKE_SUMMARY}


def fine_tuning(scale: Scale, lab: Laboratory) -> Findings:
    """Table 3: nine datasets, EfficientNet-b7 and -L2, with rho chosen for each."""
    found = _findings("fine-tuning", scale, lab, fine_tuning_contests(scale, lab), claims.FINETUNING)
    return replace(found, tables=[*found.tables, _previous_best()]) if scale == "paper" else found


def fine_tuning_contests(scale: Scale, lab: Laboratory) -> list[Contest]:
    """Return the conditions of Table 3; the smallest scale has to train the network first that is then fine-tuned."""
    if scale != "paper":
        return [_small_contest(scale, lab, rho=None)]
    return [
        _paper_contest(model, dataset, rho=None, source=claims.FINETUNING)
        for dataset in FINETUNING_DATASETS
        for model in settings.FINETUNING_MODELS
    ]


def fine_tuning_default_rho(scale: Scale, lab: Laboratory) -> Findings:
    """Table 10: EfficientNet-b7 with rho = 0.05 throughout, nothing chosen."""
    if scale == "paper":
        contests = [
            _paper_contest("efficientnet-b7", dataset, settings.DEFAULT_RHO, claims_appendix.FINETUNING_RHO_005)
            for dataset in FINETUNING_DATASETS
            if dataset != "imagenet"  # not in the paper's table: its rho is 0.05 anyway
        ]
    else:
        contests = [_small_contest(scale, lab, settings.DEFAULT_RHO)]
    return _findings("fine-tuning-rho-0.05", scale, lab, contests, claims_appendix.FINETUNING_RHO_005)


def _findings(item: str, scale: Scale, lab: Laboratory, contests: Sequence[Contest], claimed: Claims[Any]) -> Findings:
    entries, needed = hold_contests(contests, lab, item, replica_seeds(scale))
    return contest_findings(
        entries,
        needed,
        item=item,
        scale=scale,
        claims=claimed,
        about_scale=SUMMARIES[scale],
        label_columns=("dataset",),
        hyperparameters=HYPERPARAMETERS["finetuning"] if scale == "paper" else (),
        notes=said_in_text(item),
    )


def _methods(rhos: Sequence[float], m: int | None) -> tuple[Method, ...]:
    base = Method(name="without SAM", candidates=as_it_is)
    longer = twice(base)
    sam = Method(name="SAM", candidates=with_rho(rhos, m), after=base.name, against=((base.name, longer.name),))
    return base, longer, sam


def _paper_contest(model: str, dataset: str, rho: float | None, source: Claims[FinetuningCell]) -> Contest:
    training = settings.finetuning(model, dataset)
    start = Experiment(
        data=Data(
            name="folder:birdsnap" if dataset == "birdsnap" else dataset,
            augment=settings.finetuning_augment(dataset),
            batch_size=training.batch_size,
            image_size=settings.FINETUNING_IMAGE_SIZE[model],
            drop_last=settings.DROP_LAST,
        ),
        model=Model(
            name=model,
            checkpoint=str(CHECKPOINTS / f"{model}.safetensors"),
            head="keep" if dataset == "imagenet" else "new",
            freeze_batch_norm=settings.FREEZE_BATCH_NORM,
        ),
        optim=training.optim(rho=0.0),
        epochs=training.epochs,
    )
    fixed = rho if rho is not None else training.rho if dataset == "imagenet" else None
    rhos = settings.RHO_GRID if fixed is None else (fixed,)
    sam = "sam" if rho is None else "sam-0.05"
    claimed = {
        (name, "test_error"): source[FinetuningCell(dataset, model, key)]
        for name, key in (("without SAM", "sgd"), ("SAM", sam))
    }
    return Contest(labels=(dataset,), column=model, start=start, methods=_methods(rhos, training.m), claimed=claimed)


def _small_contest(scale: Scale, lab: Laboratory, rho: float | None) -> Contest:
    if scale == "laptop":
        start = Experiment(
            data=Data(name="flowers102", augment="imagenet", batch_size=32, image_size=128),
            model=Model(name=LAPTOP_NETWORK, checkpoint=LAPTOP_CHECKPOINT, head="new", freeze_batch_norm=True),
            optim=Optim(lr=0.02, weight_decay=1e-5, clip_norm=1.0),
            epochs=3,
            evaluate_every=3,
        )
        rhos = LAPTOP_RHOS
    else:
        first = smoke("wrn-10-1")
        first = replace(first, name="fine-tuning/pretraining", data=replace(first.data, seed=1))
        (pretrained,) = lab.outcomes([Job(experiment=first)], "fine-tuning: pretraining")
        checkpoint = f"run:{pretrained.job.name}"
        model = replace(first.model, checkpoint=checkpoint, head="new", freeze_batch_norm=True)
        start = replace(smoke("wrn-10-1"), model=model)
        rhos = (0.02, 0.05)
    return Contest(
        labels=(start.data.name,),
        column=start.model.name,
        start=start,
        methods=_methods(rhos if rho is None else (rho,), None),
        claimed=_nearest_claims(rho) if scale == "laptop" else {},
    )


def _nearest_claims(rho: float | None) -> dict[tuple[str, str], Claimed]:
    """Return the paper's numbers for Flowers-102 with EfficientNet-b7."""
    source, sam = (claims.FINETUNING, "sam") if rho is None else (claims_appendix.FINETUNING_RHO_005, "sam-0.05")
    return {
        (name, "test_error"): source[FinetuningCell("flowers102", "efficientnet-b7", key)]
        for name, key in (("without SAM", "sgd"), ("SAM", sam))
    }


def _previous_best() -> Table:
    rows: list[list[str | Cell]] = []
    for dataset in FINETUNING_DATASETS:
        row: list[str | Cell] = [dataset]
        for model in settings.FINETUNING_MODELS:
            best = claims.PREVIOUS_BEST[dataset, model]
            row.append(
                Cell(claimed=best.error.printed(), note=f"{best.method}, {claims.PREVIOUS_METHODS[best.method]}")
            )
        rows.append(row)
    return Table(
        title="The best before, as the paper cites it: top-1 error",
        columns=("dataset", "from ImageNet alone (beside b7)", "from any data (beside L2)"),
        rows=rows,
    )
