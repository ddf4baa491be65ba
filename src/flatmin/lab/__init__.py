"""The lab: train the paper's models on the paper's data, measure them, and reproduce its tables and figures.

``from flatmin.lab import train, Experiment, Data, Model, Optim`` is its API.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatmin.lab.spec.experiment import Data, Experiment, Model, Optim
    from flatmin.lab.training.engine import train

__all__ = ["Data", "Experiment", "Model", "Optim", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a submodule alone must not load the whole training stack."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flatmin.lab.spec import experiment
    from flatmin.lab.training import engine

    return engine.train if name == "train" else getattr(experiment, name)
