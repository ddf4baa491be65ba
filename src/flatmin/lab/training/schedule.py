"""The learning rate as a function of the step: a pure function, without state to save."""

import math
from collections.abc import Sequence
from itertools import pairwise

from flatmin.lab.spec.experiment import Optim

STEP_DECAY = ((0.3, 0.2), (0.6, 0.2), (0.8, 0.2))
"""After which part of all steps the rate is multiplied by what: Wide ResNets' 60, 120 and 160 of 200 epochs."""


def learning_rate(optim: Optim, step: int, num_steps: int, steps_per_epoch: int) -> float:
    r"""Return the learning rate of a step.

    It rises linearly to its peak during warm-up; then, with t the part of the remaining steps that is done,
    cosine is :math:`\frac{1}{2} (1 + \cos \pi t)` of the peak, constant stays, and step falls as in Zagoruyko and
    Komodakis (2016), counted over all steps.

    Args:
        optim: peak, schedule and warm-up.
        step: the number of the step, from 0.
        num_steps: steps of the whole run.
        steps_per_epoch: steps of an epoch, for the length of the warm-up.

    Example:
        >>> [round(learning_rate(Optim(lr=1.0), step, 4, 4), 2) for step in range(4)]
        [1.0, 0.85, 0.5, 0.15]
    """
    num_warmup = round(optim.warmup_epochs * steps_per_epoch)
    if step < num_warmup:
        return optim.lr * (step + 1) / (num_warmup + 1)
    match optim.schedule:
        case "cosine":
            done = (step - num_warmup) / (num_steps - num_warmup)
            return optim.lr * (1 + math.cos(math.pi * done)) / 2
        case "step":
            return optim.lr * math.prod(factor for part, factor in STEP_DECAY if step >= part * num_steps)
        case "constant":
            return optim.lr


DECAYS = ((10.0, 0.5, 0.3), (4.0, 0.75, 0.1))
"""At how many times the target loss, and after which part of all epochs at the latest, the learning rate of a run that
is to stop at a loss is at most which part of the schedule's."""
DECAYED = DECAYS[-1][-1]
TOLERANCE = 0.1
"""How far from the target loss, relative to it, a run may stop."""
MOST_FALL = 0.8
"""To what share of itself the loss is meant to fall in an epoch on the way to the target, at most."""
SLOWER, FASTER = 0.25, 2.0
"""How much the learning rate may change from one such epoch to the next."""


def settles(loss: float, target: float) -> bool:
    """Return whether a run with a target loss stops: it is in the band around it, or has jumped over."""
    return loss <= (1 + TOLERANCE) * target


def settling_factor(losses: Sequence[float | None], target: float, epochs: int) -> float:
    r"""Return the factor of the learning rate in the next epoch of a run that is to stop at a target loss.

    It is 1 until the evaluated loss has been at most 10 times the target, or half of the epochs are done; then at most
    0.3, and at most 0.1 from 4 times the target, or three quarters of the epochs, on. Between these limits the loss
    sets the pace: after an epoch in which it fell from :math:`L'` to :math:`L`, the factor is multiplied by
    :math:`\log a / \log (L / L')` with :math:`a = \max(target / L, 0.8)`, but by no less than 1/4 and no more than 2.
    If the logarithm of the loss falls in proportion to the learning rate, the next epoch ends at the target or at 80 %
    of the loss: the band around the target is not jumped over.

    Args:
        losses: after each epoch so far; None for one that is not finite.
        target: the loss to stop at.
        epochs: of the whole run.

    Example:
        From 0.2 to 0.1 is one halving; the next fall should be to 80 %, :math:`\log 0.8 / \log 0.5 = 0.32` of that:

        >>> [round(settling_factor(losses, 0.05, 99), 3) for losses in ([], [0.4], [0.4, 0.2], [0.4, 0.2, 0.1])]
        [1.0, 0.3, 0.097, 0.031]
    """
    factor, lowest = 1.0, math.inf
    known = [math.inf, *(math.inf if loss is None else loss for loss in losses)]
    for epoch, (before, loss) in enumerate(pairwise(known), start=1):
        lowest = min(lowest, loss)
        if factor < 1:
            pace, aim = loss / before, max(target / loss, MOST_FALL)
            change = math.log(aim) / math.log(pace) if 0 < pace < 1 else FASTER
            factor *= min(max(change, SLOWER), FASTER)
        reached = (limit for at, part, limit in DECAYS if lowest <= at * target or epoch >= part * epochs)
        factor = min(factor, 1.0, *reached)
    return factor
