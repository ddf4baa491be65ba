"""The learning rate as a function of the step: a pure function, without state to save."""

import math

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
