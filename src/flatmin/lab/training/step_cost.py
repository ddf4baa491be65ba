"""How often a step of training passes forward and backward through the model."""

from flatmin.lab.spec.experiment import Experiment

SECOND_ORDER_PASSES = 4
"""The two gradients of SAM, and the product with the Hessian, which costs about two more."""


def passes_per_step(experiment: Experiment) -> float:
    """Return the forward and backward passes of a step, on average: 1 without SAM, 2 with it, 1 + part on a part.

    Each further ascent step is one more; m adds none.

    A random direction needs no gradient at w, but batch norm needs a pass there for its statistics.
    """
    optim, model = experiment.optim, experiment.model
    if not optim.uses_sam:
        return 1
    if optim.second_order:
        return SECOND_ORDER_PASSES
    if optim.direction == "momentum" or optim.weight == 0:
        return 1
    if optim.ascent_part < 1:
        return 1 + optim.ascent_part
    plain = optim.part == 1 and optim.every == 1 and (model.norm == "none" or model.name.startswith("cnn-"))
    if optim.direction == "random" and plain:
        return 1
    return 1 + optim.ascent_steps * optim.part / optim.every
