"""How often a step of training passes forward and backward through the network."""

from flatmin.lab.spec.experiment import Experiment

SECOND_ORDER_PASSES = 4
"""The two gradients of SAM, and the product with the Hessian, which costs about two more."""


def passes_per_step(experiment: Experiment) -> int:
    """Return the forward and backward passes of a step: 1 without SAM, one more than ascent steps with it; m adds none.

    A random direction needs no gradient at w, but batch norm needs a pass there for its statistics.
    """
    optim, model = experiment.optim, experiment.model
    if optim.rho == 0:
        return 1
    if optim.second_order:
        return SECOND_ORDER_PASSES
    if optim.direction == "random":
        return 1 if model.norm == "none" or model.name.startswith("cnn-") else 2
    return optim.ascent_steps + 1
