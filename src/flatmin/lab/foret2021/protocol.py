"""How the tables are tested on a laptop: trained until the model fits, rho in units that transfer, controls, a gate.

All methods have the paper's learning rate and weight decay (Table 6). rho is chosen on the validation split among
factors of what `flatmin.suggest_rho` says before the first step, and the grid grows where the best is at its edge.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
from flatmin.lab.studies import methods
from flatmin.lab.studies.conditions import MAX_EXTENSIONS
from flatmin.lab.studies.methods import FACTORS, Method, no_tuning, with_factors, with_m
from flatmin.lab.studies.study import Scale

M, PART = 16, 1 / 8
"""The paper's m is an eighth of the batch; so is the part of cheap SAM."""
SAM_WITH_M = f"SAM, m = {M}"
MOST_TRAIN_ERROR, MOST_NOISY_TRAIN_ERROR = 2.0, 5.0
"""The gate, in %: of the baseline that counts, at the end of training, on the labels as given."""
NOISE_WITHOUT_AUGMENTATION = 80
"""From how many per cent on noisy labels are trained without augmentation."""
METRICS = ("test_error", "test_loss", "test_ece")
RULES = (
    "Gate: a comparison is a test of the claim only if the baseline that counts ends with a training error of at most "
    f"{MOST_TRAIN_ERROR:g} % (with noisy labels {MOST_NOISY_TRAIN_ERROR:g} % on the labels as given), and if the "
    "chosen rho is inside its grid. Otherwise the verdict is “not tested at this scale”, and the comparison counts as "
    "not rejected in Holm's correction. Mixup, whose training error is one on mixed images, and SGD that stops early "
    "are not asked to fit.",
    f"rho: {', '.join(f'{f:g}' for f in FACTORS)} times the suggestion, chosen by validation error, one run each. If "
    f"the best is at the edge, the grid is extended by a factor of 2, at most {MAX_EXTENSIONS} times.",
    "Learning rate 0.1 and weight decay 0.0005 are the paper's (Table 6, WRN-28-10, 200 epochs) and are not tuned.",
    "Baselines: SGD, or SGD with twice the epochs, whichever has the lower mean. SAM with m is compared with SGD by "
    "micro-batches of m where that was trained (batch norm then sees as few examples at once), otherwise with SGD.",
    "Tests: paired by seed, two-sided t-test, 5 %, Holm's correction over the comparisons of the paper's claims; those "
    "that are ours are corrected apart.",
    "Before the plan, one pilot each (SGD, 200 epochs, seed 2000, which no other run has) ended with training errors "
    "of 0.7 % on CIFAR-10 with Cutout and 0.3 % on Fashion-MNIST with basic augmentation: both pass the gate. Cutout "
    "stands for the stronger augmentations because it is cheaper than AutoAugment.",
)


def cifar10(**data: object) -> Experiment:
    """Return the start of Table 1's conditions: 2,000 images of CIFAR-10 at 16 x 16 pixels for 200 epochs."""
    return _start(Data(name="cifar10", train_size=2000, image_size=16, cutout_size=8, **data))  # type: ignore[arg-type]


def fashion_mnist(**data: object) -> Experiment:
    """Return the start of Tables 4 and 5: 1,000 images of Fashion-MNIST at 14 x 14 pixels for 200 epochs."""
    return _start(Data(name="fashion-mnist", train_size=1000, image_size=14, **data))  # type: ignore[arg-type]


def noisy(percent: int) -> Experiment:
    """Return the start of Table 4's conditions; 80 % of noise is fit only without augmentation, and in 100 epochs."""
    if percent < NOISE_WITHOUT_AUGMENTATION:
        return fashion_mnist(augment="basic", label_noise=percent / 100)
    return replace(fashion_mnist(label_noise=percent / 100), epochs=100, evaluate_every=100)


def _start(data: Data) -> Experiment:
    return Experiment(data=data, model=Model(name="wrn-10-2"), optim=Optim(), epochs=200, evaluate_every=200)


def table_shape(scale: Scale, label_columns: Sequence[str], rules: Sequence[str] = RULES) -> dict[str, Any]:
    """Return what tables by this protocol show: its metrics on a laptop, and its rules."""
    return {"label_columns": label_columns, "rules": rules, "metrics": METRICS if scale == "laptop" else METRICS[:1]}


def baselines(m: int | None = None) -> tuple[Method, Method]:
    """Return SGD and SGD for twice as many epochs; by micro-batches of m as a control for batch norm if m is given."""
    return methods.baselines(no_tuning) if m is None else methods.baselines(with_m(m), f"SGD, m = {m}", "SGD")


def sam(against: Sequence[Method], m: int | None = None, part: float = 1.0) -> Method:
    """Return SAM with one eps for the batch, one for every m examples, or on a part of the batch."""
    name = SAM_WITH_M if m else "SAM on 1/8" if part < 1 else "SAM"
    rivals, candidates = tuple(method.name for method in against), with_factors(m=m, part=part)
    return Method(name=name, candidates=candidates, after="SGD", against=(rivals,), extends=True, ours=part < 1)


def all_arms() -> tuple[Method, ...]:
    """Return every arm: SGD and its control by micro-batches, each also for twice the epochs, and SAM in three ways."""
    sgd, control = baselines(), baselines(M)
    return (*sgd, *control, sam(sgd), sam(control, m=M), sam(sgd, part=PART))


def few_arms() -> tuple[Method, ...]:
    """Return SGD, also for twice the epochs, SAM with the paper's m, and cheap SAM."""
    sgd = baselines()
    return (*sgd, sam(sgd, m=M), sam(sgd, part=PART))
