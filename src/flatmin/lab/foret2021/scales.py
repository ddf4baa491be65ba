"""The two scales below the paper's: a laptop's two cores, and seconds.

The laptop's settings were found by validation error alone: networks with far more parameters than examples, which fit
their training set, so that what is measured is generalization.
"""

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
