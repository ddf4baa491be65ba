"""What the study compares: ways to spend passes, in conditions of Tables 1, 4 and 5 and of the study of `suggest_rho`.

Most runs are those tables' own, by the same protocol. Beyond them are SAM for half the epochs and SAM with the
direction from a quarter of the batch, with noisy labels, and SAM on an eighth of the batch in a perceptron.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flatmin.lab.errors import SpecError
from flatmin.lab.foret2021 import protocol
from flatmin.lab.foret2021.scales import smoke
from flatmin.lab.foret2021.tables.from_scratch import svhn_fashion_conditions, table1_conditions
from flatmin.lab.foret2021.tables.label_noise import LAPTOP_FULL, label_noise_conditions
from flatmin.lab.rho_rule.study import perceptron_condition
from flatmin.lab.spec.experiment import Experiment, passes_per_step
from flatmin.lab.studies.conditions import Condition
from flatmin.lab.studies.methods import Method, stopped_early, with_factors
from flatmin.lab.studies.study import Scale

BASE, SAM = "SGD", "SAM"
ASCENT_PART = 1 / 4
HALF, ASCENT = "SAM, half the epochs", "ascent on 1/4"
OTHERS = ("Mixup", "Bootstrap")
"""How methods of Table 4 begin that are not ways to spend passes on SAM."""


class Look(NamedTuple):
    """How a method is shown."""

    family: str
    """What shares a color in the plot."""
    code: str
    """How it is written in a training loop."""
    is_cheap: bool = False
    """Whether it is tested: it costs less than SAM."""


PLAIN, MICRO = "without SAM", "opt.rho = 0; opt.step_batch(loss_fn, batch, m=16)"
LOOKS = {
    BASE: Look(BASE, PLAIN),
    "SGD, twice the epochs": Look(BASE, PLAIN),
    "SGD, stopped early (clean validation)": Look("SGD, stopped early", PLAIN, is_cheap=True),
    "SGD, stopped early (noisy validation)": Look("SGD, stopped early", PLAIN, is_cheap=True),
    "SGD, m = 16": Look("SGD, m = 16", MICRO, is_cheap=True),
    "SGD, m = 16, twice the epochs": Look("SGD, m = 16", MICRO),
    SAM: Look(SAM, "opt.step(closure)"),
    HALF: Look(SAM, "opt.step(closure)", is_cheap=True),
    protocol.SAM_WITH_M: Look(protocol.SAM_WITH_M, "opt.step_batch(loss_fn, batch, m=16)"),
    "SAM on 1/8": Look("SAM on 1/8", "opt.step_batch(loss_fn, batch, part=1 / 8)", is_cheap=True),
    ASCENT: Look("ascent", "opt.step(closure, ascent=quarter)", is_cheap=True),
}


def conditions(scale: Scale) -> list[Condition]:
    """Return the conditions, with what they are called here."""
    if scale == "paper":
        raise SpecError("cheap-sam is our own study, which is not in the paper: use --scale laptop.")
    if scale == "smoke":
        return [_smoke_condition()]
    noisy = next(c for c in label_noise_conditions(scale) if c.column == f"{LAPTOP_FULL} %")
    noisy = replace(noisy, methods=(*noisy.methods, *OUR_ARMS))
    return [
        _named(noisy, "Fashion-MNIST", f"{LAPTOP_FULL} % noisy labels"),
        _named(table1_conditions(scale)[0], "CIFAR-10", "clean labels"),
        _named(svhn_fashion_conditions(scale)[0], "Fashion-MNIST", "clean labels"),
        _named(perceptron_condition(), "Digits, perceptron", "40 % noisy labels"),
    ]


def _named(condition: Condition, label: str, column: str) -> Condition:
    methods = tuple(method for method in condition.methods if not method.name.startswith(OTHERS))
    return replace(condition, labels=(label,), column=column, methods=methods, claimed={})


def _smoke_condition() -> Condition:
    start = replace(smoke("cnn-2"), epochs=2, evaluate_every=2)
    start = replace(start, data=replace(start.data, label_noise=0.4))
    sgd, longer = protocol.baselines()
    early = [stopped_early(sgd, 1, noisy=noisy) for noisy in (False, True)]
    sams = (protocol.sam((sgd,)), protocol.sam((sgd,), part=protocol.PART))
    methods = (sgd, longer, *early, *sams, *OUR_ARMS)
    return Condition(labels=("digits",), column="40 % noisy labels", start=start, methods=methods, claimed={})


def _half_the_epochs(base: Experiment) -> Sequence[Experiment]:
    return with_factors()(replace(base, epochs=base.epochs // 2, evaluate_every=base.evaluate_every // 2))


def _direction_from_a_part(base: Experiment) -> Sequence[Experiment]:
    return [replace(e, optim=replace(e.optim, ascent_part=ASCENT_PART)) for e in with_factors()(base)]


OUR_ARMS = tuple(
    Method(name=name, candidates=candidates, after=BASE, extends=True)
    for name, candidates in ((HALF, _half_the_epochs), (ASCENT, _direction_from_a_part))
)
"""What no table of the paper has."""


def cost_in_passes(experiment: Experiment, epochs: int, trained: float | None = None) -> float:
    """Return the passes over the training set relative to training without SAM for the given number of epochs.

    ``trained`` is how many epochs count, all of the experiment's if None.

    Example:
        >>> from flatmin.lab.spec.experiment import Optim
        >>> cost_in_passes(Experiment(optim=Optim(rho=0.1, part=1 / 8), epochs=200), 200)
        1.125
        >>> cost_in_passes(Experiment(optim=Optim(rho=0.1), epochs=100), 200)
        1.0
        >>> cost_in_passes(Experiment(epochs=200), 200, trained=50)
        0.25
    """
    return passes_per_step(experiment) * (experiment.epochs if trained is None else trained) / epochs
