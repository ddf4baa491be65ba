"""What the study compares, and its rules: ways to spend passes, where Tables 1, 4 and 5 and rho-rule have runs.

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
from flatmin.lab.rho_rule import perceptron_condition
from flatmin.lab.spec.experiment import Experiment, passes_per_step
from flatmin.lab.studies.conditions import NUM_REPLICAS, Condition
from flatmin.lab.studies.methods import Method, stopped_early, with_factors
from flatmin.lab.studies.statistics import detectable_effect
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


# What the study says of itself: what counts, what fell out, and what was known before.

KEPT = 0.9
"""The share of SAM's gain that a cheap method has to keep."""
SPREAD = 0.75
"""Standard deviation of an arm's excess in points: SAM on 1/8 with noisy labels, five pairs of the earlier runs."""
ABOUT = (
    "The conditions of Tables 1, 4 and 5 with basic augmentation, by their protocol and with their runs: 1,000 images "
    "of Fashion-MNIST at 14 x 14 pixels and 2,000 of CIFAR-10 at 16 x 16, WRN-10-2, 200 epochs; and, without batch "
    "norm, a perceptron on 500 digits. The replicas share one subset of the images and one draw of the noisy labels. "
    "Cost counts the examples that pass forward and backward, relative to SGD."
)
EARLIER = (
    "Earlier runs of this study are not evidence and are not used here: all 432 name a script that is in no commit, "
    "378 had uncommitted changes, and after 40 epochs CIFAR-10 was not fit. They are in the history of results/."
)
CUT = (
    "parts of 1/4 and 1/16, and of 1/4 at weight 1",
    "SAM in every 4th or 8th step",
    "Momentum-SAM",
    "the direction from 1/8 or 1/16 of the batch; with clean labels also from 1/4, and SAM for half the epochs",
    "1.25 times the epochs",
    "a vision transformer with AdamW",
    "CIFAR-10 at 32 x 32 pixels",
    "ten replicas with clean labels: five, as in Table 5",
)
_RULES = (
    *protocol.RULES[:2],
    f"An arm that costs less than SAM keeps its gain if its test error is below e0 - {KEPT:g} (e0 - e), with e0 SGD's "
    "error and e SAM's (one-sided paired t-test, 5 %, Holm's correction over all arms of all conditions). It does not "
    "if the 95 % interval of the excess lies above 0. SAM has one eps for the batch where that is trained; elsewhere, "
    f"on clean Fashion-MNIST and in the perceptron, it is SAM with m = {protocol.M}.",
    "Nothing is tested where SAM has no gain to keep: where the 95 % interval of its gain over SGD reaches 0.",
    "A share of SAM's gain is printed only where the gain is known to within half of itself (95 % interval).",
    "SGD that stops early costs the epochs up to the one that counts; it has to train on to know that it was the best.",
    f"Beyond the runs of Tables 1, 4 and 5 and of rho-rule: “{HALF}” and “{ASCENT}” with noisy labels, which were on "
    "the front of the earlier runs, and SAM on 1/8 in the perceptron. That is all that 6 million image passes allow.",
)
_KNOWN = (
    "Known when the plan was registered: the earlier runs, Table 5's, the perceptron's without a part, and of Table 1 "
    "the runs without SAM and those that choose rho."
)


def rules() -> tuple[str, ...]:
    """Return what was decided before the runs."""
    effect = detectable_effect(SPREAD, NUM_REPLICAS)
    power = (
        f"Power, computed before the runs: {NUM_REPLICAS} pairs show a difference of {effect:.2g} points with a "
        "probability of 80 % (paired t-test, two-sided, 5 %, before Holm's correction) if the excess has a standard "
        f"deviation of {SPREAD:g}, as SAM on 1/8 had in the earlier runs."
    )
    return (*_RULES, power, _KNOWN)
