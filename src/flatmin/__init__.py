"""Sharpness-Aware Minimization for PyTorch, and the tools to measure flat minima."""

from flatmin import core, measures
from flatmin.core import *  # noqa: F403
from flatmin.measures import *  # noqa: F403

__version__ = "0.1.0"

__all__ = core.__all__ + measures.__all__
