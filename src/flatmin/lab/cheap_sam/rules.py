"""What the study says of itself: what is run, what counts, what fell out, and what was known before."""

from flatmin.lab.cheap_sam.arms import ASCENT, HALF
from flatmin.lab.foret2021 import protocol
from flatmin.lab.studies.conditions import NUM_REPLICAS
from flatmin.lab.studies.statistics import detectable_effect

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
    "378 had uncommitted changes, and after 40 epochs CIFAR-10 was not fit. They are in results/cheap-sam-40-epochs."
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
