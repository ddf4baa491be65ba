"""Where every setting of Foret et al. (2021) comes from: the paper, its reference code, or us where neither says.

By item, for the reports; the values are those of `settings`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flatmin.lab.foret2021 import settings
from flatmin.lab.foret2021.claims.tables import NOISE_PERCENT
from flatmin.lab.foret2021.settings import Training
from flatmin.lab.studies.findings import Hyperparameter


def _paper(name: str, value: Any, note: str = "") -> Hyperparameter:
    return Hyperparameter(name=name, value=value, source="paper", note=note)


def _code(name: str, value: Any, note: str = "") -> Hyperparameter:
    return Hyperparameter(name=name, value=value, source="reference code", note=note)


def _ours(name: str, value: Any, note: str = "not given") -> Hyperparameter:
    return Hyperparameter(name=name, value=value, source="ours", note=note)


def _tabulated(trainings: Mapping[tuple[str, str], Training], table: str) -> tuple[Hyperparameter, ...]:
    """Learning rate, decay and rho of each row: a table of the paper gives them."""
    return tuple(
        _paper(f"{name}, {dataset}, {row}", value, table)
        for (row, dataset), training in trainings.items()
        for name, value in (
            ("learning rate", training.lr),
            ("weight decay", training.weight_decay),
            ("rho", training.rho),
        )
    )


def _untold(training: Training, note: str = "not given", with_rho: bool = True) -> tuple[Hyperparameter, ...]:
    """What we chose where the paper names no more than the network."""
    return (
        _ours("epochs", training.epochs, note),
        _ours("batch size", training.batch_size, note),
        _ours("learning rate", training.lr, note),
        _ours("weight decay", training.weight_decay, note),
        *((_ours("rho", training.rho, note),) if with_rho else ()),
    )


def _accelerators(training: Training) -> Hyperparameter:
    """How the batch is divided where the paper says so of other experiments only."""
    return _ours("m", training.m, f"not given; {training.num_accelerators} accelerators, as for all of CIFAR")


REFERENCE_CODE = (
    _code("momentum", 0.9, "Nesterov; the paper names momentum for ImageNet and fine-tuning, without Nesterov"),
    _code("learning-rate schedule", "cosine", "no warm-up"),
    _code("gradient clipping", 5.0, "norm of the synchronized gradient at w + eps"),
    _code(
        "weight decay",
        "lambda/2 |w|^2 in the loss",
        "on all parameters, batch norm's too, so that it takes part in the perturbation; in Equation 1 it is lambda "
        "|w|^2 outside of the maximum",
    ),
    _code("last short batch", "dropped"),
    _code("batch-norm statistics", "of the first pass", "on each accelerator; averaged for evaluation"),
)
"""What the reference code adds to the paper in every training."""

PROTOCOL = (
    _paper("replicas", settings.NUM_REPLICAS, "mean and 95 % confidence interval"),
    _paper("epochs without SAM", "as with SAM, or twice as many", "the better of the two is reported"),
    _paper("rho grid", settings.RHO_GRID, "on a validation set; here the values that the paper chose are used"),
    _paper("validation set", settings.VALIDATION, "of the training set"),
    _paper("rho without tuning", settings.DEFAULT_RHO),
    _ours(
        "learning-rate grid",
        settings.LR_GRID,
        "the paper has a joint grid with decay, whose values are not given; not used again",
    ),
    _ours("weight-decay grid", settings.DECAY_GRID, "as above; both contain all values that the paper chose"),
)
"""How conditions are compared and settings chosen (Section 3.1 and Appendix C.1)."""

_SMALL_IMAGES = (
    _paper("batch size", 256),
    _paper("accelerators", 8, "each perturbs for itself, so m = 256 / 8 = 32"),
    _paper("basic augmentation", "flip, padding by 4, random crop"),
    _ours("padding", "black", "the reference code reflects the image"),
    _code("Cutout's mask", "shared by the batch"),
    _code("Cutout's size", 16),
)

_HYPERPARAMETERS: dict[str, tuple[Hyperparameter, ...]] = {
    "cifar": (
        *PROTOCOL,
        *_tabulated(settings.CIFAR, "Table 6"),
        _paper("epochs, WRN-28-10", (200, 1800), "two rows"),
        _code("epochs, Shake-Shake and PyramidNet+ShakeDrop", 1800),
        _ours("epochs, PyramidNet", 1800, "not given; as with ShakeDrop"),
        _code("PyramidNet's depth and alpha", (272, 200), "its widths are rounded, not cut off"),
        _code("Shake-Shake's and ShakeDrop's backward coefficients", "those of the forward pass in pass 1"),
        *_SMALL_IMAGES,
        _code("AutoAugment", "the policy for CIFAR", "on CIFAR-10 and CIFAR-100, with Cutout"),
        _ours("order", "flip and crop, then AutoAugment", "the reference code does AutoAugment first"),
        *REFERENCE_CODE,
    ),
    "svhn-fashion": (
        *PROTOCOL,
        *_tabulated(settings.SVHN_FASHION, "Table 7"),
        _ours("epochs", 200, "not given; the reference code's default"),
        _paper("SVHN's training set", "73257 + 531131 images"),
        _paper("SVHN's auto augment", "the policy for SVHN, and Cutout"),
        _code("SVHN's auto augment", "without the basic augmentation"),
        _paper("Fashion-MNIST's auto augment", "Cutout alone"),
        _ours(
            "Fashion-MNIST's normalization",
            "its own mean and standard deviation",
            "the reference code has MNIST's, 0.1307 and 0.3081",
        ),
        *_SMALL_IMAGES,
        *REFERENCE_CODE,
    ),
    "imagenet": (
        _paper("epochs", settings.IMAGENET_EPOCHS),
        _paper("batch size", 4096),
        _paper("accelerators", 32, "so m = 4096 / 32 = 128, if each core perturbs for itself"),
        _paper("learning rate", 1.0, "cosine schedule"),
        _paper("weight decay", 1e-4),
        _paper("momentum", 0.9),
        _paper("label smoothing", 0.1),
        _paper("rho", 0.05, "from a grid search on ResNet-50 for 100 epochs"),
        _paper("input size", settings.IMAGENET_IMAGE_SIZE),
        _code("augmentation", "random resized crop, flip"),
        _paper("replicas", settings.NUM_REPLICAS),
        *REFERENCE_CODE,
    ),
    "finetuning": (
        _paper("learning rate, EfficientNet-b7", 0.016),
        _paper("learning rate, EfficientNet-L2", 0.008),
        _paper("weight decay", 1e-5),
        _paper("batch size, EfficientNet-b7", 1024),
        _paper("batch size, EfficientNet-L2", 512),
        _paper("accelerators, EfficientNet-b7", 64, "so m = 1024 / 64 = 16, if each core perturbs for itself"),
        _paper("accelerators, EfficientNet-L2", 128, "so m = 512 / 128 = 4"),
        _paper("steps, EfficientNet-b7", 5_000, "20k steps of 256 elsewhere; epochs follow from the training set"),
        _paper("steps, EfficientNet-L2", 10_000, "'adjusted accordingly': as many examples as for b7"),
        _paper("input size, EfficientNet-L2", 475),
        _code("input size, EfficientNet-b7", 600, "CIFAR's images are enlarged to it"),
        _paper("momentum", 0.9),
        _paper("batch-norm statistics", "the checkpoint's, frozen"),
        _paper("last layer", "new", "on ImageNet the checkpoint's"),
        _paper("augmentation, CIFAR", "AutoAugment"),
        _paper(
            "augmentation, other datasets",
            "ImageNet's random crop and flip alone",
            "the paper: no augmentation, and the same preprocessing as for ImageNet, which in the reference code crops "
            "and flips",
        ),
        _ours("rho", settings.RHO_GRID, "which one was best for a dataset is not given; Table 10 has 0.05"),
        _ours("label smoothing", 0.0),
        _ours(
            "Birdsnap's training set", settings.FINETUNING_TRAIN_SIZES["birdsnap"], "images; the paper names no split"
        ),
        _paper("epochs, ImageNet", 10),
        _paper("learning rate, ImageNet", 0.1, "with both networks"),
        _paper("rho, ImageNet", 0.05, "the reference code's example has 0.1"),
        _code("label smoothing, ImageNet", 0.1, "of its example"),
        _code("gradient clipping, ImageNet", 1.0, "of its example"),
        _paper("replicas", settings.NUM_REPLICAS),
        *REFERENCE_CODE,
    ),
    "label-noise": (
        _paper("network", "ResNet-32"),
        _paper("epochs", 200),
        _paper("noise, %", NOISE_PERCENT, "labels flipped at random; the test set is clean"),
        _paper("rho", {percent: training.rho for percent, training in settings.LABEL_NOISE.items()}),
        _paper("rho grid", settings.RHO_GRID, "on a clean validation set, 10 % of the training set (Table 8)"),
        _paper("Mixup's alpha", settings.MIXUP_ALPHAS, "the best for each noise level is reported"),
        _paper("batch size", 256, "as for all of CIFAR-10"),
        _paper("accelerators", 8, "as for all of CIFAR-10, so m = 32"),
        _paper("augmentation", "basic", "as for all of CIFAR-10"),
        _ours("learning rate", 0.1),
        _ours("weight decay", 5e-4),
        _ours("replicas", settings.NUM_REPLICAS, "not given for this table"),
        *REFERENCE_CODE,
    ),
    "landscapes": (
        _paper("network", "ResNet-56 without residual connections", "the checkpoint of Li et al. (2017) for SGD"),
        _accelerators(settings.LANDSCAPES),
        *_untold(settings.LANDSCAPES, "not given; rho is the paper's default, the rest after Li et al. (2017)"),
        *REFERENCE_CODE,
    ),
    "hessian": (
        _paper("network", "WRN-40-10 without batch norm"),
        _paper("epochs", settings.HESSIAN.epochs, "the paper says '300 steps' beside 'different epochs'"),
        _ours("epochs looked at", settings.HESSIAN_AT_EPOCHS),
        _accelerators(settings.HESSIAN),
        _ours("learning rate", settings.HESSIAN.lr, "not given; below the usual one, as there is no batch norm"),
        _ours("weight decay", settings.HESSIAN.weight_decay),
        _ours("rho", settings.HESSIAN.rho, "not given; the paper's default"),
        _ours("augmentation", "basic"),
        *REFERENCE_CODE,
    ),
    "m-sharpness": (
        _ours("network", settings.M_SHARPNESS.model, "the paper: 'a small ResNet'"),
        _paper("dataset", "CIFAR-10"),
        _ours("m", settings.M_GRID),
        _ours("rho grid", settings.RHO_GRID, "the figure's values are not given in the text"),
        *_untold(settings.M_SHARPNESS, with_rho=False),
        *REFERENCE_CODE,
    ),
    "predictive-power": (
        _paper(
            "networks",
            "the two public tasks of Predicting Generalization in Deep Learning (NeurIPS 2020)",
        ),
        _paper("measure", "mutual information between m-sharpness and the generalization gap"),
        _ours("m", settings.M_GRID),
    ),
    "second-order": (
        _paper("network", "WRN-40-2"),
        _paper("dataset", "CIFAR-10"),
        _ours("m", settings.SECOND_ORDER.m, "one eps for the whole batch"),
        *_untold(settings.SECOND_ORDER),
        *REFERENCE_CODE,
    ),
    "norms": (
        _ours("network", settings.NORMS.model, "the paper: 'a wide ResNet'"),
        _paper("dataset", "CIFAR-10"),
        _paper("perturbations", "p = 2, p = inf, random of fixed Euclidean norm"),
        _ours("rho grid, p = 2 and random", settings.RHO_GRID, "the figure's values are not given in the text"),
        _ours("rho grid, p = inf", "rho / sqrt(number of parameters)", "not given; as long as for p = 2"),
        _accelerators(settings.NORMS),
        *_untold(settings.NORMS, "not given; Table 6's WRN-28-10 (200 epochs)", with_rho=False),
        *REFERENCE_CODE,
    ),
    "ascent-steps": (
        _ours(
            "network",
            settings.ASCENT_STEPS["cifar10"].model,
            "the paper: 'a WideResNet'; its errors after one step are near Table 1's WRN-28-10 (200 epochs), basic",
        ),
        _paper("ascent steps", settings.ASCENT_STEPS_GRID),
        _paper("replicas", settings.ASCENT_NUM_RUNS, "mean and standard deviation"),
        _accelerators(settings.ASCENT_STEPS["cifar10"]),
        *_untold(settings.ASCENT_STEPS["cifar10"], "CIFAR-10; not given; Table 6's"),
        *_untold(settings.ASCENT_STEPS["cifar100"], "CIFAR-100; not given; Table 6's"),
        *REFERENCE_CODE,
    ),
    "bound": (
        _ours("rho", settings.RHO_GRID, "the paper gives no value of the bound"),
        _ours("delta", 0.05),
    ),
}

HYPERPARAMETERS: Mapping[str, tuple[Hyperparameter, ...]] = MappingProxyType(_HYPERPARAMETERS)
"""By item; the rho = 0.05 tables are those of "cifar" and "finetuning", Table 8 is of "label-noise"."""
