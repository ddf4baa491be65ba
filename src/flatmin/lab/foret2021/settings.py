"""The settings of Foret et al. (2021) at the paper's scale; Tables 6 and 7 are laid out as in the paper.

A `Training` says which of its fields the paper gives. `sources` has the source of everything else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from flatmin.lab.foret2021.claims.tables import FINETUNING_DATASETS
from flatmin.lab.spec.experiment import Augment, Model, Optim
from flatmin.lab.studies.conditions import NUM_REPLICAS as NUM_REPLICAS
from flatmin.lab.studies.conditions import VALIDATION as VALIDATION
from flatmin.lab.studies.cost import TRAIN_SIZES
from flatmin.lab.studies.findings import Hyperparameter
from flatmin.lab.studies.printed import table_rows

RHO_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DEFAULT_RHO = 0.05
DROP_LAST = CUTOUT_SHARED = True
CROP_PADDING = 32
RESIZE: Literal["bicubic"] = "bicubic"
NAMES = {"model": "model", "epochs": "epochs", "batch_size": "batch size", "lr": "learning rate"}
NAMES |= {"weight_decay": "weight decay", "rho": "rho", "m": "m"}
"""What a page calls the fields of a `Training`, in its order."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, and where that comes from."""

    model: str
    """The lab's name."""
    epochs: int
    lr: float
    weight_decay: float = 5e-4
    rho: float = DEFAULT_RHO
    """Of the runs with SAM."""
    batch_size: int = 256
    num_accelerators: int = 8
    """Among how many the batch was divided; each had its own perturbation."""
    label_smoothing: float = 0.0
    clip_norm: float = 5.0
    given: tuple[str, ...] = ()
    """The fields that the paper gives for this item; the others are ours."""
    note: str = "not given"
    """Why ours are what they are."""

    @property
    def m(self) -> int:
        """The number of examples that shared a perturbation (m-sharpness, Section 4.1)."""
        return self.batch_size // self.num_accelerators

    def network(self) -> Model:
        """Return the model; the three of the reference code are built as there (`Model.design`)."""
        coded = self.model.startswith(("wrn-", "shake-shake-", "pyramidnet-"))
        return Model(name=self.model, design="reference" if coded else "standard")

    def optim(self, rho: float) -> Optim:
        """Return the optimizer, with what the reference code adds to the paper; without SAM if rho is 0.

        Example:
            >>> CIFAR["WRN-28-10 (200 epochs)", "cifar10"].optim(rho=0.05).m
            32
        """
        return Optim(
            lr=self.lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=self.weight_decay,
            decay="loss",
            schedule="cosine",
            label_smoothing=self.label_smoothing,
            clip_norm=self.clip_norm,
            rho=rho,
            m=self.m if self.num_accelerators > 1 else None,
        )

    def hyperparameters(self, *without: str) -> tuple[Hyperparameter, ...]:
        """Return the fields with their sources, except some."""
        return tuple(
            Hyperparameter(name=name, value=getattr(self, field), source="paper")
            if field in self.given
            else Hyperparameter(name=name, value=getattr(self, field), source="ours", note=self.note)
            for field, name in NAMES.items()
            if field not in without
        )


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


def _training(*columns: str) -> Training:
    model, epochs, *rates = columns
    lr, decay, rho = map(float, rates)
    return Training(
        model=model, epochs=int(epochs), lr=lr, weight_decay=decay, rho=rho, note="not given; as for Table 1"
    )


CIFAR: Mapping[tuple[str, str], Training] = {
    (row, dataset): _training(*columns, rho)
    for row, *columns, rho10, rho100 in table_rows(_CIFAR)
    for dataset, rho in (("cifar10", rho10), ("cifar100", rho100))
    if rho != "-"
}
"""Tables 1, 6 and 9, by the model's row (`claims.CIFAR_ROWS`) and the dataset."""
SVHN_FASHION: Mapping[tuple[str, str], Training] = {
    (row, dataset): _training(*columns, rho) for row, *columns, dataset, rho in table_rows(_SVHN_FASHION)
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
IMAGENET: Mapping[tuple[str, int], Training] = {
    (model, epochs): Training(
        model=model,
        epochs=epochs,
        lr=1.0,
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
FINETUNING_TRAIN_SIZES = {dataset: TRAIN_SIZES[dataset] for dataset in FINETUNING_DATASETS}
FINETUNING_DROPOUT, FINETUNING_DROP_CONNECT = 0.5, 0.2


def epochs_for_steps(num_steps: int, batch_size: int, train_size: int) -> int:
    """Return the number of epochs, at least 1, that comes closest to a number of steps (the last short batch dropped).

    Example:
        >>> epochs_for_steps(5_000, 1024, 50_000), epochs_for_steps(10_000, 512, 50_000)
        (104, 103)
    """
    return max(1, round(num_steps / max(1, train_size // batch_size)))


def finetuning(model: str, dataset: str, held_out: float = 0.0) -> Training:
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
    return Training(
        model=model,
        epochs=10 if imagenet else epochs_for_steps(tuned.num_steps, tuned.batch_size, size - round(held_out * size)),
        lr=0.1 if imagenet else tuned.lr,
        weight_decay=1e-5,
        batch_size=tuned.batch_size,
        num_accelerators=tuned.num_accelerators,
        label_smoothing=0.1 if imagenet else 0.0,
        clip_norm=1.0 if imagenet else 5.0,
    )


MIXUP_ALPHAS = (1.0, 8.0, 16.0, 32.0)
LABEL_NOISE: Mapping[int, Training] = {
    percent: Training(model="resnet-32", epochs=200, lr=0.1, rho=rho, given=("model", "epochs", "batch_size", "m"))
    for percent, rho in ((20, 0.1), (40, 0.1), (60, 0.1), (80, 0.05))
}
"""Table 4, by noise in percent."""
LANDSCAPES = Training(
    model="resnet-56-noshort",
    epochs=300,
    lr=0.1,
    batch_size=128,
    given=("model",),
    note="not given; rho is the paper's default, m is for 8 accelerators, the rest follows Li et al. (2018)",
)
"""Figure 1 (middle, right)."""
HESSIAN = Training(
    model="wrn-40-10",
    epochs=300,
    lr=0.05,
    given=("model", "epochs"),
    note="not given; as for all of CIFAR, with a lower learning rate, as there is no batch norm",
)
"""Figure 3 (left), without batch norm (`Model.norm`)."""
HESSIAN_AT_EPOCHS = (50, 150, 300)
M_SHARPNESS = Training(model="resnet-20", epochs=200, lr=0.1)
"""Figure 3 (middle), for each rho of `RHO_GRID` and each m of `M_GRID`."""
M_GRID = (4, 16, 64, 256)
SECOND_ORDER = Training(
    model="wrn-40-2",
    epochs=200,
    lr=0.1,
    num_accelerators=1,
    given=("model",),
    note="not given; one perturbation for the whole batch, as the lab's second-order terms need it",
)
"""Figures 4 and 5."""
NORMS = CIFAR["WRN-28-10 (200 epochs)", "cifar10"]
"""Figure 6: p = 2, p = inf with `rho_of_sup_norm`, and random directions."""
ASCENT_STEPS: Mapping[str, Training] = {
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
