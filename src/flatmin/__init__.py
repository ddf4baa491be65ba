"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""

from flatmin import core, measures
from flatmin.core import *  # noqa: F403
from flatmin.core import EffectivePerturbation, effective_perturbation
from flatmin.measures import *  # noqa: F403

# Their names before 0.2.
RealisedPerturbation, realised_perturbation = EffectivePerturbation, effective_perturbation

__version__ = "0.1.0"

__all__ = ["RealisedPerturbation", "realised_perturbation"]
__all__ += core.__all__
__all__ += measures.__all__
