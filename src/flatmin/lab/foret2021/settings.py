"""The settings of Foret et al. (2021) at the paper's scale, typed, for experiments to be built from.

`hyperparameters` says of each where it comes from. Tables 6 and 7 are laid out as in the paper.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal

from flatmin.lab.foret2021.claims.tables import FINETUNING_DATASETS
from flatmin.lab.spec.experiment import Augment, Model, Optim
from flatmin.lab.studies.conditions import BASELINE_EPOCHS_FACTOR as BASELINE_EPOCHS_FACTOR
from flatmin.lab.studies.conditions import NUM_REPLICAS as NUM_REPLICAS
from flatmin.lab.studies.conditions import VALIDATION as VALIDATION
from flatmin.lab.studies.printed import table_rows


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained."""

    model: str
    """The lab's name."""
    epochs: int
    lr: float
    weight_decay: float
    rho: float
    """Of the runs with SAM."""
    batch_size: int = 256
    num_accelerators: int = 8
    """Among how many the batch was divided; each had a perturbation of its own."""
    label_smoothing: float = 0.0
    clip_norm: float = 5.0

    @property
    def m(self) -> int:
        """The number of examples that shared a perturbation (m-sharpness, Section 4.1)."""
        return self.batch_size // self.num_accelerators

    def network(self) -> Model:
        """Return the model; the three of the reference code are built as there (`Model.design`)."""
        coded = self.model.startswith(("wrn-", "shake-shake-", "pyramidnet-"))
        return Model(name=self.model, design="reference" if coded else "standard")

    def optim(self, rho: float) -> Optim:
        """Return the optimizer, with what the reference code adds to the paper; without SAM where rho is 0.

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


RHO_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DEFAULT_RHO = 0.05
LR_GRID = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
DECAY_GRID = (2e-4, 5e-4, 1e-3, 2e-3)
"""With `LR_GRID` the joint grid for the baseline. Ours: the paper has one and does not say which."""
DROP_LAST = True
CUTOUT_SHARED = True

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
# Table 7      | model                  | lab's name           | epochs | LR   | WD     | rho
svhn           | Wide-ResNet-28-10      | wrn-28-10            | 200    | 0.01 | 0.0005 | 0.01
svhn           | Shake-Shake (26 2x96d) | shake-shake-26-2x96d | 200    | 0.01 | 0.0005 | 0.01
fashion-mnist  | Wide-ResNet-28-10      | wrn-28-10            | 200    | 0.1  | 0.0005 | 0.05
fashion-mnist  | Shake-Shake (26 2x96d) | shake-shake-26-2x96d | 200    | 0.1  | 0.0005 | 0.02
"""

CIFAR: Mapping[tuple[str, str], Training] = MappingProxyType(
    {
        (row, dataset): Training(
            model=model, epochs=int(epochs), lr=float(lr), weight_decay=float(decay), rho=float(rho)
        )
        for row, model, epochs, lr, decay, *rhos in table_rows(_CIFAR)
        for dataset, rho in zip(("cifar10", "cifar100"), rhos, strict=True)
        if rho != "-"
    }
)
"""Tables 1, 6 and 9, by the model's row (`claims.CIFAR_ROWS`) and the dataset."""

SVHN_FASHION: Mapping[tuple[str, str], Training] = MappingProxyType(
    {
        (row, dataset): Training(
            model=model, epochs=int(epochs), lr=float(lr), weight_decay=float(decay), rho=float(rho)
        )
        for dataset, row, model, epochs, lr, decay, rho in table_rows(_SVHN_FASHION)
    }
)
"""Tables 5 and 7, by the model's row and the dataset."""


def small_image_augment(dataset: str, augment: str) -> Augment:
    """Return the lab's augmentation for a row of Table 1 or 5: Fashion-MNIST's "auto augment" is Cutout alone."""
    match augment:
        case "basic" | "cutout":
            return augment
        case "autoaugment":
            return "cutout" if dataset == "fashion-mnist" else "autoaugment"
    raise ValueError(f"augment must be basic, cutout or autoaugment, but got {augment!r}.")


IMAGENET_EPOCHS = (100, 200, 400)
IMAGENET_IMAGE_SIZE = 224
IMAGENET: Mapping[tuple[str, int], Training] = MappingProxyType(
    {
        (model, epochs): Training(
            model=model,
            epochs=epochs,
            lr=1.0,
            weight_decay=1e-4,
            rho=0.05,
            batch_size=4096,
            num_accelerators=32,
            label_smoothing=0.1,
        )
        for model, epochs in product(("resnet-50", "resnet-101", "resnet-152"), IMAGENET_EPOCHS)
    }
)
"""Table 2, by network and epochs."""

FINETUNING_MODELS = ("efficientnet-b7", "efficientnet-l2")
FINETUNING_IMAGE_SIZE = MappingProxyType({"efficientnet-b7": 600, "efficientnet-l2": 475})
FINETUNING_LR = MappingProxyType({"efficientnet-b7": 0.016, "efficientnet-l2": 0.008})
FINETUNING_BATCH_SIZE = MappingProxyType({"efficientnet-b7": 1024, "efficientnet-l2": 512})
FINETUNING_ACCELERATORS = MappingProxyType({"efficientnet-b7": 64, "efficientnet-l2": 128})
FINETUNING_STEPS = MappingProxyType({"efficientnet-b7": 5_000, "efficientnet-l2": 10_000})
FINETUNING_TRAIN_SIZES = MappingProxyType(
    {
        "aircraft": 6_667,
        "flowers102": 2_040,
        "pets": 3_680,
        "cars": 8_144,
        "cifar10": 50_000,
        "cifar100": 50_000,
        "birdsnap": 47_386,
        "food101": 75_750,
        "imagenet": 1_281_167,
    }
)
FREEZE_BATCH_NORM = True
FINETUNING_DROPOUT, FINETUNING_DROP_CONNECT = 0.5, 0.2
CROP_PADDING = 32
RESIZE: Literal["bicubic"] = "bicubic"


def epochs_for_steps(num_steps: int, batch_size: int, train_size: int, *, drop_last: bool = False) -> int:
    """Return the number of epochs, at least 1, that comes closest to a number of steps.

    Args:
        num_steps: how many steps are wanted.
        batch_size: examples in a step, at most.
        train_size: examples in an epoch.
        drop_last: whether the last short batch is left out, as in `Data`.

    Example:
        >>> epochs_for_steps(5_000, 1024, 50_000), epochs_for_steps(10_000, 512, 50_000)
        (102, 102)
    """
    whole_batches = drop_last and train_size >= batch_size
    steps_per_epoch = train_size // batch_size if whole_batches else math.ceil(train_size / batch_size)
    return max(1, round(num_steps / steps_per_epoch))


def finetuning(model: str, dataset: str, held_out: float = 0.0) -> Training:
    """Return how a network of `FINETUNING_MODELS` is fine-tuned on a dataset (Tables 3 and 10).

    Its rho is the paper's default: which one was best for a dataset is not given. Where a fraction of the training set
    is held out, more epochs give the same number of steps.
    """
    if model not in FINETUNING_MODELS or dataset not in FINETUNING_DATASETS:
        raise ValueError(
            f"There is fine-tuning of {', '.join(FINETUNING_MODELS)} on {', '.join(FINETUNING_DATASETS)}, but got "
            f"{model!r} on {dataset!r}."
        )
    batch_size, accelerators = FINETUNING_BATCH_SIZE[model], FINETUNING_ACCELERATORS[model]
    if dataset == "imagenet":
        return Training(
            model=model,
            epochs=10,
            lr=0.1,
            weight_decay=1e-5,
            rho=0.05,
            batch_size=batch_size,
            num_accelerators=accelerators,
            label_smoothing=0.1,
            clip_norm=1.0,
        )
    size = FINETUNING_TRAIN_SIZES[dataset]
    return Training(
        model=model,
        epochs=epochs_for_steps(
            FINETUNING_STEPS[model], batch_size, size - round(held_out * size), drop_last=DROP_LAST
        ),
        lr=FINETUNING_LR[model],
        weight_decay=1e-5,
        rho=DEFAULT_RHO,
        batch_size=batch_size,
        num_accelerators=accelerators,
    )


def finetuning_augment(dataset: str) -> Augment:
    """Return the augmentation for fine-tuning: AutoAugment on CIFAR, elsewhere ImageNet's crop and flip alone."""
    return "autoaugment" if dataset in ("cifar10", "cifar100") else "imagenet"


MIXUP_ALPHAS = (1.0, 8.0, 16.0, 32.0)
"""Mixup's baselines try all, and report the best for each noise level."""
LABEL_NOISE: Mapping[int, Training] = MappingProxyType(
    {
        percent: Training(model="resnet-32", epochs=200, lr=0.1, weight_decay=5e-4, rho=rho)
        for percent, rho in ((20, 0.1), (40, 0.1), (60, 0.1), (80, 0.05))
    }
)
"""Table 4, by noise in percent."""

LANDSCAPES = Training(model="resnet-56-noshort", epochs=300, lr=0.1, weight_decay=5e-4, rho=0.05, batch_size=128)
"""Figure 1 (middle, right)."""
HESSIAN = Training(model="wrn-40-10", epochs=300, lr=0.05, weight_decay=5e-4, rho=0.05)
"""Figure 3 (left), without batch norm (`Model.norm`)."""
HESSIAN_AT_EPOCHS = (50, 150, 300)
M_SHARPNESS = Training(model="resnet-20", epochs=200, lr=0.1, weight_decay=5e-4, rho=0.05)
"""Figure 3 (middle), for each rho of `RHO_GRID` and each m of `M_GRID`."""
M_GRID = (4, 16, 64, 256)
SECOND_ORDER = Training(model="wrn-40-2", epochs=200, lr=0.1, weight_decay=5e-4, rho=0.05, num_accelerators=1)
"""Figures 4 and 5; the lab's second-order terms are those of one eps for the whole batch."""
NORMS = Training(model="wrn-28-10", epochs=200, lr=0.1, weight_decay=5e-4, rho=0.05)
"""Figure 6: p = 2, p = inf with `rho_of_sup_norm`, and random directions."""
ASCENT_STEPS: Mapping[str, Training] = MappingProxyType(
    {dataset: CIFAR["WRN-28-10 (200 epochs)", dataset] for dataset in ("cifar10", "cifar100")}
)
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
