"""The settings of Foret et al. (2021) at the paper's scale: complete experiments, with SAM at the paper's rho.

Tables 6 and 7 are laid out as in the paper. `sources` says where each setting comes from.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from flatmin.lab.foret2021.claims.tables import FINETUNING_DATASETS
from flatmin.lab.spec.datasets import dataset_info
from flatmin.lab.spec.experiment import Augment, Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import NUM_REPLICAS as NUM_REPLICAS
from flatmin.lab.studies.cost import BIRDSNAP
from flatmin.lab.studies.methods import VALIDATION as VALIDATION
from flatmin.lab.studies.printed import table_rows

RHO_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DEFAULT_RHO = 0.05
DROP_LAST = CUTOUT_SHARED = True
CROP_PADDING = 32
RESIZE: Literal["bicubic"] = "bicubic"


def paper(
    model: str,
    epochs: int,
    lr: float,
    *,
    dataset: str = "cifar10",
    weight_decay: float = 5e-4,
    rho: float = DEFAULT_RHO,
    batch_size: int = 256,
    num_accelerators: int = 8,
    label_smoothing: float = 0.0,
    clip_norm: float = 5.0,
) -> Experiment:
    """Return an experiment with what the reference code adds to the paper.

    Each accelerator had its own perturbation: m is the batch size divided by their number (m-sharpness, Section 4.1).
    The models of the reference code are built as there (`Model.design`).

    Example:
        >>> paper("wrn-28-10", 200, 0.1).optim.m
        32
    """
    coded = model.startswith(("wrn-", "shake-shake-", "pyramidnet-"))
    augment: Augment = "basic" if dataset in SMALL_IMAGES else "imagenet"
    return Experiment(
        data=Data(name=dataset, augment=augment, batch_size=batch_size, drop_last=DROP_LAST),
        model=Model(name=model, design="reference" if coded else "standard"),
        optim=Optim(
            lr=lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=weight_decay,
            decay="loss",
            schedule="cosine",
            label_smoothing=label_smoothing,
            clip_norm=clip_norm,
            rho=rho,
            m=batch_size // num_accelerators if num_accelerators > 1 else None,
        ),
        epochs=epochs,
    )


def without_sam(experiment: Experiment) -> Experiment:
    """Return an experiment with the same settings and rho = 0."""
    return replace(experiment, optim=replace(experiment.optim, rho=0.0))


SMALL_IMAGES = ("cifar10", "cifar100", "svhn", "fashion-mnist")
_CIFAR = """
# Table 6                       | lab's name                   | epochs | LR   | WD     | rho (C-10) | rho (C-100)
WRN-28-10 (200 epochs)          | wrn-28-10                    | 200    | 0.1  | 0.0005 | 0.05       | 0.1
WRN-28-10 (1800 epochs)         | wrn-28-10                    | 1800   | 0.05 | 0.001  | 0.05       | 0.1
Shake-Shake (26 2x96d)          | shake-shake-26-2x96d         | 1800   | 0.02 | 0.0010 | 0.02       | 0.05
PyramidNet                      | pyramidnet-272-200           | 1800   | 0.05 | 0.0005 | 0.05       | 0.2
PyramidNet+ShakeDrop            | pyramidnet-272-200-shakedrop | 1800   | 0.02 | 0.0005 | 0.05       | -
PyramidNet+ShakeDrop            | pyramidnet-272-200-shakedrop | 1800   | 0.05 | 0.0005 | -          | 0.05
"""
_SVHN_FASHION = """
# Table 7              | lab's name           | epochs | LR   | WD     | dataset       | rho
Wide-ResNet-28-10      | wrn-28-10            | 200    | 0.01 | 0.0005 | svhn          | 0.01
Shake-Shake (26 2x96d) | shake-shake-26-2x96d | 200    | 0.01 | 0.0005 | svhn          | 0.01
Wide-ResNet-28-10      | wrn-28-10            | 200    | 0.1  | 0.0005 | fashion-mnist | 0.05
Shake-Shake (26 2x96d) | shake-shake-26-2x96d | 200    | 0.1  | 0.0005 | fashion-mnist | 0.02
"""


def _tabulated(dataset: str, *columns: str) -> Experiment:
    model, epochs, lr, decay, rho = columns
    return paper(model, int(epochs), float(lr), dataset=dataset, weight_decay=float(decay), rho=float(rho))


CIFAR: Mapping[tuple[str, str], Experiment] = {
    (row, dataset): _tabulated(dataset, *columns, rho)
    for row, *columns, rho10, rho100 in table_rows(_CIFAR)
    for dataset, rho in (("cifar10", rho10), ("cifar100", rho100))
    if rho != "-"
}
"""Tables 1, 6 and 9, by the model's row (`claims.CIFAR_ROWS`) and the dataset."""
SVHN_FASHION: Mapping[tuple[str, str], Experiment] = {
    (row, dataset): _tabulated(dataset, *columns, rho) for row, *columns, dataset, rho in table_rows(_SVHN_FASHION)
}
"""Tables 5 and 7, by the model's row and the dataset."""


def small_image_augment(dataset: str, augment: str) -> Augment:
    """Return the lab's augmentation for a row of Table 1 or 5: Fashion-MNIST's "auto augment" is Cutout alone."""
    match augment:
        case "basic" | "cutout":
            return augment
        case "autoaugment":
            return "cutout" if dataset == "fashion-mnist" else "autoaugment"
    raise ValueError(f"augment must be basic, cutout or autoaugment, but got {augment!r}.")


IMAGENET_IMAGE_SIZE = 224
IMAGENET: Mapping[tuple[str, int], Experiment] = {
    (model, epochs): paper(
        model,
        epochs,
        1.0,
        dataset="imagenet",
        weight_decay=1e-4,
        batch_size=4096,
        num_accelerators=32,
        label_smoothing=0.1,
    )
    for model, epochs in product(("resnet-50", "resnet-101", "resnet-152"), (100, 200, 400))
}
"""Table 2, by model and epochs."""


class FineTuning(NamedTuple):
    """What differs between the models that are fine-tuned (Appendix C.2)."""

    image_size: int
    lr: float
    batch_size: int
    num_accelerators: int
    num_steps: int


FINETUNING: Mapping[str, FineTuning] = {
    "efficientnet-b7": FineTuning(600, 0.016, 1024, 64, 5_000),
    "efficientnet-l2": FineTuning(475, 0.008, 512, 128, 10_000),
}
FINETUNING_TRAIN_SIZES = {
    dataset: BIRDSNAP if dataset == "birdsnap" else dataset_info(dataset).num_train for dataset in FINETUNING_DATASETS
}
FINETUNING_DROPOUT, FINETUNING_DROP_CONNECT = 0.5, 0.2


def epochs_for_steps(num_steps: int, batch_size: int, train_size: int) -> int:
    """Return the number of epochs, at least 1, that comes closest to a number of steps (the last short batch dropped).

    Example:
        >>> epochs_for_steps(5_000, 1024, 50_000), epochs_for_steps(10_000, 512, 50_000)
        (104, 103)
    """
    return max(1, round(num_steps / max(1, train_size // batch_size)))


def finetuning(model: str, dataset: str, held_out: float = 0.0) -> Experiment:
    """Return how a model of `FINETUNING` is fine-tuned on a dataset (Tables 3 and 10).

    Its rho is the paper's default: which one was best for a dataset is not given. If a fraction of the training set is
    held out, more epochs give the same number of steps.
    """
    if model not in FINETUNING or dataset not in FINETUNING_DATASETS:
        raise ValueError(
            f"There is fine-tuning of {', '.join(FINETUNING)} on {', '.join(FINETUNING_DATASETS)}, but got {model!r} "
            f"on {dataset!r}."
        )
    tuned, size, imagenet = FINETUNING[model], FINETUNING_TRAIN_SIZES[dataset], dataset == "imagenet"
    return paper(
        model,
        10 if imagenet else epochs_for_steps(tuned.num_steps, tuned.batch_size, size - round(held_out * size)),
        0.1 if imagenet else tuned.lr,
        dataset="folder:birdsnap" if dataset == "birdsnap" else dataset,
        weight_decay=1e-5,
        batch_size=tuned.batch_size,
        num_accelerators=tuned.num_accelerators,
        label_smoothing=0.1 if imagenet else 0.0,
        clip_norm=1.0 if imagenet else 5.0,
    )


MIXUP_ALPHAS = (1.0, 8.0, 16.0, 32.0)
LABEL_NOISE: Mapping[int, Experiment] = {
    percent: paper("resnet-32", 200, 0.1, rho=rho) for percent, rho in ((20, 0.1), (40, 0.1), (60, 0.1), (80, 0.05))
}
"""Table 4, by noise in percent."""
LANDSCAPES = paper("resnet-56-noshort", 300, 0.1, batch_size=128)
"""Figure 1 (middle, right)."""
HESSIAN = paper("wrn-40-10", 300, 0.05)
"""Figure 3 (left), without batch norm (`Model.norm`)."""
HESSIAN_AT_EPOCHS = (50, 150, 300)
M_SHARPNESS = paper("resnet-20", 200, 0.1)
"""Figure 3 (middle), for each rho of `RHO_GRID` and each m of `M_GRID`."""
M_GRID = (4, 16, 64, 256)
SECOND_ORDER = paper("wrn-40-2", 200, 0.1, num_accelerators=1)
"""Figures 4 and 5."""
NORMS = CIFAR["WRN-28-10 (200 epochs)", "cifar10"]
"""Figure 6: p = 2, p = inf with `rho_of_sup_norm`, and random directions."""
ASCENT_STEPS: Mapping[str, Experiment] = {
    dataset: CIFAR["WRN-28-10 (200 epochs)", dataset] for dataset in ("cifar10", "cifar100")
}
"""Figure 7 and Table 11, by dataset."""
ASCENT_STEPS_GRID = (1, 2, 3, 5)
ASCENT_NUM_RUNS = 20


def rho_of_sup_norm(rho: float, num_parameters: int) -> float:
    r"""Return :math:`\rho / \sqrt d`, with which a perturbation for p = inf is as long as one for p = 2.

    Every entry of it is plus or minus this number, so its Euclidean norm is rho.

    Example:
        >>> rho_of_sup_norm(0.05, 10_000)
        0.0005
    """
    return rho / math.sqrt(num_parameters)
