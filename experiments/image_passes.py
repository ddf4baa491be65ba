"""What runs cost in passes of one model, for comparing items.

from image_passes import weighted_cost  # in passes of a WRN-10-2 on an image of 28 x 28 pixels
"""

from collections.abc import Iterable

from flatmin.lab.foret2021.cost import cost, model_flops, num_models, training_flops
from flatmin.lab.spec.experiment import Data, Experiment, Model
from flatmin.lab.sweeps.jobs import Job

__all__ = ["cost", "model_flops", "num_models", "weighted_cost"]

UNIT = Model(name="wrn-10-2")
"""The model whose pass over an image of `UNIT_DATA` is 1 in `weighted_cost`."""
UNIT_DATA = "fashion-mnist"


def weighted_cost(jobs: Iterable[Job]) -> float:
    """Return `cost`, with each pass weighted by the arithmetic of its network: in passes of a WRN-10-2 on 28 x 28 x 1.

    Example:
        >>> from flatmin.lab.spec.experiment import Data
        >>> one = Experiment(data=Data(name=UNIT_DATA, train_size=100), model=UNIT, epochs=3)
        >>> weighted_cost([Job(experiment=one)])
        300.0
    """
    return training_flops(jobs) / (3 * model_flops(Experiment(data=Data(name=UNIT_DATA), model=UNIT)))
