"""What is trained at each scale: the paper's own, a laptop's two cores, and seconds.

The laptop's settings were found by validation error alone: models with far more parameters than examples, which fit
their training set: what is measured is generalization.
"""

from collections.abc import Sequence
from dataclasses import replace

from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import replica_seeds
from flatmin.lab.studies.study import Scale
from flatmin.lab.sweeps.jobs import Job
from flatmin.lab.sweeps.measurements import Measurement

LAPTOP_RHOS = (0.05, 0.1, 0.2, 0.5)
"""The upper part of the paper's grid: small models on few examples take a larger rho."""
LAPTOP_M = 16

LAPTOP = {
    name: Experiment(
        data=Data(name=name, train_size=1000, batch_size=128),
        model=Model(name="wrn-10-2"),
        optim=Optim(),
        epochs=40,
        evaluate_every=40,
    )
    for name in ("fashion-mnist", "cifar10")
}
"""What conditions start from, by dataset."""
SMALL_IMAGE_SIZE = 14
"""Of figures and of extra conditions: images are scaled down to 14 x 14 pixels, with smoothing. A pass then costs about
a quarter of one at 28 x 28."""

CUTS: dict[str, tuple[str, ...]] = {
    "table1": (
        "Fashion-MNIST with basic augmentation (it is Table 5's condition)",
        "AutoAugment",
        "Shake-Shake, and PyramidNet with and without ShakeDrop: not testable on two cores",
        "CIFAR-100",
    ),
    "label-noise": (
        "60 % noise",
        "Bootstrap + Mixup, and Mixup with twice the epochs",
        "at 20 % and 80 % noise: SAM with one eps for the batch, SAM on 1/8, bootstrapping, SGD by micro-batches",
        "images of 14 x 14 pixels",
    ),
    "imagenet": ("images of 16 x 16 pixels",),
    **dict.fromkeys(
        ("fine-tuning", "fine-tuning-rho-0.05"),
        ("all datasets but Flowers-102", "EfficientNet-L2", "1,440 of 2,040 images", "images of 48 x 48 pixels"),
    ),
    "svhn-fashion": ("SVHN", "Fashion-MNIST with Cutout", "Shake-Shake", "images of 14 x 14 pixels"),
    "rho-0.05": ("all but CIFAR-10 with WRN-10-2 and basic augmentation",),
    "noise-and-rho": ("60 % noise", "rho = 0.01 and 0.02", "images of 14 x 14 pixels"),
    "m-and-rho": ("augmentation: a model that fits with it takes four times as long", "images of 14 x 14 pixels"),
    "predictive": ("96 of 192 settings: half of all combinations", "images of 14 x 14 pixels"),
    "p-norm": ("random perturbations of length 0.2", "images of 14 x 14 pixels"),
    "inner-steps": ("CIFAR-100", "images of 14 x 14 pixels"),
    "hessian": ("augmentation: the model, which has no batch norm, does not fit with it", "images of 14 x 14 pixels"),
    **dict.fromkeys(("landscape", "second-order", "bound"), ("images of 14 x 14 pixels",)),
}
"""What an item leaves out at laptop scale so that all items fit on two cores; what is not here is planned."""


def small_images(experiment: Experiment) -> Experiment:
    """Return an experiment on images of `SMALL_IMAGE_SIZE`."""
    return replace(experiment, data=replace(experiment.data, image_size=SMALL_IMAGE_SIZE))


def smoke(model: str) -> Experiment:
    """Return an experiment of seconds, on the embedded digits."""
    return Experiment(
        data=Data(train_size=40, batch_size=20, cutout_size=3),
        model=Model(name=model),
        optim=Optim(),
        epochs=1,
        precision="float32",
    )


LAPTOP_START = small_images(LAPTOP["fashion-mnist"])
LAPTOP_RHO = 0.2
"""SAM's rho on a laptop, where a figure does not choose it."""
LAPTOP_EPOCHS = LAPTOP_START.epochs
NUM_CURVATURE_REPLICAS = 10
TABLE8_REPLICAS = 3


def sam_rho(scale: Scale, paper: Experiment) -> float:
    """Return SAM's rho where the figure is not about it."""
    return paper.optim.rho_number if scale == "paper" else LAPTOP_RHO


def curvature_seeds(scale: Scale) -> tuple[int, ...]:
    """Return the seeds of landscapes and spectra, which spread more than errors: ten replicas on a laptop."""
    return tuple(range(NUM_CURVATURE_REPLICAS)) if scale == "laptop" else replica_seeds(scale)


def start(scale: Scale, paper: Experiment, *, rho: float) -> Experiment:
    """Return the experiment that a figure varies, evaluated at its end; without SAM where rho is 0."""
    if scale == "paper":
        base = replace(paper, evaluate_every=paper.epochs)
    else:
        base = LAPTOP_START if scale == "laptop" else replace(smoke("cnn-2"), epochs=2, evaluate_every=2)
    return replace(base, optim=replace(base.optim, rho=rho))


def jobs_for(
    experiment: Experiment,
    name: str,
    seeds: Sequence[int],
    measurements: tuple[Measurement, ...] = (),
    curves: tuple[str, ...] = (),
) -> list[Job]:
    """Return a job for each seed."""
    named = replace(experiment, name=name)
    return [Job(experiment=named, seed=seed, measurements=measurements, curves=curves) for seed in seeds]


PAPER_SUMMARY = "The paper's own models, data and settings; where it gives none, the table below says what was taken."
SMOKE_SUMMARY = "One epoch on 40 digits: this shows that everything runs, and nothing else."
SIGN_ONLY = "What can be compared is the sign of a difference, not its size."
LAPTOP_SUMMARIES: dict[tuple[str, ...], str] = {
    ("table1", "svhn-fashion", "rho-0.05"): "A small model (WRN-10-2) on 2,000 images of CIFAR-10 or 1,000 of "
    "Fashion-MNIST for 200 epochs on a laptop's two cores, in place of WRN-28-10 and larger on "
    "50,000 images for 200 to 1,800 epochs on 8 GPUs. The model has many times more parameters than examples. "
    f"Errors are far higher than the paper's. {SIGN_ONLY} The replicas share one subset of the images. Where a "
    "method's name has m = 16, batch norm and SAM see an eighth of a batch at once, as on each of the paper's 8 "
    "accelerators.",
    ("imagenet",): "A small model (WRN-10-2) on 1,000 images of CIFAR-10 for 20, 40 and 80 epochs on a laptop's "
    "two cores, in place of ResNets on the 1.28 million images of ImageNet for 100, 200 and 400 epochs on 32 "
    f"accelerators. The paper's numbers are ResNet-50's. {SIGN_ONLY}",
    ("fine-tuning", "fine-tuning-rho-0.05"): "EfficientNet-Lite0, pretrained on ImageNet, on 600 images of "
    "Flowers-102 at 48 pixels with basic augmentation for 20 epochs, in place of EfficientNet-b7 and -L2 at 475 to 600 "
    "pixels for 5,000 steps of 1,024 images. Batch norm has the checkpoint's statistics, as in the paper. "
    f"{SIGN_ONLY} The replicas share one subset of the images. A batch, and an eps, has 16 images, as on each of the "
    "paper's accelerators for b7.",
    ("label-noise",): "A small model (WRN-10-2) on 1,000 images of Fashion-MNIST for 200 epochs (100 at 80 % noise) on "
    "a laptop's two cores, in place of ResNet-32 on 50,000 images of CIFAR-10 for 200 epochs on 8 GPUs. The model has "
    f"many times more parameters than examples. {SIGN_ONLY} The replicas share one subset of the images and one draw "
    "of noisy labels. The paper reports the best of Mixup's alphas; here it is chosen by validation error.",
    ("noise-and-rho",): "A small model (WRN-10-2) on 1,000 images of Fashion-MNIST for 40 epochs on a laptop's "
    "two cores, in place of ResNet-32 on CIFAR-10 for 200 epochs, with m = 16, an eighth of a batch. The "
    "replicas share one subset of the images and one draw of noisy labels.",
    ("m-and-rho",): "A small model (WRN-10-2) on 1,000 images of Fashion-MNIST, without augmentation, for 50 epochs on "
    "a laptop's two cores, in place of a small ResNet on the 50,000 images of CIFAR-10. The model has many times more "
    f"parameters than examples. {SIGN_ONLY} The replicas share one subset of the images. The paper compares SAM with "
    "several m; here each is compared with SGD by micro-batches of the same m first, because batch norm on few "
    "examples is a regularizer by itself.",
    ("error-reduction",): "The laptop's conditions of Tables 1, 2, 3 and 5: small models on 1,000 or 2,000 "
    "images of CIFAR-10 or 1,000 of Fashion-MNIST, and EfficientNet-Lite0 fine-tuned on Flowers-102, in place of the "
    "paper's models and datasets. What can be compared is the sign of a reduction, not its size.",
}
"""What differs from the paper's experiments on a laptop, by item."""
FIGURES_SUMMARY = (
    "Small models on 1,000 images of Fashion-MNIST, without augmentation, for 40 epochs on a laptop's two cores, in "
    "place of large ones on the 50,000 images of CIFAR. They have many times more parameters than examples and fit "
    f"their training set. {SIGN_ONLY}"
)


def about_scale(item: str, scale: Scale) -> str:
    """Return what differs from the paper's experiment."""
    laptop = next((summary for items, summary in LAPTOP_SUMMARIES.items() if item in items), FIGURES_SUMMARY)
    return {"paper": PAPER_SUMMARY, "laptop": laptop, "smoke": SMOKE_SUMMARY}[scale]
