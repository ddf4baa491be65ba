"""The two scales below the paper's: a laptop's two cores, and seconds.

The laptop's settings were found by validation error alone: networks with far more parameters than examples, which fit
their training set, so that what is measured is generalization.
"""

from dataclasses import replace

from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies.conditions import SEEDS
from flatmin.lab.studies.item import Scale

LAPTOP_RHOS = (0.05, 0.1, 0.2, 0.5)
"""The upper part of the paper's grid: small networks on few examples take a larger rho."""
LAPTOP_LRS, LAPTOP_DECAYS = (0.05, 0.1), (5e-4, 1e-3)
LAPTOP_M = 16

LAPTOP = {
    "fashion-mnist": Experiment(
        data=Data(name="fashion-mnist", train_size=1000, batch_size=128),
        model=Model(name="wrn-10-2"),
        optim=Optim(),
        epochs=40,
        evaluate_every=40,
    ),
    "cifar10": Experiment(
        data=Data(name="cifar10", train_size=1000, batch_size=128),
        model=Model(name="wrn-10-2"),
        optim=Optim(),
        epochs=40,
        evaluate_every=40,
    ),
}
"""What conditions start from, by dataset."""
SMALL_IMAGE_SIZE = 14
"""Of grids and of extra conditions: images are scaled down to 14 x 14 pixels, with smoothing. A pass then costs about a
quarter of one at 28 x 28."""

CUTS: dict[str, tuple[str, ...]] = {
    "table1": (
        "Fashion-MNIST with basic augmentation (it is Table 5's condition)",
        "CIFAR-10 with AutoAugment",
        "PyramidNet, with and without ShakeDrop",
        "Shake-Shake sees images of 14 x 14 pixels, and its learning rate is not tuned",
    ),
    "label-noise": (
        "60 % noise",
        "at 20 % and 80 % noise: images of 14 x 14 pixels; SGD, Mixup and SAM only (no bootstrapping, no m = 16)",
    ),
    "svhn-fashion": ("SVHN", "Fashion-MNIST with Cutout", "Shake-Shake", "images of 14 x 14 pixels"),
    "rho-0.05": ("all but CIFAR-10 with WRN-10-2 and basic augmentation",),
    "noise-and-rho": ("60 % noise", "rho = 0.01 and 0.02", "images of 14 x 14 pixels"),
    "m-and-rho": ("m below 16 (the paper's smallest is 4)", "images of 14 x 14 pixels"),
    "predictive": ("24 of 72 models: those of width 3", "images of 14 x 14 pixels"),
    "p-norm": ("random perturbations of length 0.2", "images of 14 x 14 pixels"),
    "inner-steps": ("CIFAR-100", "images of 14 x 14 pixels"),
}
"""What an item leaves out at laptop scale so that all items fit on two cores; what is not here is planned."""


def cut_notes(item: str, scale: Scale) -> list[str]:
    """Return the note that lists what an item leaves out at a scale."""
    return [f"Cut to fit two cores: {'; '.join(CUTS[item])}."] if scale == "laptop" and item in CUTS else []


def small_images(experiment: Experiment) -> Experiment:
    """Return an experiment on images of `SMALL_IMAGE_SIZE`."""
    return replace(experiment, data=replace(experiment.data, image_size=SMALL_IMAGE_SIZE))


SMOKE_SEEDS = (0, 1)


def replica_seeds(scale: Scale) -> tuple[int, ...]:
    """Return the seeds of independent replicas."""
    return SMOKE_SEEDS if scale == "smoke" else SEEDS


def smoke(model: str) -> Experiment:
    """Return an experiment of seconds, on the embedded digits."""
    return Experiment(
        data=Data(train_size=40, batch_size=20, cutout_size=3),
        model=Model(name=model),
        optim=Optim(),
        epochs=1,
        precision="float32",
    )


PAPER_SUMMARY = "The paper's own networks, data and settings; where it gives none, the table below says what was taken."
LAPTOP_SUMMARY = (
    "A small network (WRN-10-2) on 1,000 images of Fashion-MNIST or CIFAR-10 for 40 epochs on a laptop's two cores, "
    "in place of WRN-28-10 and larger on 50,000 images for 200 to 1,800 epochs on 8 GPUs. The network has many "
    "times more parameters than examples. Errors are far higher than the paper's: what can be compared is the sign of "
    "a difference, not its size. The replicas share one subset of the images. Where a method's name has m = 16, "
    "batch norm and SAM see an eighth of a batch at once, as on each of the paper's 8 accelerators."
)
SMOKE_SUMMARY = "One epoch on 40 digits: this shows that everything runs, and nothing else."
SUMMARIES: dict[Scale, str] = {"paper": PAPER_SUMMARY, "laptop": LAPTOP_SUMMARY, "smoke": SMOKE_SUMMARY}
"""What networks trained from scratch have in common, for people."""
